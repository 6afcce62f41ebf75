"""Checkpoints in every published dialect, recreated at toy size: they load, draft, and survive every format bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import IncompatibleDraftError, InvalidConfigError, RCSDConfig
from hf_specdec.networks import AutoDrafter, Eagle3Drafter, EagleDrafter
from hf_specdec.networks.checkpoint import is_draft_checkpoint
from hf_specdec.networks.export import FORMATS, export_drafter
from tests.families import FAMILIES
from tests.networks import KINDS, drafter_for, small_target
from tests.networks.published import (
    EAGLE3,
    FC_NORM,
    LLAMA,
    LLAMA3,
    QK_NORM,
    TARGET_IDS,
    VD,
    H,
    V,
    eagle1,
    eagle3,
    layer,
    load,
    logits_of,
    speculators,
    target,
    without,
    written,
)
from tests.toys import prompts, state_of


# What the published checkpoints look like: config, tensors, and what must have been understood.
PUBLISHED = {
    "EAGLE-LLaMA3.1": (LLAMA3, eagle1, {"bias": False, "has_embedding": True}),
    "EAGLE-Vicuna, fc with a bias": (LLAMA, lambda: eagle1(bias=True), {"bias": True}),
    "EAGLE-Qwen2": (LLAMA | {"qkv_bias": True}, lambda: eagle1(qkv_bias=True), {"attention_bias": True}),
    "HASS without embeddings": (LLAMA3, lambda: eagle1(embedding=False), {"has_embedding": False}),
    "EAGLE3-LLaMA3.1-8B": (EAGLE3, eagle3, {"taps": None, "has_embedding": False, "norm_before_residual": False}),
    "EAGLE3-LLaMA3.3-70B": (EAGLE3, lambda: eagle3(embedding=True), {"has_embedding": True}),
    "AngelSlim, said to be tied": (
        EAGLE3 | {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True},
        eagle3,
        {"tie_word_embeddings": False, "has_head": True},
    ),
    "SpecForge, whole vocabulary": (
        EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": V},
        lambda: eagle3(size=V),
        {"draft_vocab_size": V},
    ),
    "layers as SGLang counts them": (
        EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
        eagle3,
        {"taps": [2, 3, 4]},
    ),
    "layers as vLLM counts them": (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, eagle3, {"taps": [2, 3, 4]}),
    "converted for vLLM": (EAGLE3, lambda: eagle3("layers.0."), {"norm_before_residual": False}),
    "speculators": (
        speculators(norm_before_residual=False),
        lambda: eagle3("layers.0.", embedding=True),
        {"norm_before_residual": False, "target_name": "org/target"},
    ),
    "speculators that does not say": (
        speculators(),
        lambda: eagle3("layers.0.", embedding=True),
        {"norm_before_residual": True},
    ),
    "speculators, all norms": (
        speculators(norm_before_residual=True, fc_norm=True, norm_output=True),
        lambda: eagle3("layers.0.", embedding=True, extra=FC_NORM),
        {"fc_norm": True, "norm_output": True},
    ),
    "speculators, norm before fc": (
        speculators(norm_before_residual=True, norm_before_fc=True),
        lambda: eagle3("layers.0.", embedding=True, extra={"input_norm.weight": (3 * H,)}),
        {"norm_before_fc": True},
    ),
    "speculators, Qwen3 layer": (
        speculators("qwen3", norm_before_residual=True),
        lambda: eagle3("layers.0.", embedding=True, extra=QK_NORM),
        {"qk_norm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_variants_load_and_draft(name, tmp_path):
    config, tensors, understood = PUBLISHED[name]
    folder = written(tmp_path / "drafter", config, tensors())
    assert is_draft_checkpoint(folder)
    network = load(folder)
    assert {key: getattr(network.config, key) for key in understood} == understood
    stored, names = network.state_dict(), set(tensors())
    for key in names - {"d2t"}:
        own = key.replace("layers.0.", "midlayer.") if isinstance(network, Eagle3Drafter) else key
        assert torch.equal(stored[own].to(torch.float32), tensors()[key].to(torch.float32)), key
    before = state_of(target())
    options = {"max_new_tokens": 12, "do_sample": False}
    for assistant in (network, str(folder)):
        out = target().generate(
            **prompts(2), **options, assistant_model=assistant, speculative_config=RCSDConfig(on_drafter_error="raise"),
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, target().generate(**prompts(2), **options))
        assert out.speculative_stats.num_draft_tokens > 10
    assert str(before) == str(state_of(target()))


def test_rotary_base(tmp_path):
    """Published EAGLE-3 configs say nothing, and mean 10000 in training and inference."""
    assert load(written(tmp_path / "3", EAGLE3, eagle3())).config.rope_parameters["rope_theta"] == 10000.0
    assert load(written(tmp_path / "1", LLAMA3, eagle1())).config.rope_parameters["rope_theta"] == 500000.0


# --- formats --------------------------------------------------------------------------------------------------------

WRITABLE = {
    "eagle": ("hf", "vllm", "sglang"),
    "eagle3": tuple(FORMATS),
    "eagle3-reduced": tuple(FORMATS),
    "eagle3-norms": ("hf", "vllm", "speculators"),
    "eagle3-3.1": ("hf", "vllm", "speculators"),
    "eagle3-qwen3": ("hf",),
}


@pytest.mark.parametrize(("kind", "format"), [(kind, format) for kind in KINDS for format in FORMATS])
def test_formats_keep_every_bit_or_refuse(kind, format, tmp_path):
    network = drafter_for(target(), kind)
    if format not in WRITABLE[kind]:
        with pytest.raises(InvalidConfigError, match=r'write (it|this EAGLE-1 drafter) as "hf"'):
            export_drafter(network, tmp_path / "out", format)
        assert not (tmp_path / "out").exists()
        return
    again = load(export_drafter(network, tmp_path / "out", format))
    assert is_draft_checkpoint(tmp_path / "out")
    assert torch.equal(logits_of(again), logits_of(network))
    expected = network.state_dict()
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)
    assert again.config.target_weights == network.config.target_weights is not None


@pytest.mark.parametrize("taps", [[1, 3, 5], [0, 3, 6]])
def test_taps_survive(taps, tmp_path):
    network = drafter_for(target())
    network.config.taps = taps
    for format in ("hf", "vllm", "speculators", "sglang"):
        if format == "sglang" and 0 in taps:
            with pytest.raises(InvalidConfigError, match="embeddings"):
                export_drafter(network, tmp_path / format, format)
        else:
            assert list(load(export_drafter(network, tmp_path / format, format)).config.taps) == taps
    with pytest.raises(InvalidConfigError, match="taps"):
        export_drafter(network, tmp_path / "eagle3", "eagle3")


def test_the_keys_of_each_format(tmp_path):
    network = drafter_for(target(), "eagle3-reduced")
    keys = {
        name: set(load_file(export_drafter(network, tmp_path / name, name) / "model.safetensors")) for name in FORMATS
    }
    native = {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer("midlayer.", 2 * H),
        "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
    }  # fmt: skip
    assert keys["hf"] == keys["eagle3"] == keys["vllm"] == keys["sglang"] == native
    assert keys["speculators"] == {name.replace("midlayer.", "layers.0.") for name in native} | {"embed_tokens.weight"}
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not {"eagle_aux_hidden_state_layer_ids", "eagle_config"} & set(config)
    assert config["rope_theta"] == 10000.0
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["vocab_size"] == V
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert set(load_file(export_drafter(drafter_for(target(), "eagle"), tmp_path / "s", "sglang") / "model.safetensors")) == {
        "fc.weight", "fc.bias", *layer("layers.0.", H),
    }  # fmt: skip


# --- files ----------------------------------------------------------------------------------------------------------


def test_shards(tmp_path):
    tensors = eagle3()
    folder = written(tmp_path / "one", EAGLE3, tensors)
    parts = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text(json.dumps(EAGLE3))
    index = {}
    for number, part in enumerate(parts):
        save_file(part, tmp_path / "two" / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(logits_of(load(tmp_path / "two")), logits_of(load(folder)))
    (tmp_path / "two" / "model-1.safetensors").unlink()
    with pytest.raises(InvalidConfigError, match="model-1"):
        load(tmp_path / "two")


def test_pickles_are_read_only_on_request_and_only_as_tensors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    torch.save(eagle1(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidConfigError, match="allow_bin=True"):
        load(tmp_path)
    assert isinstance(load(tmp_path, allow_bin=True), EagleDrafter)
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load(tmp_path, allow_bin=True)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (EAGLE3, without(eagle3(), "norm.weight"), r"missing \['norm.weight'\]"),
        (EAGLE3, eagle3() | {"midlayer.odd": torch.ones(1)}, r"unexpected \['midlayer.odd'\]"),
        (EAGLE3, eagle3() | {"norm.weight": torch.ones(5)}, r"norm.weight has the shape \(5,\), expected \(32,\)"),
        (EAGLE3, without(eagle3(), "d2t"), "d2t is missing"),
        (EAGLE3, without(eagle3(), "lm_head.weight"), "no lm_head.weight"),
        (EAGLE3 | {"vocab_size": V + 1}, eagle3() | {"t2d": torch.ones(V + 1).bool()}, "t2d must mark"),
        (EAGLE3, eagle3() | {"d2t": torch.full((VD,), V)}, "neither as offsets nor as target ids"),
        (LLAMA3, without(eagle1(), "layers.0.mlp.up_proj.weight"), "missing"),
        (LLAMA3 | {"qkv_bias": True}, eagle1(), "missing.*q_proj.bias"),
        (LLAMA3, {"model.norm.weight": torch.ones(4)}, "no EAGLE-1, HASS or EAGLE-3 checkpoint"),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [2, 3]}, eagle3(), "names 2 tapped layers"),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, eagle3(), "hidden states 0 to 6"),
        (
            EAGLE3
            | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
            eagle3(),
            "disagree",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(config, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path / "drafter", config, tensors))


def test_d2t_as_offsets_and_as_ids(tmp_path):
    offsets = load(written(tmp_path / "offsets", EAGLE3, eagle3()))
    ids = load(written(tmp_path / "ids", EAGLE3, eagle3() | {"d2t": TARGET_IDS}))
    assert torch.equal(offsets.target_ids, TARGET_IDS)
    assert torch.equal(ids.d2t, offsets.d2t)
    assert torch.equal(logits_of(offsets).isfinite().any(0).any(0).nonzero()[:, 0], TARGET_IDS)
    unsure = without(eagle3() | {"d2t": torch.arange(VD)}, "t2d")
    with pytest.raises(IncompatibleDraftError, match="add t2d"):
        load(written(tmp_path / "unsure", EAGLE3, unsure))
    lone = load(written(tmp_path / "lone", EAGLE3, without(eagle3(), "t2d") | {"d2t": TARGET_IDS + 16}))
    assert torch.equal(lone.target_ids, TARGET_IDS + 16)


def test_the_target_is_checked(tmp_path):
    folder = export_drafter(drafter_for(target()), tmp_path / "drafter")
    other = small_target(seed=5)
    with pytest.raises(IncompatibleDraftError, match="base weights"):
        AutoDrafter.from_pretrained(folder, target=other)
    with pytest.raises(IncompatibleDraftError, match="vocabulary of 64 tokens"):
        AutoDrafter.from_pretrained(folder, target=small_target(vocab_size=72))
    half = small_target().to(torch.bfloat16)
    network = AutoDrafter.from_pretrained(folder, target=half)
    assert network.dtype == torch.bfloat16
    with pytest.raises(IncompatibleDraftError, match="attached to another model"):
        other.generate(**prompts(), assistant_model=network, speculative_config="rcsd", max_new_tokens=4)
    assert AutoDrafter.from_pretrained(folder, target=target(), taps=(1, 2, 3)).config.taps == [1, 2, 3]


def test_an_ordinary_checkpoint_is_no_drafter(tmp_path):
    target().save_pretrained(tmp_path / "llama")
    assert not is_draft_checkpoint(tmp_path / "llama")
    assert not is_draft_checkpoint(tmp_path / "nothing")


def test_save_pretrained_is_the_hf_format(tmp_path):
    network = drafter_for(target(), "eagle3-3.1")
    network.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(network))
    again = Eagle3Drafter.from_pretrained(tmp_path / "saved")
    again.attach(target())
    assert torch.equal(logits_of(again), logits_of(network))


@pytest.mark.parametrize(
    ("family", "dtype", "shift"),
    [
        ("llama", torch.float32, 0.0),
        ("llama", torch.bfloat16, 0.0),
        ("gemma2", torch.float32, 1.0),
        ("gpt2", torch.float32, None),
        ("stablelm", torch.float32, None),
    ],
)
def test_a_fresh_eagle3_drafter_begins_with_the_targets_final_norm_where_it_is_one_like_its_own(family, dtype, shift):
    """`shift` is what the target adds to the norm's weight; None where that is a LayerNorm."""
    model = FAMILIES[family].build("eager", seed=0)
    norm = next(each for name, each in model.get_decoder().named_children() if name in ("norm", "ln_f"))
    with torch.no_grad():
        norm.weight.uniform_(-0.5, 1.5)
    network = AutoDrafter.from_target(model.to(dtype), "eagle3")
    expected = torch.ones_like(norm.weight) if shift is None else norm.weight + shift
    assert torch.equal(network.norm.weight, expected.to(network.dtype))


def test_fresh_drafters_are_validated():
    for options, message in (
        ({"family": "medusa"}, "eagle or eagle3"),
        ({"family": "eagle", "draft_vocab_size": 8}, "eagle3"),
        ({"draft_vocab_size": V + 1}, "1 to 64"),
        ({"draft_vocab_size": 3, "draft_token_ids": torch.tensor([1])}, "names 1 tokens"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            AutoDrafter.from_target(target(), **options)
    network = AutoDrafter.from_target(target(), draft_token_ids=torch.tensor([9, 4]))
    assert network.target_ids.tolist() == [4, 9]
    assert torch.equal(network.lm_head.weight, target().lm_head.weight[[4, 9]])
