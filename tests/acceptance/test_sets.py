"""What belongs to each rule's set, against its formula written down once more."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy

from hf_specdec import InvalidConfigError, SpeculativeConfig
from hf_specdec.acceptance import (
    ASD,
    EARS,
    FSD,
    MARS,
    BiLD,
    CascadeChow,
    CascadeToken,
    CoSpec,
    FLy,
    Judge,
    Lenience,
    LossyEps,
    Mentored,
    Nucleus,
    RelaxedThinking,
    TopK,
    Typical,
)
from hf_specdec.drafters import ScriptedDrafter
from hf_specdec.laws import divergence, in_nucleus
from hf_specdec.records import Evidence
from tests.acceptance import each_token, members, place_of
from tests.toys import prompts, tiny_llama


BANNED = float("-inf")
RANDOM = [
    2.0 * torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(8)
]


# --- nucleus --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.7, 0.9, 0.99, 1.0])
def test_the_nucleus_is_that_of_a_sort(mass):
    for logits in RANDOM:
        law = logits.softmax(-1)
        order = law.argsort(descending=True)
        before = law[order].cumsum(0) - law[order]
        expected = sorted(order[before < mass].tolist()) if mass < 1 else list(range(12))
        assert in_nucleus(law.expand(12, -1), torch.arange(12), mass).nonzero()[:, 0].tolist() == expected
        assert members(Nucleus(mass), logits) == expected


def test_tied_tokens_are_in_the_nucleus_together():
    assert members(Nucleus(0.5), [1.0, 1.0, 1.0, 0.0]) == [0, 1, 2]
    assert members(Nucleus(0.01), [3.0, 3.0, 0.0, 0.0]) == [0, 1]


def test_the_nucleus_of_a_temperature():
    logits = [3.0, 2.0, 1.0, 0.0]
    assert members(Nucleus(0.9, score_temperature=0.2), logits) == [0]
    assert members(Nucleus(0.9), logits) == [0, 1, 2]
    assert members(Nucleus(0.9), logits, scores=[3e6, 2e6, 1e6, 0.0]) == [
        0,
        1,
        2,
    ]  # the run's temperature is no part of it


def test_a_full_nucleus_leaves_bans_alone():
    evidence = each_token([3.0, 2.0, 1.0], scores=[3.0, BANNED, 1.0])
    assert Nucleus(1.0).acceptance(evidence)[:, 0].tolist() == [1, 0, 1]


# --- the others, one by one -----------------------------------------------------------------------------------------


def test_typical_tokens():
    for logits in RANDOM:
        law = logits.softmax(-1).numpy()
        threshold = min(0.09, 0.3 * math.exp(-scipy_entropy(law)))
        assert members(Typical(), logits) == np.flatnonzero(law > threshold).tolist()
        best = np.sort(law)[::-1][:2]
        partial = min(0.09, 0.3 * math.exp((best * np.log(best)).sum()))
        two = Typical(entropy_kind="topk", entropy_top_k=2)
        assert members(two, logits) == np.flatnonzero(law > partial).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_tokens(top_k):
    for logits in RANDOM:
        assert members(TopK(top_k), logits) == sorted(logits.topk(top_k).indices.tolist())


def test_ranks_are_among_what_the_processors_left():
    evidence = each_token([4.0, 3.0, 2.0, 1.0], scores=[BANNED, 3.0, 2.0, 1.0])
    assert TopK(2).acceptance(evidence)[:, 0].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("logits", "theta", "expected"),
    [
        ([10.0, 9.1, 1.0], 0.9, [0, 1]),
        ([10.0, 9.0, 1.0], 0.9, []),
        ([10.0, 8.9, 1.0], 0.9, []),
        ([-1.0, -1.05, -9.0], 0.9, []),  # a ratio of negative logits means nothing
        ([0.0, 0.0, -9.0], 0.9, []),
        ([10.0, 10.0, 1.0], 1.0, []),
        ([10.0, 1.0, 0.5], 0.05, [0, 1]),  # the third is never a member
    ],
)
def test_mars_takes_the_runner_up_of_a_near_tie(logits, theta, expected):
    assert members(MARS(theta), logits) == expected


def test_bild_rejects_surprises():
    for logits in RANDOM:
        surprise = -logits.log_softmax(-1).numpy()
        assert members(BiLD(2.5), logits) == np.flatnonzero(surprise <= 2.5).tolist()


def test_bild_takes_the_targets_favourite_however_flat_its_law_is():
    assert members(BiLD(0.5), [1.0, 0.9, 0.8]) == [0]
    assert members(BiLD(0.0), [1.0, 0.9, 0.8]) == []


REFERENCE = {
    "js": lambda p, q: jensenshannon(p, q) ** 2,
    "kl": lambda p, q: scipy_entropy(p, q),
    "tv": lambda p, q: np.abs(p - q).sum() / 2,
}


@pytest.mark.parametrize("kind", sorted(REFERENCE))
def test_fsd_takes_all_or_nothing_by_the_divergence(kind):
    for logits, draft in zip(RANDOM, RANDOM[::-1], strict=True):
        p, q = logits.softmax(-1), draft.softmax(-1)
        exact = REFERENCE[kind](p.numpy(), q.numpy())
        assert float(divergence(p, q, kind)) == pytest.approx(exact, abs=1e-12)
        assert members(FSD(exact + 1e-9, kind), logits, draft) == list(range(12))
        assert members(FSD(exact - 1e-9, kind), logits, draft) == []


def test_divergences_of_laws_with_holes():
    first, second = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.5])
    assert float(divergence(first, second, "kl")) == math.inf
    assert float(divergence(first, first, "kl")) == 0.0
    assert float(divergence(first, second, "js")) == pytest.approx(0.5 * math.log(2))


# --- rules that look along the draft --------------------------------------------------------------------------------


def greedy_draft(matches, regrets=None, doubt=True):
    """One row that drafts token 1 where it mismatches; the target wants token 0 by the regret, and is unsure or not."""
    width = len(matches)
    logits = torch.zeros(1, width, 4, dtype=torch.float64)
    logits[..., 0] = torch.tensor(regrets if regrets is not None else [0.5] * width, dtype=torch.float64)
    logits[..., 1] = 0.0
    logits[..., 2:] = -0.5 if doubt else -30.0
    tokens = torch.tensor([[0 if match else 1 for match in matches]])
    return Evidence(tokens, torch.ones_like(tokens) > 0, logits, logits, False, place=place_of(tokens))


@pytest.mark.parametrize(
    ("matches", "window", "expected"),
    [
        ([1, 0, 1, 1, 0, 1], 3, [1, 1, 1, 1, 0, 1]),  # one after the second mismatch is not enough
        ([1, 0, 1, 1, 0, 1], 2, [1, 1, 1, 1, 1, 1]),
        ([1, 0, 0, 1, 1, 1], 3, [1, 0, 1, 1, 1, 1]),
        ([0, 1, 1, 1, 1, 1], 6, [1, 1, 1, 1, 1, 1]),
        ([1, 0, 1, 1, 1, 1], 6, [1, 0, 1, 1, 1, 1]),
        ([0, 0], 1, [1, 1]),
    ],
)
def test_fly_wants_agreement_after_a_mismatch(matches, window, expected):
    assert FLy(window).acceptance(greedy_draft(matches)).tolist() == [expected]
    sure = greedy_draft(matches, regrets=[9.0] * len(matches), doubt=False)
    assert FLy(window).acceptance(sure).tolist() == [matches]


def test_drafts_that_do_not_exist_agree_with_nothing():
    evidence = greedy_draft([0, 1, 1, 1])
    short = dataclasses.replace(evidence, valid=torch.tensor([[True, True, False, False]]))
    assert FLy(3).acceptance(evidence)[0, 0] == 1
    assert FLy(3).acceptance(short)[0, 0] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"budget": 0.0}, [1, 0, 0, 1, 0]),
        ({"budget": 1.0}, [1, 1, 0, 1, 0]),  # 0.8 fits, 0.8 + 0.6 does not, nor does what follows
        ({"budget": 1.4}, [1, 1, 1, 1, 0]),
        ({"budget": 9.0}, [1, 1, 1, 1, 1]),
        ({"budget": 9.0, "max_exceptions": 2}, [1, 1, 1, 1, 0]),
        ({"budget": 9.0, "max_exceptions": 0}, [1, 0, 0, 1, 0]),
        ({"budget": 9.0, "step_limit": 0.2}, [1, 1, 1, 1, 0]),  # 0.8 / 4 and 0.6 / 3 fit, 0.7 / 1 does not
        ({"budget": 9.0, "step_limit": 0.199}, [1, 0, 0, 1, 0]),
    ],
    ids=str,
)
def test_asd_spends_a_budget_of_regret(options, expected):
    evidence = greedy_draft([1, 0, 0, 1, 0], regrets=[0.8, 0.8, 0.6 - 1e-12, 0.8, 0.7])
    assert ASD(**options).acceptance(evidence)[0].tolist()[:2] == expected[:2]
    reached = ASD(**options).acceptance(evidence)[0].cumprod(0).sum()
    assert reached == torch.tensor(expected).cumprod(0).sum()


# --- thinking -------------------------------------------------------------------------------------------------------


START, END = 8, 9


def thinks(prompt, drafted, **options):
    logits = torch.zeros(1, len(drafted), 10, dtype=torch.float64)
    logits[..., 0] = 0.5
    tokens = torch.tensor([drafted])
    evidence = Evidence(tokens, torch.ones_like(tokens) > 0, logits, logits, False, place=place_of(tokens, prompt))
    return RelaxedThinking(end_token_id=END, **options).members(evidence)[0].tolist()


@pytest.mark.parametrize(
    ("prompt", "drafted", "expected"),
    [
        ([1, START], [2, 3, 4], [1, 1, 1]),
        ([1, START, 2, END], [2, 3, 4], [0, 0, 0]),
        ([1, 2], [2, START, 4], [0, 0, 1]),
        ([1, START], [2, END, 4], [1, 0, 0]),  # the end itself is the target's to decide
        ([START, 2, END, START], [2], [1]),
    ],
)
def test_thinking_starts_and_ends_with_its_tokens(prompt, drafted, expected):
    assert thinks(prompt, drafted, start_token_id=START) == expected


def test_without_a_start_the_text_thinks_until_the_end():
    assert thinks([END, 1], [2, 3], top_k=10) == [1, 1]
    assert thinks([1], [2, END, 3], top_k=10) == [1, 0, 0]


def test_thinking_is_relaxed_within_reach_of_the_first_token():
    assert thinks([START], [2], min_ratio=0.6, start_token_id=START) == [1]  # exp(-0.5) = 0.607
    assert thinks([START], [2], min_ratio=0.61, start_token_id=START) == [0]
    assert thinks([START], [2], top_k=1, start_token_id=START) == [0]


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_a_run_is_exact_after_thinking(batching):
    """The script is wrong throughout; drafts pass until the end of thinking was drafted and judged."""
    model = tiny_llama(layers=1)
    plain = model.generate(**prompts(), do_sample=False, max_new_tokens=12)[0, 7:].tolist()
    end = plain[5]
    assert end not in plain[:5]
    script = [(token + 1) % 63 + 1 for token in plain]
    script[0] = plain[0]
    rule = RelaxedThinking(end_token_id=end, top_k=64, min_ratio=0.0)
    assert end not in script[:4]
    config = SpeculativeConfig(
        acceptance=rule, guard=None, drafting="model", length=3, batching=batching, on_drafter_error="raise"
    )
    out = model.generate(
        **prompts(), assistant_model=lambda settings: ScriptedDrafter(settings, [[*script[:4], end, *script[5:]]]),
        speculative_config=config, do_sample=False, max_new_tokens=12,
    )  # fmt: skip
    text = out[0].tolist()
    wanted = model(out).logits[0].argmax(-1).tolist()
    ended = text.index(end, 7) if end in text[7:] else len(text)
    relaxed = [column for column in range(7, len(text)) if text[column] != wanted[column - 1]]
    assert relaxed
    assert max(relaxed) < ended


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Nucleus, {"nucleus_p": 1.1}),
        (Nucleus, {"nucleus_p": math.nan}),
        (Nucleus, {"score_temperature": 0.0}),
        (Lenience, {"lenience": 0.0}),
        (LossyEps, {"eps": -0.1}),
        (EARS, {"tolerance": 2.0}),
        (Typical, {"epsilon": -1.0}),
        (Typical, {"delta": -1.0}),
        (Typical, {"entropy_kind": "bits"}),
        (Typical, {"entropy_top_k": 0}),
        (TopK, {"top_k": -1}),
        (RelaxedThinking, {"end_token_id": None}),
        (RelaxedThinking, {"min_ratio": 2.0, "end_token_id": 1}),
        (RelaxedThinking, {"top_k": -1, "end_token_id": 1}),
        (MARS, {"theta": 1.5}),
        (FSD, {"threshold": -1.0}),
        (FSD, {"divergence_kind": "chi2"}),
        (FLy, {"window": 0}),
        (FLy, {"entropy_threshold": -0.1}),
        (FLy, {"entropy_kind": "bits"}),
        (FLy, {"entropy_top_k": 0}),
        (BiLD, {"rollback_threshold": -1.0}),
        (ASD, {"budget": -1.0}),
        (ASD, {"step_limit": math.nan}),
        (ASD, {"max_exceptions": -1}),
        (CascadeChow, {"alpha": 1.1}),
        (CascadeToken, {"alpha": math.nan}),
        (CascadeToken, {"version": "v4"}),
        (Mentored, {"max_divergence": -1.0}),
        (Mentored, {"num_steps": 0}),
        (Judge, {"judge": None}),
        (Judge, {"threshold": 2.0, "judge": len}),
        (CoSpec, {"policy": 3}),
        (CoSpec, {"threshold": 2.0}),
        (CoSpec, {"floor_ratio": 2.0}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(rule, options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        rule(**options)
