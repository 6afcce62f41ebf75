"""The unrolled forward pass of training against real drafting, and what its chains may see."""

import pytest
import torch

from hf_specdec.drafters import DraftSettings, HeadDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.features import TargetFeatures
from hf_specdec.records import Budget, Context
from hf_specdec.training.texts import Text, observe
from hf_specdec.training.unroll import unroll
from hf_specdec.verify import RandomStreams
from tests.networks import KINDS, drafter_for, small_target
from tests.toys import prompts


STEPS = 3


@torch.no_grad()
def drafted(target, network, prefix):
    """Tokens and logits that the real drafter proposes after `prefix`."""
    ids = torch.tensor([prefix])
    features = TargetFeatures(target, network.taps_of(target))
    with features.of_prompt(len(prefix) - 1):
        target(input_ids=ids[:, :-1])
    settings = DraftSettings(64, do_sample=False, streams=RandomStreams(1), keep_logits=True)
    context = Context(
        torch.nn.functional.pad(ids, (0, 8)), torch.tensor([len(prefix)]), None, torch.ones(1, dtype=torch.bool)
    )
    draft = HeadDrafter(settings, network, features).propose(context, Budget(torch.tensor([STEPS])))
    return draft.tokens[0, :STEPS].tolist(), draft.logits[0, :STEPS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_anchor_equals_real_drafting(kind):
    target = small_target()
    network = drafter_for(target, kind)
    text = prompts(1, columns=14)["input_ids"][0].tolist()
    anchors = range(12)
    real = [drafted(target, network, text[: anchor + 2]) for anchor in anchors]
    texts = [
        Text((*text[: anchor + 2], *drafts), anchor + 2) for anchor, (drafts, _) in zip(anchors, real, strict=True)
    ]
    unrolled = unroll(network, observe(target, network, texts), STEPS)
    for anchor, (_, logits) in zip(anchors, real, strict=True):
        mine = torch.stack([network.to_target_vocabulary(each)[anchor, anchor] for each in unrolled.student_logits])
        torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5)
        assert all(bool(mask[anchor, anchor]) for mask in unrolled.masks)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_masks_tokens_and_target_logits_are_about_the_same_token(kind):
    target = small_target()
    network = drafter_for(target, kind)
    texts = [Text(tuple(range(3, 13)), 4), Text(tuple(range(20, 26)), 3)]
    batch = observe(target, network, texts)
    unrolled = unroll(network, batch, STEPS)
    for step in range(STEPS):
        for row, text in enumerate(texts):
            trained = unrolled.masks[step][row].nonzero().flatten().tolist()
            assert trained == [
                t for t in range(12) if t + 2 >= text.num_prompt_tokens and t + 2 + step < len(text.tokens)
            ]
            for t in trained:
                assert int(unrolled.tokens[step][row, t]) == text.tokens[t + 2 + step]
                assert torch.equal(unrolled.target_logits[step][row, t], batch.logits[row, t + 1 + step])


def test_hass_features_are_those_the_states_stand_in_for():
    target = small_target()
    network = drafter_for(target, "eagle")
    batch = observe(target, network, [Text(tuple(range(3, 13)), 4)])
    unrolled = unroll(network, batch, STEPS)
    head = target.get_output_embeddings()
    for step in range(STEPS):
        seen = head(unrolled.target_states[step])[:, : 9 - step]
        torch.testing.assert_close(seen, unrolled.target_logits[step][:, : 9 - step])


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_reach_the_states_of_earlier_steps_only_if_they_may(detach):
    target = small_target()
    network = drafter_for(target, "eagle3")
    batch = observe(target, network, [Text(tuple(range(3, 13)), 4)])
    unrolled = unroll(network, batch, 2, detach=detach)
    (gradient,) = torch.autograd.grad(unrolled.student_logits[1].sum(), unrolled.student_states[0], allow_unused=True)
    assert (gradient is None) == detach


def test_a_text_without_trained_tokens_is_refused():
    with pytest.raises(InvalidConfigError, match="all zero"):
        Text((1, 2, 3), 3)


def test_attention_without_masks_is_refused():
    target = small_target()
    network = drafter_for(target, "eagle")
    batch = observe(target, network, [Text(tuple(range(3, 13)), 4)])
    network.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(InvalidConfigError, match="sdpa"):
        unroll(network, batch, 2)
