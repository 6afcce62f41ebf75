"""Where a drafter's files come from, and which target and tokenizer it is for."""

import json

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_specdec import AutoDrafter, IncompatibleDraftError, InvalidConfigError, RCSDConfig
from tests.networks import small_target
from tests.networks.published import EAGLE3, LLAMA3, H, V, eagle1, eagle3, load, logits_of, target, written
from tests.toys import prompts


REPO = "org/some-eagle3-drafter"
COMMITS = {"main": "1" * 40, "v0.1": "2" * 40}


# --- tokenizer and sizes --------------------------------------------------------------------------------------------


def tokenizer(first="a"):
    words = [first, *(f"w{index}" for index in range(V - 1))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0")


def test_another_tokenizer_is_refused(tmp_path):
    network = AutoDrafter.from_target(target(), tokenizer=tokenizer())
    network.save_pretrained(tmp_path / "drafter")
    ours = network.config.target_tokenizer
    assert load(tmp_path / "drafter", tokenizer=tokenizer()).config.target_tokenizer == ours is not None
    assert load(tmp_path / "drafter").config.target_tokenizer == ours  # the target's is not known: nothing to compare
    with pytest.raises(IncompatibleDraftError, match=rf"tokenizer have the hash {ours}.*load the target"):
        load(tmp_path / "drafter", tokenizer=tokenizer("b"))


def test_the_tokenizer_beside_the_target_is_compared(tmp_path):
    """Where none is passed, the one saved with the target is read."""
    for name, words in (("ours", "a"), ("theirs", "b")):
        small_target().save_pretrained(tmp_path / name)
        tokenizer(words).save_pretrained(tmp_path / name)
    ours, theirs = (type(target()).from_pretrained(tmp_path / name) for name in ("ours", "theirs"))
    AutoDrafter.from_target(ours).save_pretrained(tmp_path / "drafter")
    load(tmp_path / "drafter", ours)
    with pytest.raises(IncompatibleDraftError, match="tokenizer have the hash"):
        load(tmp_path / "drafter", theirs)
    with pytest.raises(IncompatibleDraftError, match="tokenizer have the hash"):
        theirs.generate(
            **prompts(), assistant_model=str(tmp_path / "drafter"), speculative_config=RCSDConfig(), max_new_tokens=4
        )


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (LLAMA3, eagle1(), r"reads features of 32 numbers, LlamaForCausalLM gives 48 \(hidden size 48\)"),
        (EAGLE3, eagle3(embedding=True), r"reads features of 96 numbers, LlamaForCausalLM gives 144 \(hidden size 48\)"),
        (
            EAGLE3 | {"target_hidden_size": 48},
            eagle3() | {"fc.weight": torch.ones(H, 3 * 48)},
            "no embed_tokens.weight of its own.*its hidden size is 32, the target's 48",
        ),
    ],
)  # fmt: skip
def test_another_hidden_size_is_refused(config, tensors, message, tmp_path):
    with pytest.raises(IncompatibleDraftError, match=message):
        load(written(tmp_path / "drafter", config, tensors), small_target(width=48))


# --- the Hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache that holds two revisions of one repository, and no Hub."""
    repo = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    for number, (revision, commit) in enumerate(COMMITS.items()):
        (repo / "refs" / revision).write_text(commit)
        tensors = eagle3()
        written(repo / "snapshots" / commit, EAGLE3, tensors | {"fc.weight": (1 + number) * tensors["fc.weight"]})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


@pytest.mark.parametrize(("revision", "commit"), [(None, COMMITS["main"]), *COMMITS.items(), (COMMITS["v0.1"],) * 2])
def test_a_hub_id_and_its_revision(revision, commit, hub_cache):
    network = load(REPO, revision=revision)
    assert torch.equal(logits_of(network), logits_of(load(hub_cache / "snapshots" / commit)))
    other = next(each for each in COMMITS.values() if each != commit)
    assert not torch.equal(logits_of(network), logits_of(load(hub_cache / "snapshots" / other)))


def test_a_revision_that_is_not_there(hub_cache):
    with pytest.raises(LocalEntryNotFoundError):
        load(REPO, revision="v9")


def test_a_hub_id_as_assistant(hub_cache):
    options = {"max_new_tokens": 8, "do_sample": False}
    config = RCSDConfig(on_drafter_error="raise")
    out = target().generate(
        **prompts(), **options, assistant_model=REPO, speculative_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, target().generate(**prompts(), **options))
    assert out.speculative_stats.num_draft_tokens > 0


# --- sharded pickles ------------------------------------------------------------------------------------------------


def sharded(folder, tensors, save, suffix):
    """`tensors` in two files and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3))
    names, index = list(tensors), {}
    stem = "pytorch_model" if suffix == "bin" else "model"
    for number in (1, 2):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        save(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_sharded_pickles_are_read_on_request(tmp_path):
    folder = sharded(tmp_path / "bin", eagle1(), torch.save, "bin")
    with pytest.raises(InvalidConfigError, match="allow_bin=True"):
        load(folder)
    expected = logits_of(load(written(tmp_path / "one", LLAMA3, eagle1())))
    assert torch.equal(logits_of(load(folder, allow_bin=True)), expected)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InvalidConfigError, match=r"index.json.*pytorch_model-00002-of-00002.bin"):
        load(folder, allow_bin=True)


def test_safetensors_come_before_pickles(tmp_path):
    """Also where both are there: the pickles, which hold no tensors here, are not even opened."""
    folder = sharded(tmp_path / "both", eagle1(), save_file, "safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert torch.equal(
        logits_of(load(folder, allow_bin=True)), logits_of(load(written(tmp_path / "one", LLAMA3, eagle1())))
    )


def test_a_shard_that_is_no_dictionary_of_tensors(tmp_path):
    folder = sharded(tmp_path / "bin", eagle1(), torch.save, "bin")
    torch.save({"fc.weight": print}, folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load(folder, allow_bin=True)


def test_a_shard_may_not_repeat_another(tmp_path):
    folder = sharded(tmp_path / "bin", eagle1(), torch.save, "bin")
    torch.save(eagle1(), folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(IncompatibleDraftError, match=r"repeats tensors of another shard.*fc.weight"):
        load(folder, allow_bin=True)
