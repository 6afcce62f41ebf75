"""What a checkpoint's config asks for and its tensors do not hold, or cannot mean, is refused by name."""

import pytest
import torch

from hf_specdec import IncompatibleDraftError, InvalidConfigError
from hf_specdec.networks import AutoDrafter
from tests.networks.published import (
    EAGLE3,
    LLAMA,
    LLAMA3,
    QK_NORM,
    V,
    eagle1,
    eagle3,
    load,
    speculators,
    target,
    without,
    written,
)  # fmt: skip


IDS = torch.arange(V)
WHOLE = EAGLE3 | {"draft_vocab_size": V}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (LLAMA | {"bias": True}, eagle1(), r"missing \['fc.bias'\]"),
        (
            speculators("qwen3"),
            eagle3("layers.0.", embedding=True),
            r"missing \['midlayer.self_attn.k_norm.weight', 'midlayer.self_attn.q_norm.weight'\]",
        ),
        (
            speculators("qwen3"),
            without(eagle3("layers.0.", embedding=True, extra=QK_NORM), "layers.0.self_attn.k_norm.weight"),
            r"missing \['midlayer.self_attn.k_norm.weight'\]",
        ),
        (speculators(fc_norm=True), eagle3("layers.0.", embedding=True), "missing.*fc_norm.0.weight"),
        (EAGLE3 | {"eagle_config": {"norm_before_fc": True}}, eagle3(), r"missing \['input_norm.weight'\]"),
        (EAGLE3 | {"attention_bias": True}, eagle3(), "missing.*k_proj.bias"),
        (EAGLE3 | {"eagle_config": "no"}, eagle3(), "eagle_config in the config of .* must be an object, got 'no'"),
        (LLAMA3 | {"speculators_config": [1]}, eagle1(), "speculators_config in the config of .* must be an object"),
    ],
)  # fmt: skip
def test_what_the_config_asks_for_must_be_there(config, tensors, message, tmp_path):
    with pytest.raises(IncompatibleDraftError, match=message):
        load(written(tmp_path / "drafter", config, tensors))


@pytest.mark.parametrize("d2t", [IDS.flip(0), V - 1 - 2 * IDS, torch.ones(V).long(), IDS[:-1], IDS.roll(1), IDS // 2])
def test_a_whole_vocabulary_is_not_renamed(d2t, tmp_path):
    with pytest.raises(IncompatibleDraftError, match=r"d2t renames them.*expected zeros.*sort the rows of lm_head"):
        load(written(tmp_path / "drafter", WHOLE, eagle3(size=V) | {"d2t": d2t}))


def test_fresh_vocabularies_keep_rows_and_tokens_together():
    """The tokens may come in any order; they are sorted, and the target's rows with them."""
    ids = torch.tensor([40, 7, 63, 0, 22])
    network = AutoDrafter.from_target(target(), draft_token_ids=ids)
    assert network.target_ids.tolist() == sorted(ids.tolist())
    assert torch.equal(network.lm_head.weight, target().lm_head.weight[network.target_ids])
    logits = network.to_target_vocabulary(torch.arange(5.0))
    assert logits[network.target_ids].tolist() == [0, 1, 2, 3, 4]
    assert not logits[network.t2d.logical_not()].isfinite().any()


@pytest.mark.parametrize("kind", ["su", "mrope"])
def test_rotary_types_of_checkpoints_are_known(kind, tmp_path):
    config = EAGLE3 | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(InvalidConfigError, match=f"of the type '{kind}'.*expected one of the types.*llama3"):
        load(written(tmp_path / "drafter", config, eagle3()))
