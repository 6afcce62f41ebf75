"""`specdec export --format custom_generate`: a folder whose code transformers runs."""

import functools
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import InvalidConfigError, RCSDConfig, TreeShape
from hf_specdec.cli import app
from hf_specdec.hub.custom_generate import export_custom_generate
from hf_specdec.networks import AutoDrafter
from tests.networks import drafter_for, small_target
from tests.toys import prompts


OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported folder, under a name of its own: transformers keeps a copy of the code by the folder's name."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter_for(small_target(), "eagle3-reduced").save_pretrained(folder / "drafter")
    out = folder / f"{folder.parent.name}-{folder.name}".replace("-", "_")
    result = CliRunner().invoke(
        app, ["export", str(folder / "drafter"), "--format", "custom_generate", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def model():
    return small_target()


def custom(model, folder, **options):
    options = {"custom_generate": str(folder), "trust_remote_code": True, **OPTIONS, **options}
    return model.generate(**prompts(), **options)


def test_the_folder_is_a_drafter_too(folder, model):
    network, original = (
        AutoDrafter.from_pretrained(path, target=model) for path in (folder, folder.parent / "drafter")
    )
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in original.state_dict().items())


@pytest.mark.parametrize("given", ["folder", "path", "network", "assistant_model"])
def test_generate_with_the_folder(folder, model, given):
    network = AutoDrafter.from_pretrained(folder, target=model)
    options = {
        "folder": {"drafter": str(folder)},
        "path": {"drafter": folder},
        "network": {"drafter": network},
        "assistant_model": {"assistant_model": network},
    }[given]
    out = custom(model, folder, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, model.generate(**prompts(), **OPTIONS))
    assert out.speculative_stats.num_draft_tokens > 0


def test_a_config_is_given_by_a_name_of_its_own(folder, model):
    config = RCSDConfig(tree=TreeShape(2, 2, 4), on_drafter_error="raise")
    out = custom(model, folder, drafter=str(folder), draft_config=config, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**prompts(), **OPTIONS))
    assert len(out.speculative_stats.drafted_at_position) == 2


def test_the_folder_has_a_card_that_the_hub_finds_it_by(folder):
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert {"custom_generate", "eagle3", "arxiv:2503.01840"} <= set(card.data.tags)
    assert "base_model" not in card.data.to_dict()  # the toy has no name
    [snippet] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert 'custom_generate="FOLDER", **trust' in snippet
    compile(snippet, "README.md", "exec")


def test_a_card_names_repository_and_target_and_leaves_another_card_alone(tmp_path):
    network = drafter_for(small_target(), "eagle")
    network.config.target_name = "org/target"
    card = ModelCard.load(export_custom_generate(network, tmp_path, "org/drafter") / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("org/target", "adapter")
    assert 'custom_generate="org/drafter"' in card.text
    assert 'name = "org/target"' in card.text
    (tmp_path / "README.md").write_text("mine")
    export_custom_generate(network, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_positional_calls(folder, model):
    """A model that was loaded from such a repository has the code as its `generate`."""
    inputs = prompts()
    code = model.load_custom_generate(str(folder), trust_remote_code=True)
    model.generate = functools.partial(code, model=model)
    out = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], drafter=str(folder), **OPTIONS)
    assert torch.equal(out, small_target().generate(**inputs, **OPTIONS))


def test_a_drafter_is_loaded_once_for_a_model(folder, model, monkeypatch):
    code = model.load_custom_generate(str(folder), trust_remote_code=True)
    loads = []
    load = code.__globals__["load_assistant"]
    monkeypatch.setitem(code.__globals__, "load_assistant", lambda *each: loads.append(each) or load(*each))
    for _ in range(2):
        code(model=model, **prompts(), **OPTIONS, drafter=str(folder))
    assert len(loads) == 1


def test_the_drafter_beside_the_code_is_the_default(folder, model):
    """`model.generate(custom_generate="folder", trust_remote_code=True)` and nothing else."""
    out = custom(model, folder, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**prompts(), **OPTIONS))
    assert out.speculative_stats.num_draft_tokens > 0
    inputs = prompts()
    positional = model.generate(inputs["input_ids"], custom_generate=str(folder), trust_remote_code=True, **OPTIONS)
    assert torch.equal(positional, model.generate(inputs["input_ids"], **OPTIONS))


def test_it_is_the_default_without_the_hook_too(folder, model):
    hf_specdec.uninstall()
    try:
        out = custom(model, folder, return_dict_in_generate=True)
    finally:
        hf_specdec.install()
    assert torch.equal(out.sequences, model.generate(**prompts(), **OPTIONS))
    assert out.speculative_stats.num_draft_tokens > 0


def test_without_any_drafter(folder, model, tmp_path):
    code = model.load_custom_generate(str(folder), trust_remote_code=True)
    with pytest.raises(ValueError, match=r"pass drafter=.*--repo ORG/NAME"):
        code(model=model, **prompts(), **OPTIONS)
    alone = tmp_path / "code_alone"
    shutil.copytree(folder / "custom_generate", alone / "custom_generate")
    with pytest.raises(ValueError, match=r"pass drafter=.*--repo ORG/NAME"):
        custom(model, alone)


def test_a_hub_id_is_written_into_the_code(folder, model, tmp_path, monkeypatch):
    arguments = ["--format", "custom_generate", "--out", str(tmp_path / "named_repo"), "--repo", "org/drafter"]
    result = CliRunner().invoke(app, ["export", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    code = model.load_custom_generate(str(tmp_path / "named_repo"), trust_remote_code=True)
    asked = []

    def load(name, target):
        asked.append(name)
        return AutoDrafter.from_pretrained(folder, target=target)

    monkeypatch.setitem(code.__globals__, "load_assistant", load)
    assert torch.equal(code(model=model, **prompts(), **OPTIONS), model.generate(**prompts(), **OPTIONS))
    assert asked == ["org/drafter"]


def test_two_names_for_one_thing(folder, model):
    with pytest.raises(ValueError, match="assistant_model and drafter mean the same"):
        custom(model, folder, drafter=str(folder), assistant_model=model)


def test_trust_is_asked_for(folder, model):
    with pytest.raises(ValueError, match="trust_remote_code"):
        custom(model, folder, trust_remote_code=False)


def test_a_config_of_the_hooks_contradicts_it(folder, model):
    with pytest.raises(InvalidConfigError, match=f'assistant_model="{folder}".*draft_config'):
        custom(model, folder, speculative_config=RCSDConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "custom_generate", "--repo", "a/b/c"], "--repo must be ORG/NAME"),
        (["--format", "custom_generate", "--repo", "drafter"], "--repo must be ORG/NAME"),
        (["--format", "vllm", "--repo", "org/drafter"], "--repo is for --format custom_generate"),
    ],
)
def test_contradicting_options(folder, arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["export", str(folder), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
