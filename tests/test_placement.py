"""Targets that accelerate has spread over devices, or whose weights it fetches from the disk for each pass."""

from functools import cache

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specdec import (
    AutoDrafter,
    ExactConfig,
    ExitHeads,
    RCSDConfig,
    SelfDraftConfig,
    SpeculativeConfig,
    TreeShape,
    verify_lossless,
)
from hf_specdec.loading import load_assistant
from hf_specdec.placement import device_of, weight_of
from tests.networks import small_target
from tests.networks.copies import FIRST, attending_pair, recalling_pair
from tests.toys import noisy_copy, prompts, state_of


# `generate` of transformers 5.17 takes the meta device of an offloaded weight for the model's, in plain decoding too.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
CPU = torch.device("cpu")
LAYERS, TOKENS = 6, 6
PARTS = [
    "model.embed_tokens",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
    *(f"model.layers.{i}" for i in range(LAYERS)),
]
SPREADS = {
    "some layers": dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk", "model.layers.4": "disk"},
    "both ends": dict.fromkeys(PARTS, "cpu") | {"model.embed_tokens": "disk", "lm_head": "disk"},
    "everything": {"": "disk"},
}
NETWORK = RCSDConfig(steps=3, on_drafter_error="raise")
TREE = RCSDConfig(tree=TreeShape(3, 2, 5), on_drafter_error="raise")
METHODS = {
    "causal LM": (lambda model: noisy_copy(small_target()), ExactConfig(length=3, on_drafter_error="raise")),
    "itself": (lambda model: model, ExactConfig(length=3, on_drafter_error="raise")),
    "prompt lookup": (lambda model: None, SpeculativeConfig(drafting="ngram", length=3, on_drafter_error="raise")),
    "self-draft": (
        lambda model: None,
        SelfDraftConfig(exit_layers=[2, 4], confidence_threshold=0.0, length=3, on_drafter_error="raise"),
    ),
    "eagle": (lambda model: AutoDrafter.from_target(model, "eagle"), NETWORK),
    "eagle3": (lambda model: AutoDrafter.from_target(model, "eagle3"), NETWORK),
    "tree": (lambda model: AutoDrafter.from_target(model, "eagle3"), TREE),
}


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    """From the name of a spread to a model that holds the same weights as `small_target()`."""
    folder = tmp_path_factory.mktemp("target")
    small_target().save_pretrained(folder)

    @cache
    def load(spread):
        weights = tmp_path_factory.mktemp("offloaded")
        return AutoModelForCausalLM.from_pretrained(folder, device_map=SPREADS[spread], offload_folder=weights).eval()

    return load


def decode(model, assistant, config, sampled=False, batch_size=2):
    torch.manual_seed(0)
    return model.generate(
        **prompts(batch_size), do_sample=sampled, max_new_tokens=TOKENS, pad_token_id=0, assistant_model=assistant,
        speculative_config=config, return_dict_in_generate=True,
    )  # fmt: skip


CASES = [
    *(("everything", method) for method in METHODS if method != "itself"),
    *(("both ends", method) for method in ("itself", "eagle", "self-draft")),
    *(("some layers", method) for method in ("itself", "eagle3", "self-draft")),
]


@pytest.mark.parametrize(("spread", "method"), CASES)
def test_an_offloaded_target_decodes_as_one_in_memory(offloaded, spread, method):
    """Its text, and what was drafted and accepted, are the same."""
    make, config = METHODS[method]
    runs = []
    for model in (small_target(), offloaded(spread)):
        torch.manual_seed(1)
        runs.append(decode(model, make(model), config))
    expected, found = runs
    plain = small_target().generate(**prompts(2), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
    assert torch.equal(found.sequences, plain)
    assert found.speculative_stats.num_draft_tokens == expected.speculative_stats.num_draft_tokens > 0
    assert found.speculative_stats.num_accepted_tokens == expected.speculative_stats.num_accepted_tokens


@pytest.mark.parametrize("method", ["self-draft", "eagle"])
def test_sampling_from_an_offloaded_target(offloaded, method):
    make, config = METHODS[method]
    texts = []
    for model in (small_target(), offloaded("everything")):
        torch.manual_seed(1)
        texts.append(decode(model, make(model), config, sampled=True).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("pair", [attending_pair, recalling_pair])
def test_a_network_reads_hidden_states_embeddings_and_head_of_an_offloaded_target(pair, tmp_path):
    """One that is always right stays so."""
    model, network = pair()
    model.save_pretrained(tmp_path / "target")
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    ).eval()
    network.attach(found)
    ids = torch.tensor([[FIRST, 7, 11, 5]])
    out = found.generate(
        ids, do_sample=False, max_new_tokens=12, assistant_model=network, speculative_config=NETWORK,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, model.generate(ids, do_sample=False, max_new_tokens=12))
    assert out.speculative_stats.acceptance_rate == 1.0


def test_nothing_of_an_offloaded_target_is_changed(offloaded):
    def state(model):
        config, generation_config, _, hooks, attributes = state_of(model)
        devices = {name: value.device for name, value in model.named_parameters()}
        return config, generation_config, hooks, attributes, devices

    model = offloaded("both ends")
    before = state(model)
    for name in ("self-draft", "tree"):
        make, config = METHODS[name]
        decode(model, make(model), config, batch_size=1)
    assert state(model) == before


def test_what_is_loaded_for_an_offloaded_target_lies_where_it_computes(offloaded, tmp_path):
    model = offloaded("everything")
    assert model.device.type == "meta"
    noisy_copy(small_target()).save_pretrained(tmp_path / "draft")
    AutoDrafter.from_target(small_target(), "eagle3").save_pretrained(tmp_path / "network")
    assert load_assistant(tmp_path / "draft", model).device == CPU
    assert load_assistant(tmp_path / "network", model).device == CPU
    assert ExitHeads.for_target(model, "linear", (2, 4)).device == CPU


def test_verification_of_an_offloaded_target(offloaded):
    report = verify_lossless(
        offloaded("both ends"), [[3, 9, 4]], assistant_model=noisy_copy(small_target()), max_new_tokens=4
    )
    assert report.passed


def test_where_a_module_takes_its_inputs(offloaded):
    assert device_of(small_target()) == device_of(offloaded("both ends")) == CPU
    assert device_of(offloaded("both ends").lm_head) == CPU
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")  # nobody brings it anywhere
    assert device_of(nn.Identity()) == CPU


def test_an_offloaded_weight_is_there_while_it_is_read(offloaded):
    head = offloaded("both ends").lm_head
    with weight_of(head) as weight:
        assert torch.equal(weight, small_target().lm_head.weight)
    assert head.weight.is_meta
