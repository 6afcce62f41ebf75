"""Further variants of published configs at toy size: understood, computed as from scratch, lossless, kept by the formats."""

import pytest
import torch

from hf_specdec import Eagle3Drafter, EagleDrafter, InvalidConfigError, RCSDConfig
from hf_specdec.networks.eagle import EagleConfig
from hf_specdec.networks.export import FORMATS, export_drafter
from tests.networks import reference_logits
from tests.networks.published import (
    EAGLE3,
    FC_NORM,
    LLAMA,
    QK_NORM,
    TARGET_IDS,
    VD,
    H,
    V,
    eagle1,
    eagle3,
    load,
    logits_of,
    speculators,
    target,
    written,
)  # fmt: skip
from tests.toys import prompts


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
BIASES = {f"midlayer.self_attn.{each}_proj.bias": (H if each == "q" else H // 2,) for each in "qkv"}
NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
ORDER = torch.randperm(VD, generator=torch.Generator().manual_seed(3))
PERMUTED = TARGET_IDS[ORDER]
IDS = torch.arange(V)
VARIANTS = {
    "narrower than its target": (
        EAGLE3 | {"hidden_size": 24, "target_hidden_size": H, "head_dim": 8},
        lambda: eagle3(hidden=24, embedding=True),
        {"hidden_size": 24, "target_hidden_size": H},
    ),
    "wider than its target": (
        speculators(target_hidden_size=H, transformer_layer_config=LLAMA | {"hidden_size": 40, "head_dim": 8}),
        lambda: eagle3("layers.0.", hidden=40, embedding=True),
        {"hidden_size": 40, "target_hidden_size": H, "norm_before_residual": True},
    ),
    "heads wider than the hidden size": (EAGLE3 | {"head_dim": 16}, lambda: eagle3(head_dim=16), {"head_dim": 16}),
    "rope_scaling of Llama 3": (
        EAGLE3 | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        eagle3,
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
    ),
    "rope_scaling of Llama 3, EAGLE-1": (
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "bias": False},
        eagle1,
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
    ),
    "q, k and v with biases": (
        EAGLE3 | {"attention_bias": True},
        lambda: eagle3(extra=BIASES),
        {"attention_bias": True},
    ),
    "biases that the config does not mention": (EAGLE3, lambda: eagle3(extra=BIASES), {"attention_bias": True}),
    "norms under eagle_config": (
        EAGLE3 | {"eagle_config": NORMS},
        lambda: eagle3(extra={"input_norm.weight": (3 * H,)}),
        NORMS | {"fc_norm": False},
    ),
    "norms of EAGLE 3.1 under eagle_config": (
        EAGLE3 | {"eagle_config": {"fc_norm": True, "norm_output": True}},
        lambda: eagle3(extra=FC_NORM),
        {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
    ),
    "permuted d2t": (EAGLE3, lambda: eagle3() | {"d2t": PERMUTED - IDS[:VD]}, {"draft_vocab_size": VD}),
    "permuted d2t of ids": (EAGLE3, lambda: eagle3() | {"d2t": PERMUTED}, {"draft_vocab_size": VD}),
    "whole vocabulary with maps of offsets": (
        EAGLE3 | {"draft_vocab_size": V},
        lambda: eagle3(size=V) | {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V).bool()},
        {"draft_vocab_size": V},
    ),
    "whole vocabulary with maps of ids": (
        EAGLE3 | {"draft_vocab_size": None},
        lambda: eagle3(size=V) | {"d2t": IDS, "t2d": torch.ones(V).bool()},
        {"draft_vocab_size": V},
    ),
    "whole vocabulary, maps that were never filled": (
        EAGLE3 | {"draft_vocab_size": V},
        lambda: eagle3(size=V) | {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.zeros(V).bool()},
        {"draft_vocab_size": V},
    ),
    "nulls": (
        EAGLE3
        | dict.fromkeys(("eagle_config", "speculators_config", "transformer_layer_config", "taps", "norm_output"))
        | dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "rope_scaling", "rope_theta", "head_dim", "target_hidden_size")),
        eagle3,
        {"taps": None, "norm_output": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "nulls of EAGLE-1": (
        LLAMA | dict.fromkeys(("eagle_config", "speculators_config", "bias", "qkv_bias", "attention_bias")),
        eagle1,
        {"bias": False, "attention_bias": False, "target_name": None},
    ),
    "nulls of speculators": (
        speculators("qwen3", norm_before_residual=None, fc_norm=None, speculators_config={"verifier": None}),
        lambda: eagle3("layers.0.", embedding=True, extra=QK_NORM),
        {"norm_before_residual": True, "fc_norm": False, "qk_norm": True, "target_name": None},
    ),
    "fc with a bias, as the config says": (LLAMA | {"bias": True}, lambda: eagle1(bias=True), {"bias": True}),
}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def variant(request, tmp_path):
    """A loaded network, its tensors on file, and what must have been understood."""
    config, tensors, understood = VARIANTS[request.param]
    return load(written(tmp_path / "drafter", config, tensors())), tensors(), understood


def test_variants_are_understood_and_computed_as_from_scratch(variant):
    network, _, understood = variant
    assert {name: getattr(network.config, name) for name in understood} == understood
    text = torch.randint(V, (24,), generator=torch.Generator().manual_seed(0))[None]
    with torch.no_grad():
        hidden = target()(text, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap] for tap in network.taps_of(target())], -1)[:, :-1]
        logits = network.to_target_vocabulary(network(text[:, 1:], network.combine(features)).logits[0, -1])
        expected = reference_logits(network, target(), text[0].tolist())[0]
    assert expected[expected.isfinite()].std() > 1e-3
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_variants_draft_losslessly(variant):
    options = {"max_new_tokens": 10, "do_sample": False}
    out = target().generate(
        **prompts(2), **options, assistant_model=variant[0], speculative_config=RCSDConfig(on_drafter_error="raise"),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, target().generate(**prompts(2), **options))
    assert out.speculative_stats.num_draft_tokens > 10


