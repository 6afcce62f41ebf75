"""Drafter networks beside a target whose linear layers are packed for the CPU: nothing is unpacked in a round."""

import pytest
import torch

from hf_specdec import ExitHeads, RCSDConfig, SelfDraftConfig, TreeShape, linear, pack_linears
from hf_specdec.linear import PackedLinear, packing_problem
from hf_specdec.loading import load_assistant
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.target import weights_fingerprint
from tests.networks import small_target
from tests.toys import prompts


pytestmark = pytest.mark.skipif(packing_problem() is not None, reason=str(packing_problem()))
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 0)
    model = small_target()
    assert pack_linears(model).num_packed > 0
    return model


def test_a_packed_target_has_the_fingerprint_of_its_dense_self(packed):
    assert weights_fingerprint(packed) == weights_fingerprint(small_target()) is not None
    other = small_target(seed=1)
    assert weights_fingerprint(other) != weights_fingerprint(packed)
    assert weights_fingerprint(small_target().bfloat16()) == weights_fingerprint(packed)
    assert weights_fingerprint(small_target().half()) is None  # rounded twice, its values would be others


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("tree", [None, TreeShape(2, 2, 4)], ids=["chain", "tree"])
def test_a_loaded_network_is_packed_too_and_no_weight_is_unpacked_to_draft(packed, family, tree, tmp_path, monkeypatch):
    AutoDrafter.from_target(packed, family).save_pretrained(tmp_path)
    network = load_assistant(tmp_path, packed)
    assert any(isinstance(module, PackedLinear) for module in network.modules())
    assert not any(isinstance(module, PackedLinear) for module in load_assistant(tmp_path, small_target()).modules())
    unpacked = []
    monkeypatch.setattr(PackedLinear, "weight", property(lambda self: unpacked.append(self) or self._packed.to_dense()))
    out = packed.generate(
        **prompts(),
        **OPTIONS,
        assistant_model=network,
        speculative_config=RCSDConfig(steps=3, tree=tree, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    assert out.speculative_stats.num_draft_tokens > 0
    assert unpacked == []
    assert torch.equal(out.sequences, small_target().generate(**prompts(), **OPTIONS))


@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_loaded_exit_heads_are_packed_where_their_target_is(packed, kind, tmp_path):
    ExitHeads.for_target(packed, kind, [1]).save_pretrained(tmp_path)
    heads = load_assistant(tmp_path, packed)
    assert any(isinstance(module, PackedLinear) for module in heads.modules())
    assert not any(isinstance(module, PackedLinear) for module in load_assistant(tmp_path, small_target()).modules())
    own = ExitHeads.for_target(packed, kind, [1])
    config = {"confidence_threshold": 0.0, "length": 2, "on_drafter_error": "raise"}
    for assistant, options in ((heads, {}), (own, {}), (None, {"exit_heads": str(tmp_path)})):
        out = packed.generate(
            **prompts(),
            **OPTIONS,
            assistant_model=assistant,
            speculative_config=SelfDraftConfig(**config, **options),
            return_dict_in_generate=True,
        )
        assert out.speculative_stats.num_draft_tokens > 0
        assert torch.equal(out.sequences, small_target().generate(**prompts(), **OPTIONS))
    assert not any(isinstance(module, PackedLinear) for module in own.modules()), "heads in memory stay as they are"
