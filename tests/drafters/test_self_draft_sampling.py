"""Self-drafts and the sampled law: the exact ways, and the biased one that the same tests refuse."""

from functools import cache

import numpy as np
import pytest
import torch

from hf_specdec import SelfDraftConfig
from hf_specdec.acceptance import Exact
from hf_specdec.drafters import ExitPolicy, SelfDrafter
from hf_specdec.laws import one_hot
from hf_specdec.records import Evidence
from tests.test_sampling import Fit
from tests.toys import tiny_llama


VOCAB_SIZE, LAYERS, NEW_TOKENS, NUM_TEXTS = 6, 3, 3, 2400
PROMPT = (5, 3, 1, 4)
THRESHOLD = 0.45


@cache
def target():
    return tiny_llama(seed=6, vocab_size=VOCAB_SIZE, layers=LAYERS)


@cache
def joint_law():
    """`(vocab,) * NEW_TOKENS`, from logits computed without a cache."""
    joint = np.ones(())
    for depth in range(NEW_TOKENS):
        prefixes = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * depth).view(-1, depth) if depth else None
        texts = torch.tensor([PROMPT])
        if depth:
            texts = torch.cat([texts.expand(len(prefixes), -1), prefixes], 1)
        with torch.no_grad():
            law = target()(texts).logits[:, -1].double().softmax(-1).numpy()
        joint = joint[..., None] * law.reshape([VOCAB_SIZE] * (depth + 1))
    return joint


def texts_of(**options):
    out = target().generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        speculative_config=SelfDraftConfig(
            exit_layers=[1, 2], length=3, annealing=0.0, on_drafter_error="raise", **options
        ),
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=NUM_TEXTS,
        return_dict_in_generate=True,
    )
    stats = out.speculative_stats
    assert 0 < stats.num_accepted_tokens < stats.num_verified_tokens
    return out.sequences, stats


@pytest.mark.parametrize("draft_sampling", [False, True], ids=["argmax", "drawn"])
@pytest.mark.parametrize("threshold", [0.0, THRESHOLD])
def test_texts_follow_the_target_law(draft_sampling, threshold):
    sequences, stats = texts_of(draft_sampling=draft_sampling, confidence_threshold=threshold)
    assert Fit.of(sequences, joint_law()).good
    if threshold:
        assert set(stats.events["exit_depths"]) == {1, 2}


def test_discarding_a_drawn_token_by_its_own_probability_is_found_out(monkeypatch):
    """The known biased variant: the token is drawn first, and submitted only if its own probability is high."""
    original = SelfDrafter._draft

    def biased(drafter, growing, num_drafted, num_attempted, shared_seconds):
        draft = original(drafter, growing, num_drafted, num_attempted, shared_seconds)
        if draft.q is None:
            return draft
        own = draft.q.gather(-1, draft.tokens[..., None])[..., 0]
        kept = (draft.valid & (own >= THRESHOLD)).long().cumprod(-1).sum(-1)
        return type(draft)(draft.tokens, kept, q=draft.q, source="self", num_attempted=num_attempted)

    monkeypatch.setattr(SelfDrafter, "_draft", biased)
    sequences, _ = texts_of(draft_sampling=True, confidence_threshold=0.0)
    assert not Fit.of(sequences, joint_law()).good


def emitted(p, q, submitted):
    """The law of the emitted token, enumerated over the drafts.

    Args:
        p, q: `(vocab,)`, the laws of target and exit.
        submitted: `(vocab,)`, whether each token is put before the target once it is drawn.
    """
    law = torch.zeros_like(p)
    for token, mass in enumerate(q.tolist()):
        if not submitted[token]:
            law += mass * p
            continue
        evidence = Evidence(
            tokens=torch.tensor([[token]]),
            valid=torch.ones(1, 1, dtype=torch.bool),
            scores=p.log()[None, None],
            target_logits=p.log()[None, None],
            do_sample=True,
            q=q[None, None],
        )
        accepted = float(Exact().acceptance(evidence)[0, 0])
        law += mass * accepted * one_hot(torch.tensor(token), len(p), p.dtype)
        if accepted < 1:
            law += mass * (1 - accepted) * Exact().replacement(evidence)[0]
    return law


def test_the_decision_from_the_law_is_exact_and_from_the_token_is_not():
    generator = torch.Generator().manual_seed(0)
    policy, worst_exact, worst_biased, decisions = ExitPolicy(), 0.0, 0.0, set()
    for _ in range(200):
        z, target_z = torch.randn(2, 5, generator=generator, dtype=torch.float64) * 1.5
        p, q = target_z.softmax(-1), z.softmax(-1)
        leaves = bool(policy.confidence(z[None], 1, 4)[0] >= THRESHOLD)
        decisions.add(leaves)
        exact = emitted(p, q, [leaves] * 5)
        biased = emitted(p, q, (q >= THRESHOLD).tolist())
        worst_exact = max(worst_exact, float((exact - p).abs().max()))
        worst_biased = max(worst_biased, float((biased - p).abs().max()))
    assert decisions == {True, False}
    assert worst_exact < 1e-15
    assert worst_biased > 0.05