def writable(config):
    """The formats whose readers know what the network has."""
    if isinstance(config, EagleConfig):
        unknown = {"vllm": config.bias or config.attention_bias, "sglang": config.attention_bias}
        unknown |= {"eagle3": True, "speculators": True}
    else:
        norms = config.norm_before_residual or config.norm_before_fc or config.fc_norm or config.norm_output
        unknown = {"vllm": config.qk_norm or config.attention_bias, "speculators": config.attention_bias}
        unknown |= dict.fromkeys(("eagle3", "sglang"), norms or config.qk_norm or config.attention_bias)
    return {format for format in FORMATS if not unknown.get(format)}


def test_variants_survive_every_format_that_knows_them(variant, tmp_path):
    network, tensors, understood = variant
    known = {format: dict(understood) for format in writable(network.config)}
    if isinstance(network, EagleDrafter) and "bias" in understood:
        known["sglang"]["bias"] = True  # a zero one, which its reader expects
    for format, options in known.items():
        again = load(export_drafter(network, tmp_path / format, format))
        assert {name: getattr(again.config, name) for name in options} == options, format
        assert torch.equal(logits_of(again), logits_of(network)), format
        for name, value in network.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), (format, name)
    for format in FORMATS.keys() - known.keys():
        with pytest.raises(InvalidConfigError, match=r'write (it|this EAGLE-1 drafter) as "hf"'):
            export_drafter(network, tmp_path / format, format)
    for name, value in tensors.items():
        own = name.replace("layers.0.", "midlayer.") if isinstance(network, Eagle3Drafter) else name
        if own not in ("d2t", "t2d"):
            assert torch.equal(network.state_dict()[own], value), name


def test_the_rows_of_a_permuted_vocabulary_stay_with_their_tokens(tmp_path):
    """Row `i` of `lm_head` belongs to the target's token that `d2t` gives draft token `i`, sorted or not."""
    sorted_one, rows = load(written(tmp_path / "sorted", EAGLE3, eagle3())), eagle3()["lm_head.weight"]
    moved = eagle3() | {"d2t": PERMUTED - IDS[:VD], "lm_head.weight": rows[ORDER]}
    network = load(written(tmp_path / "permuted", EAGLE3, moved))
    assert torch.equal(network.target_ids, PERMUTED)
    assert not torch.equal(network.target_ids, network.target_ids.sort().values)
    torch.testing.assert_close(logits_of(network), logits_of(sorted_one))
