"""A tiny pair of models on disk with one tokenizer, and a runner of commands."""

import json
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli import app
from tests.toys import noisy_copy, tiny_llama


WORDS = ["<pad>", "<unk>", "<user>", "<system>", "<assistant>", *(f"w{index}" for index in range(59))]
TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}<assistant>"


def word_tokenizer():
    """One token per word, with a chat template; ids are the places in `WORDS`."""
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Paths of a saved target and draft, and what is in them."""
    folder = tmp_path_factory.mktemp("pair")
    model, tokenizer = tiny_llama(), word_tokenizer()
    for name, each in (("target", model), ("draft", noisy_copy(model))):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    target, draft = str(folder / "target"), str(folder / "draft")
    return SimpleNamespace(
        target=target,
        draft=draft,
        model=AutoModelForCausalLM.from_pretrained(target),
        assistant=AutoModelForCausalLM.from_pretrained(draft),
        tokenizer=AutoTokenizer.from_pretrained(target),
        options=["--target", target, "--assistant", draft],
    )


@pytest.fixture
def run():
    """Runs a command in this process."""
    runner = CliRunner()

    def call(*arguments, input=None, code=0):
        result = runner.invoke(app, [str(each) for each in arguments], input=input)
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        return result

    return call


@pytest.fixture
def run_json(run):
    """Runs a command with `--json` and returns what it printed; standard output must hold nothing else."""

    def call(*arguments, **kwargs):
        return json.loads(run(*arguments, "--json", **kwargs).stdout)

    return call


@pytest.fixture
def fresh_accelerate():
    """One precision per process is accelerate's rule; each test is a process of its own in that respect."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
