"""EASD: its law by enumeration, and when it fires."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from hf_specdec import InvalidConfigError
from hf_specdec.acceptance import ACCEPTANCE, EASD, Exact
from hf_specdec.laws import entropy
from tests.acceptance import WARPERS, error, joint_law, random_scores, target_law, warped
from tests.acceptance.easd import (
    BANNED,
    SURE,
    UNSURE,
    WAYS,
    always,
    fired_law,
    fires,
    one_position,
    reference_fires,
    without,
)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


# --- the law, by enumeration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("penalty", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("resample", "apply_to"), WAYS)
@pytest.mark.parametrize("name", [name for name in WARPERS if name != "T=1e-6"])
def test_the_law_where_the_rule_always_fires(name, resample, apply_to, penalty, dtype):
    raw, raw_draft = random_scores(1, 8, seed=1, dtype=dtype), random_scores(0, 8, seed=2, dtype=dtype)
    target, laws = warped(raw, WARPERS[name]), [table.softmax(-1) for table in warped(raw_draft, WARPERS[name])]
    rule = always(resample=resample, apply_to=apply_to, penalty=penalty)
    joint = joint_law(rule, target, laws, raw=raw, draft_logits=raw_draft)
    p, q = target[0].softmax(-1).double().numpy(), laws[0].double().numpy()
    expected = torch.from_numpy(fired_law(p, q, resample, apply_to, penalty))
    assert error(joint, expected[:, None] * target[1].softmax(-1).double()) <= TOLERANCE[dtype]
    lossless = apply_to == "all" and (resample == "plain" or penalty == 1.0)
    assert (error(expected, torch.from_numpy(p)) < 1e-6) == lossless


def test_plain_resampling_of_accepted_drafts_mixes_target_and_residual():
    """`(1 - D) p + (p - q)+`, with D the total variation: the ablation changes the law wherever the two models differ."""
    target, law = random_scores(1, 8, seed=3), random_scores(0, 8, seed=4)[0].softmax(-1)
    joint = joint_law(always(resample="plain"), target, [law], draft_logits=[law.log()])
    p = target[0].softmax(-1)
    distance = 0.5 * (p - law).abs().sum()
    assert error(joint.sum(-1), (1 - distance) * p + (p - law).clamp(min=0)) < 1e-15


def reference_joint(raw, target, raw_draft, laws, rule):
    """The whole procedure as a tree walk: draft, fire or toss the coin, resample, go on plainly."""
    width, vocab_size = len(laws), laws[0].shape[-1]
    joint = np.zeros([vocab_size] * (width + 1))
    num_fired = 0

    def emit(prefix, law, weight):
        completed = weight * law
        for depth in range(len(prefix) + 1, width + 1):
            completed = completed[..., None] * target[depth][tuple(prefix)]
        joint[tuple(prefix)] += completed

    def walk(prefix, weight):
        nonlocal num_fired
        depth = len(prefix)
        if depth == width:
            return emit(prefix, target[depth][tuple(prefix)], weight)
        p, q = target[depth][tuple(prefix)], laws[depth][tuple(prefix)]
        excess = np.clip(p - q, 0, None)
        residual = excess / excess.sum()
        fires = reference_fires(raw[depth][tuple(prefix)], raw_draft[depth][tuple(prefix)], rule)
        num_fired += fires
        for token in range(vocab_size):
            coin = min(1.0, p[token] / q[token])
            share = 1.0 if rule.apply_to == "all" else coin
            if fires:
                resampled = p if rule.resample == "plain" else without(p, token, rule.penalty)
                emit(prefix, share * resampled + (1 - share) * residual, weight * q[token])
            else:
                emit(prefix, residual, weight * q[token] * (1 - coin))
                walk([*prefix, token], weight * q[token] * coin)
        return None

    walk([], 1.0)
    return torch.from_numpy(joint), num_fired


@pytest.mark.parametrize("penalty", [0.0, 0.4])
@pytest.mark.parametrize(("resample", "apply_to"), WAYS)
def test_the_joint_law_where_the_rule_sometimes_fires(resample, apply_to, penalty):
    """Two drafts and the bonus; each state of the tree fires or not by its own evidence."""
    raw, raw_draft = random_scores(2, 6, seed=5), random_scores(1, 6, seed=6)
    target = warped(raw, WARPERS["T=2"])
    laws = [table.softmax(-1) for table in warped(raw_draft, WARPERS["T=2"])]
    rule = EASD(1.1, 1.0, 0.5, top_n=3, resample=resample, apply_to=apply_to, penalty=penalty)
    as_arrays = (
        [each.numpy() for each in tables] for tables in (raw, [t.softmax(-1) for t in target], raw_draft, laws)
    )
    expected, num_fired = reference_joint(*as_arrays, rule)
    assert 1 <= num_fired <= 6  # of seven states: the root and what follows each of six first tokens
    joint = joint_law(rule, target, laws, raw=raw, draft_logits=raw_draft)
    assert error(joint, expected) < 1e-12
    lossless = (resample, apply_to) == ("plain", "all")
    assert (error(joint, target_law(target)) < 1e-6) == lossless


@pytest.mark.parametrize(
    "rule",
    [
        EASD(math.inf, 0.0, 0.0),
        EASD(0.0, math.inf, 0.0),
        EASD(0.0, 0.0, 1.01),
        EASD(8.0, 8.0, 0.0),
    ],
    ids=["target", "draft", "overlap", "beyond log V"],
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_rule_that_cannot_fire_has_the_exact_law(rule, do_sample):
    target, draft = random_scores(2, 6, seed=7), random_scores(1, 6, seed=8)
    laws = [table.softmax(-1) for table in draft]
    joint = joint_law(rule, target, laws, draft_logits=draft, do_sample=do_sample)
    assert torch.equal(joint, joint_law(Exact(), target, laws, do_sample=do_sample))
    assert error(joint, target_law(target, do_sample)) < 1e-12


@pytest.mark.parametrize(("resample", "apply_to"), WAYS)
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("do_sample", [True, False])
def test_banned_tokens_are_never_emitted(resample, apply_to, penalty, do_sample):
    """Even where the draft model proposes them and the untempered logits love them."""
    raw, draft = random_scores(2, 6, seed=9), random_scores(1, 6, seed=10)
    for table in raw:
        table[..., 2] = 9.0
    scores = [table.clone() for table in raw]
    for table in scores:
        table[..., 2] = BANNED
    rule = always(resample=resample, apply_to=apply_to, penalty=penalty)
    joint = joint_law(rule, scores, [t.softmax(-1) for t in draft], raw=raw, draft_logits=draft, do_sample=do_sample)
    assert float(joint[2].sum() + joint[:, 2].sum() + joint[:, :, 2].sum()) == 0
    assert float(joint.sum()) == pytest.approx(1.0, abs=1e-12)


# --- when it fires --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [UNSURE, SURE])
@pytest.mark.parametrize("draft", [UNSURE, SURE])
def test_it_fires_only_where_both_are_unsure(target, draft):
    evidence = one_position(target, draft)
    assert fires(EASD(1.0, 1.0, 0.0), evidence) == (target is UNSURE and draft is UNSURE)


@pytest.mark.parametrize(("target", "draft", "expected"), [(1.37, 1.37, 1), (1.39, 1.37, 0), (1.37, 1.39, 0)])
def test_each_model_has_its_own_threshold(target, draft, expected):
    assert fires(EASD(target, draft, 0.0), one_position(UNSURE, UNSURE)) == expected


def test_an_entropy_equal_to_its_threshold_does_not_exceed_it():
    flat = [0.0] * 4
    limit = float(entropy(torch.zeros(4, dtype=torch.float64)))
    assert limit == pytest.approx(math.log(4))
    assert not fires(EASD(limit, 0.0, 0.0), one_position(flat, flat))
    assert fires(EASD(limit - 1e-9, limit - 1e-9, 0.0), one_position(flat, flat))


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 1), (0.5, 1), (0.51, 0), (1.0, 0)])
def test_an_overlap_equal_to_its_threshold_is_enough(threshold, expected):
    """The top-2 sets {0, 1} and {1, 2} share one token of two."""
    assert fires(EASD(0.0, 0.0, threshold, top_n=2), one_position([4.0, 3, 0, 0], [0, 3.0, 4, 0])) == expected


@pytest.mark.parametrize("kind", ["full", "topk", "normalized"])
@pytest.mark.parametrize("base", [math.e, 2.0])
def test_thresholds_are_in_the_units_of_the_chosen_entropy(kind, base):
    target = np.array([2.0, 1.0, 0.5, 0.0, -1.0])
    law = np.sort(softmax(target))[::-1]
    measures = {
        "full": scipy_entropy(law, base=base),
        "topk": -(law[:3] * np.log(law[:3])).sum() / np.log(base),
        "normalized": scipy_entropy(law, base=5),
    }
    evidence, options = one_position(target, target), {"entropy_kind": kind, "entropy_base": base}
    just_below, just_above = measures[kind] - 1e-6, measures[kind] + 1e-6
    assert fires(EASD(just_below, just_below, 0.0, **options), evidence)
    assert not fires(EASD(just_above, just_below, 0.0, **options), evidence)
    assert not fires(EASD(just_below, just_above, 0.0, **options), evidence)


@pytest.mark.parametrize("scores", [[0.3, BANNED, BANNED, BANNED], [0.3, 0.2, BANNED, BANNED]])
def test_without_a_second_candidate_there_is_nothing_to_resample(scores):
    candidates = sum(np.isfinite(scores))
    assert fires(always(), one_position(UNSURE, UNSURE, scores)) == (candidates > 1)


def test_processors_of_the_run_do_not_decide_whether_it_fires():
    """Scores of any temperature, but the same untempered logits."""
    for temperature in (1e-6, 0.1, 1.0, 10.0):
        scores = torch.tensor(UNSURE) / temperature
        assert fires(EASD(1.0, 1.0, 0.0), one_position(UNSURE, UNSURE, scores))
        assert not fires(EASD(1.0, 1.0, 0.0), one_position(SURE, UNSURE, torch.tensor(SURE) * 1e-3 / temperature))


def test_the_drafted_token_does_not_decide_whether_it_fires():
    target, draft = random_scores(0, 8, seed=11)[0], random_scores(0, 8, seed=12)[0]
    for rule, expected in ((EASD(1.0, 1.0, 0.2), True), (EASD(1.0, 1.9, 0.2), False)):
        assert {fires(rule, one_position(target, draft, token=token)) for token in range(8)} == {expected}


def test_looser_thresholds_fire_wherever_stricter_ones_do():
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(400, 16, generator=generator)
    draft = target + torch.randn(400, 16, generator=generator)
    candidates = torch.full((400,), 16)

    def fired(target_threshold, draft_threshold, overlap):
        return EASD(target_threshold, draft_threshold, overlap).fires(target, draft, candidates)

    levels, overlaps = [2.5, 2.0, 1.5, 1.0, 0.5, 0.0], [1.0, 0.8, 0.6, 0.4, 0.0]
    chains = [
        [fired(level, level, 0.6) for level in levels],
        [fired(level, 1.0, 0.6) for level in levels],
        [fired(1.0, level, 0.6) for level in levels],
        [fired(1.0, 1.0, overlap) for overlap in overlaps],
    ]
    for chain in chains:
        counts = [int(each.sum()) for each in chain]
        assert all(bool((stricter <= looser).all()) for stricter, looser in itertools.pairwise(chain))
        assert counts[0] < counts[-1]
        assert counts == sorted(counts)


# --- options --------------------------------------------------------------------------------------------------------


def test_the_rule_says_what_it_is():
    assert ACCEPTANCE["easd"] is EASD
    assert not EASD().lossless
    assert EASD().needs_draft_logits


@pytest.mark.parametrize(
    "options",
    [
        {"target_entropy_threshold": math.nan},
        {"draft_entropy_threshold": math.nan},
        {"overlap_threshold": -0.1},
        {"overlap_threshold": math.nan},
        {"top_n": 0},
        {"resample": "hard"},
        {"apply_to": "rejected"},
        {"penalty": -0.1},
        {"penalty": 1.1},
        {"penalty": math.nan},
        {"entropy_kind": "bits"},
        {"entropy_top_k": 0},
        {"entropy_base": 1.0},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        EASD(**options)
