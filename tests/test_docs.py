"""The documentation runs: Python blocks execute, links resolve, commands and options exist."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_specdec._compat import CACHE_KEY


ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<address>[^)\s]+)\)")
TEST_COMMAND = re.compile(r"^<!-- test command -->\n```bash\n(?P<command>.*?)\n```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, info: str) -> list[tuple[int, str]]:
    """The line number and the code of each block of `page` whose fence says exactly `info`."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("code")), match["code"])
        for match in BLOCK.finditer(text)
        if match["info"] == info
    ]


def outside_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of `page`, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tiny_pair():
    """A tiny Llama, a noisy copy of it as its draft, and a tokenizer with one token per character."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({text: index for index, text in enumerate(characters)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # spreads the logits, so that no two are nearly tied
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: w + 0.1 * w.std() * torch.randn_like(w) for name, w in model.state_dict().items()})
    return model, draft, tokenizer


@pytest.fixture
def names(tmp_path):
    """What a page may use without making it: what its `no-run` blocks would have loaded, on a tiny scale."""
    import torch

    import hf_specdec

    model, draft, tokenizer = tiny_pair()
    prompts = ["def quicksort(items):", "hello world"]
    yield {
        "__name__": "docs",
        "torch": torch,
        "hf_specdec": hf_specdec,
        "EASDConfig": hf_specdec.EASDConfig,
        "model": model,
        "draft": draft,
        "tokenizer": tokenizer,
        "inputs": tokenizer(prompts[0], return_tensors="pt", return_token_type_ids=False),
        "prompts": prompts,
        "folder": str(tmp_path / "saved"),
    }
    hf_specdec.install()  # a page may show how to take the hook away


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_blocks_run(page, names):
    for line, code in blocks(page, "python"):
        code = code.replace(
            "cache=first.cache", f"{CACHE_KEY}=first.{CACHE_KEY}"
        )  # as the page says for older releases
        exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_that_do_not_run_still_parse(page):
    for line, code in blocks(page, "python no-run"):
        compile("\n" * line + code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page):
    for match in LINK.finditer(outside_blocks(page)):
        address, _, anchor = match["address"].partition("#")
        if address.startswith(("http://", "https://")):
            continue
        linked = (page.parent / address).resolve() if address else page
        assert linked.exists(), f"{page_id(page)} links to {address}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{page_id(page)} links to {address}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page):
    """Every `specdec` line names a command, and options that it has."""
    import typer.main

    from hf_specdec.cli import app

    for _, code in blocks(page, "bash"):
        for line in re.findall(r"^specdec .*$", code, re.MULTILINE):
            command, words = typer.main.get_command(app), shlex.split(line)[1:]
            while words and hasattr(command, "commands") and not (words[0].startswith("-") and command.params):
                assert words[0] in command.commands, f"{page_id(page)}: {line}"
                command = command.commands[words.pop(0)]
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
            assert {word for word in words if word.startswith("-")} <= known, f"{page_id(page)}: {line}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_ci_runs_the_readmes_test_command(tmp_path):
    """Run with a `python3` that only says how it was called, the script drops the old environment and obeys the README."""
    command = TEST_COMMAND.search((ROOT / "README.md").read_text())["command"]
    assert command.startswith("python3 -m venv .venv && ")
    assert command.endswith("-m pytest -q -n auto")
    for name in (".ci", ".venv", "bin"):
        (tmp_path / name).mkdir()
    for name in (".ci/run", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "bin" / "python3"
    fake.write_text('#!/bin/sh\necho "called: $*"\nexit 9\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == [f"+ {command}", "called: -m venv .venv"]
    assert result.returncode == 9
    assert not (tmp_path / ".venv").exists()


def test_development_installs_are_constrained():
    for page in PAGES:
        for _, code in blocks(page, "bash"):
            for install in re.findall(r"pip install [^&\n]+", code):
                assert "-c constraints.txt" in install, f"{page_id(page)}: {install}"
