"""EASD: its law by enumeration, when it fires, what it emits at temperature 0, and what it counts."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import chisquare
from scipy.stats import entropy as scipy_entropy

from hf_specdec import EASDConfig, ExactConfig, InvalidConfigError, SpeculativeConfig
from hf_specdec.acceptance import ACCEPTANCE, EASD, Exact
from hf_specdec.drafters import DrafterBase, DraftSettings, HybridDrafter
from hf_specdec.laws import entropy
from hf_specdec.records import Budget, Context, Draft, Evidence
from hf_specdec.verify import evidence_of, verify
from tests.acceptance import WARPERS, joint_law, random_scores, target_law, warped
from tests.toys import noisy_copy, prompts, tiny_llama


BANNED = float("-inf")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
WAYS = list(itertools.product(["masked", "plain"], ["accepted", "all"]))


def always(**options):
    """A rule whose thresholds every uncertain position exceeds."""
    return EASD(0.0, 0.0, overlap_threshold=0.0, **options)


def error(ours, exact):
    return float((ours - exact).abs().max())


# --- the law, by enumeration ----------------------------------------------------------------------------------------


def without(p, token, kept):
    law = p.copy()
    law[token] *= kept
    return law / law.sum() if law.sum() > 0 else p


def fired_law(p, q, resample, apply_to, penalty=0.0):
    """What one position emits where the rule fires: the four formulas, written down once more."""
    excess = np.clip(p - q, 0, None)
    masked = np.array([p if resample == "plain" else without(p, x, penalty) for x in range(len(p))])
    if apply_to == "all":
        return q @ masked
    return np.minimum(p, q) @ masked + excess


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


def reference_fires(target_logits, draft_logits, rule):
    """The trigger in numpy, one position at a time."""

    def unsure(logits, threshold):
        return scipy_entropy(softmax(logits)) > threshold

    def top(logits):
        return set(np.argsort(-logits)[: rule.top_n].tolist())

    shared = len(top(target_logits) & top(draft_logits)) / rule.top_n
    return (
        unsure(target_logits, rule.target_entropy_threshold)
        and unsure(draft_logits, rule.draft_entropy_threshold)
        and shared >= rule.overlap_threshold
    )


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


def one_position(target_logits, draft_logits, scores=None, token=0, q=None, do_sample=True):
    """The evidence on one drafted position of one row."""
    target_logits = torch.as_tensor(target_logits, dtype=torch.float64)[None, None]
    draft_logits = None if draft_logits is None else torch.as_tensor(draft_logits, dtype=torch.float64)[None, None]
    return Evidence(
        tokens=torch.tensor([[token]]),
        valid=torch.tensor([[True]]),
        scores=target_logits if scores is None else torch.as_tensor(scores, dtype=torch.float64)[None, None],
        target_logits=target_logits,
        do_sample=do_sample,
        q=q if q is not None else (None if draft_logits is None else draft_logits.softmax(-1)),
        draft_logits=draft_logits,
    )


def fires(rule, evidence):
    """Whether the rule rejects a draft that the exact rule may accept."""
    assert bool((Exact().acceptance(evidence) > 0).all())
    return bool((rule.acceptance(evidence) == 0).all())


UNSURE = [0.3, 0.2, 0.1, 0.0]  # entropy 1.38 nats of at most 1.386
SURE = [9.0, 0.2, 0.1, 0.0]  # 0.004


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


# --- n-gram drafts --------------------------------------------------------------------------------------------------


class Fixed(DrafterBase):
    """Proposes one recorded draft."""

    def __init__(self, draft):
        super().__init__(DraftSettings(vocab_size=draft.logits.shape[-1] if draft.logits is not None else 8))
        self.draft = draft

    def propose(self, context, budget):
        return self.draft

    def match(self, context, max_tokens):
        return self.draft


@pytest.mark.parametrize("threshold", [2.0, 0.0, -1.0])
def test_it_never_fires_on_an_ngram_draft(threshold):
    """A point mass has no entropy; no threshold makes it uncertain."""
    assert not fires(EASD(threshold, threshold, 0.0), one_position(UNSURE, None))


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_it_fires_on_the_modelled_rows_of_a_hybrid_draft_only(threshold):
    laws = torch.full((2, 2, 8), 1 / 8)
    ngram = Draft(torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([3, 0]), source="ngram")
    model = Draft(torch.tensor([[0, 0], [6, 7]]), torch.tensor([0, 2]), q=laws, logits=laws.log(), source="model")
    drafter = HybridDrafter(DraftSettings(vocab_size=8), Fixed(ngram), Fixed(model))
    context = Context.of(torch.zeros(2, 4, dtype=torch.long))
    draft = drafter.propose(context, Budget(torch.tensor([3, 3])))
    scores = torch.zeros(2, 3, 8)
    evidence = evidence_of(draft, scores, scores, True, 0, 3)
    rule = EASD(threshold, threshold, 0.0)
    exact, ours = Exact().acceptance(evidence), rule.acceptance(evidence)
    assert torch.equal(ours[0], exact[0])
    assert ours[1, :2].tolist() == [0.0, 0.0]
    assert exact[1, :2].tolist() == [1.0, 1.0]


def test_ngram_drafting_alone_is_refused():
    with pytest.raises(InvalidConfigError, match="point mass"):
        EASDConfig(drafting="ngram").drafting_for(has_assistant=True, deterministic=True)


def test_rounds_served_by_an_ngram_match_are_exact():
    model, rounds = tiny_llama(), []
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    model.generate(
        ids,
        assistant_model=noisy_copy(model),
        speculative_config=EASDConfig(drafting="hybrid", entropy_threshold=-1, overlap_threshold=0, length=3),
        round_callback=rounds.append,
        do_sample=False,
        max_new_tokens=40,
    )
    fired = {"ngram": 0, "model": 0}
    for round_ in rounds:
        if not round_.is_prefill and round_.source in fired:
            fired[round_.source] += int(sum(round_.events.get("easd_fired", torch.zeros(1))))
    sources = [round_.source for round_ in rounds]
    assert sources.count("ngram") > 2
    assert sources.count("model") > 2
    assert fired == {"ngram": 0, "model": sources.count("model")}


# --- temperature 0 --------------------------------------------------------------------------------------------------


def greedy_token(rule, token, scores, draft_logits=None):
    evidence = one_position(UNSURE, UNSURE if draft_logits is None else draft_logits, scores, token, do_sample=False)
    bonus = torch.tensor([[0.0, 0.0, 0.0, 5.0]], dtype=torch.float64)
    verdict = verify(rule, evidence, bonus, None, torch.tensor([True]))
    return int(verdict.num_accepted), int(verdict.next_tokens)


SCORES = [1.0, 4.0, 3.5, 2.0]  # argmax 1, runner-up 2


@pytest.mark.parametrize("apply_to", ["accepted", "all"])
def test_an_aligned_draft_gives_way_to_the_runner_up(apply_to):
    assert greedy_token(Exact(), 1, SCORES) == (1, 3)
    assert greedy_token(always(apply_to=apply_to), 1, SCORES) == (0, 2)


@pytest.mark.parametrize("token", [0, 2, 3])
@pytest.mark.parametrize(("resample", "apply_to"), WAYS)
def test_any_other_draft_gives_way_to_the_argmax(token, resample, apply_to):
    assert greedy_token(always(resample=resample, apply_to=apply_to), token, SCORES) == (0, 1)


@pytest.mark.parametrize("apply_to", ["accepted", "all"])
def test_plain_resampling_emits_the_argmax_whatever_was_drafted(apply_to):
    """So at temperature 0 it changes the number of accepted drafts and never the text."""
    rule = always(resample="plain", apply_to=apply_to)
    assert {greedy_token(rule, token, SCORES) for token in range(4)} == {(0, 1)}


@pytest.mark.parametrize(("penalty", "expected"), [(0.0, 2), (0.5, 2), (0.6, 2), (0.61, 1), (0.9, 1), (1.0, 1)])
def test_a_penalty_only_removes_a_narrow_lead(penalty, expected):
    """exp(3.5 - 4) = 0.607: the argmax keeps its place while its penalised probability is above the runner-up's."""
    assert greedy_token(always(penalty=penalty), 1, SCORES)[1] == expected


def test_the_runner_up_is_sought_among_what_the_processors_left():
    assert greedy_token(always(), 1, [1.0, 4.0, BANNED, 2.0]) == (0, 3)
    assert greedy_token(always(), 1, [BANNED, 4.0, BANNED, BANNED]) == (1, 3)


def reference_text(target, draft, prompt, rule, *, length, tokens):
    """Greedy EASD for one text with no cache at all: the text, and how often the rule fired and changed a token."""

    def logits(model, text):
        with torch.no_grad():
            return model(torch.tensor([text])).logits[0].double().numpy()

    text, end = list(prompt), len(prompt) + tokens
    text.append(int(logits(target, text)[-1].argmax()))  # the prompt's own token has no draft
    fired = changed = 0
    while len(text) < end:
        drafted, draft_rows = [], []
        for _ in range(min(length, end - len(text) - 1)):
            draft_rows.append(logits(draft, text + drafted)[-1])
            drafted.append(int(draft_rows[-1].argmax()))
        target_rows = logits(target, text + drafted)[len(text) - 1 :]
        for token, target_row, draft_row in zip(drafted, target_rows, draft_rows, strict=False):
            order = np.argsort(-target_row)
            aligned = token == order[0]
            if reference_fires(target_row, draft_row, rule):
                fired, changed = fired + 1, changed + aligned
                text.append(int(order[1] if aligned and rule.resample == "masked" else order[0]))
                if rule.resample == "plain":
                    changed -= aligned
                break
            text.append(int(order[0]))
            if not aligned:
                break
        else:
            text.append(int(target_rows[len(drafted)].argmax()))
    return text, fired, changed


@pytest.mark.parametrize(
    ("batch_size", "batching", "resample"),
    [
        (1, "ragged", "masked"),
        (1, "ragged", "plain"),
        (1, "lockstep", "masked"),
        (3, "ragged", "masked"),
        (
            3,
            "lockstep",
            "plain",
        ),  # masked, rows in step meet the rule elsewhere: a rejection cuts the others' drafts too
    ],
)
def test_text_and_counters_equal_a_reference_without_any_cache(batch_size, batching, resample):
    target = tiny_llama(layers=2)
    draft = noisy_copy(target, noise=0.1)
    config = EASDConfig(
        entropy_threshold=1.2, overlap_threshold=0.5, top_n=4, resample=resample, length=3, batching=batching,
        on_drafter_error="raise",
    )  # fmt: skip
    inputs = prompts(batch_size)
    out = target.generate(
        **inputs,
        assistant_model=draft,
        speculative_config=config,
        do_sample=False,
        max_new_tokens=16,
        return_dict_in_generate=True,
    )
    totals = [0, 0]
    for row in range(batch_size):
        real = inputs["attention_mask"][row].bool()
        text, fired, changed = reference_text(
            target, draft, inputs["input_ids"][row][real].tolist(), config.rule, length=3, tokens=16
        )
        assert out.sequences[row][7 - int(real.sum()) :].tolist() == text
        counted = out.speculative_stats.rows[row].events
        if batching == "ragged" or batch_size == 1:
            assert (counted["easd_fired"], counted["easd_changed_token"]) == (fired, changed)
        totals = [totals[0] + fired, totals[1] + changed]
    assert totals[0] > 2
    assert (totals[1] > 0) == (resample == "masked")
    exact = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert torch.equal(out.sequences, exact) == (resample == "plain")
    assert not out.speculative_stats.lossless


# --- counters, by hand ----------------------------------------------------------------------------------------------


class Dice:
    def __init__(self, numbers):
        self.numbers, self.thrown = torch.tensor(numbers, dtype=torch.float64), 0

    def uniforms(self, rows):
        self.thrown += 1
        return self.numbers[:, self.thrown - 1]


HALF, FIRST, SECOND = [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
BOTH_UNSURE, TARGET_SURE, DRAFT_SURE = (UNSURE, UNSURE), (SURE, UNSURE), (UNSURE, SURE)
DISAGREE = (UNSURE, UNSURE[::-1])
# Token 0 is drafted twice with certainty. Per row: what holds at each position, the target's two laws, how many tokens
# were drafted, three dice; then the accepted number, the emitted token, and the two counts.
TRACES = {
    "fires on a kept draft": ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.3, 0.5, 0.5], 0, 1, 1, 1),
    "fires on a lost draft": ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.7, 0.5, 0.5], 0, 1, 1, 0),
    "fires after an accepted draft": ([DRAFT_SURE, BOTH_UNSURE], [HALF, HALF], 2, [0.3, 0.3, 0.5], 1, 1, 1, 1),
    "is not reached": ([TARGET_SURE, BOTH_UNSURE], [SECOND, HALF], 2, [0.3, 0.3, 0.5], 0, 1, 0, 0),
    "is silent twice": ([TARGET_SURE, DRAFT_SURE], [HALF, HALF], 2, [0.3, 0.3, 0.5], 2, 3, 0, 0),
    "is silent where the sets differ": ([DISAGREE, DISAGREE], [HALF, HALF], 2, [0.3, 0.7, 0.5], 1, 1, 0, 0),
    "has one candidate only": ([BOTH_UNSURE, BOTH_UNSURE], [FIRST, FIRST], 2, [0.3, 0.3, 0.5], 2, 3, 0, 0),
    "has no draft": ([BOTH_UNSURE, BOTH_UNSURE], [HALF, HALF], 0, [0.3, 0.3, 0.5], 0, 3, 0, 0),
    "has one draft": ([TARGET_SURE, BOTH_UNSURE], [FIRST, HALF], 1, [0.3, 0.3, 0.5], 1, 3, 0, 0),
}


def traced(traces, rule):
    laws = torch.tensor([trace[1] for trace in traces], dtype=torch.float64)
    certain = [positions for positions, *_ in traces]
    evidence = Evidence(
        tokens=torch.zeros(len(traces), 2, dtype=torch.long),
        valid=torch.arange(2) < torch.tensor([trace[2] for trace in traces])[:, None],
        scores=laws.log(),
        target_logits=torch.tensor([[target for target, _ in each] for each in certain], dtype=torch.float64),
        do_sample=True,
        q=torch.tensor(FIRST, dtype=torch.float64).expand(len(traces), 2, -1),
        draft_logits=torch.tensor([[draft for _, draft in each] for each in certain], dtype=torch.float64),
    )
    bonus = torch.tensor([[BANNED, BANNED, BANNED, 0.0]]).expand(len(traces), -1)
    return verify(rule, evidence, bonus, Dice([trace[3] for trace in traces]), torch.ones(len(traces)) > 0)


def test_counters_on_hand_made_traces():
    verdict = traced(list(TRACES.values()), EASD(1.0, 1.0, 0.5, top_n=2))
    columns = (verdict.num_accepted, verdict.next_tokens, *(verdict.events[name] for name in COUNTERS))
    found = dict(zip(TRACES, zip(*(each.tolist() for each in columns), strict=True), strict=True))
    assert found == {name: trace[4:] for name, trace in TRACES.items()}


COUNTERS = ("easd_fired", "easd_changed_token")


def test_a_draft_that_survives_its_penalty_is_not_counted_as_changed():
    trace = ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.3, 0.5, 0.1])
    for penalty, token, changed in ((0.0, 1, 1), (0.5, 0, 0), (1.0, 0, 0)):
        verdict = traced([trace], EASD(1.0, 1.0, 0.5, top_n=2, penalty=penalty))
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.next_tokens.tolist() == [token]
        assert [int(verdict.events[name]) for name in COUNTERS] == [1, changed]


# --- through generate -----------------------------------------------------------------------------------------------


def decode(model, drafter, config, inputs, **options):
    torch.manual_seed(11)
    return model.generate(
        **inputs,
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=options.pop("max_new_tokens", 16),
        return_dict_in_generate=True,
        **options,
    )


NEVER = {
    "both": {"entropy_threshold": math.inf, "overlap_threshold": 0.0},
    "draft": {"entropy_threshold": 0.0, "draft_entropy_threshold": math.inf, "overlap_threshold": 0.0},
    "overlap": {"entropy_threshold": 0.0, "overlap_threshold": 1.01},
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "batching", "name"),
    [(1, "ragged", "both"), (1, "lockstep", "draft"), (3, "ragged", "overlap"), (3, "lockstep", "both")],
)
def test_thresholds_that_never_fire_give_the_exact_text_token_for_token(do_sample, batch_size, batching, name):
    model = tiny_llama(layers=1)
    shared = {"length": 4, "batching": batching, "on_drafter_error": "raise"}
    options = {"do_sample": do_sample, **({"temperature": 1.3, "top_k": 20} if do_sample else {})}
    inputs, drafter = prompts(batch_size), noisy_copy(model)
    exact = decode(model, drafter, ExactConfig(drafting="model", **shared), inputs, **options)
    easd = decode(model, drafter, EASDConfig(**NEVER[name], **shared), inputs, **options)
    assert torch.equal(easd.sequences, exact.sequences)
    assert easd.speculative_stats.num_accepted_tokens == exact.speculative_stats.num_accepted_tokens > 0
    assert all(easd.speculative_stats.events[name] == 0 for name in COUNTERS)
    on = decode(model, drafter, EASDConfig(entropy_threshold=0.5, overlap_threshold=0.0, **shared), inputs, **options)
    assert not torch.equal(on.sequences, exact.sequences)
    assert on.speculative_stats.events["easd_fired"] > 0


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_the_rule_reads_untempered_logits(batching):
    """What it is shown in a run at temperature 2 with top-k: raw logits of both models beside the processed scores."""
    seen = []

    class Recording:
        lossless, needs_draft_logits, throws_dice = False, True, False

        def acceptance(self, evidence):
            seen.append(evidence)
            return Exact().acceptance(evidence)

        def replacement(self, evidence):
            return Exact().replacement(evidence)

        def count(self, evidence, outcome):
            return {}

    model, inputs = tiny_llama(layers=2), {"input_ids": torch.tensor([[3, 9, 4, 33, 7]])}
    drafter = noisy_copy(model)
    config = SpeculativeConfig(acceptance=Recording(), drafting="model", length=2, batching=batching)
    out = decode(model, drafter, config, inputs, do_sample=True, temperature=2.0, top_k=5, max_new_tokens=4)
    text = out.sequences[0].tolist()
    with torch.no_grad():
        raw, raw_draft = (each(torch.tensor([text[:6]])).logits[0, -1] for each in (model, drafter))
    first = seen[0].at(torch.tensor([0]))
    torch.testing.assert_close(first.target_logits[0, 0], raw, atol=1e-4, rtol=0)
    torch.testing.assert_close(first.draft_logits[0, 0], raw_draft, atol=1e-4, rtol=0)
    kept = raw.topk(5).indices
    torch.testing.assert_close(first.scores[0, 0, kept], raw[kept] / 2, atol=1e-4, rtol=0)
    assert int(first.scores.isfinite().sum()) == 5
    assert int((first.q > 0).sum()) == 5


def test_sampled_runs_follow_the_enumerated_law():
    """Three tokens: the prompt's own from `p`, one that the rule rejects and resamples, and one that has no draft."""
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=8, layers=1)
    drafter = noisy_copy(model, noise=0.5)
    prompt = [1, 2, 3, 1, 2]
    inputs = {"input_ids": torch.tensor([prompt])}
    options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_new_tokens": 3, "num_return_sequences": 6000}
    out = decode(model, drafter, EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0), inputs, **options)
    assert out.speculative_stats.events["easd_fired"] == out.speculative_stats.num_draft_tokens == 6000

    def laws(lm, texts):
        with torch.no_grad():
            return (lm(torch.tensor(texts)).logits[:, -1].double() / 2).softmax(-1).numpy()

    pairs = [[*prompt, first, second] for first in range(8) for second in range(8)]
    p0, p2 = laws(model, [prompt])[0], laws(model, pairs).reshape(8, 8, 8)
    p1, q1 = (laws(lm, [[*prompt, first] for first in range(8)]) for lm in (model, drafter))
    fired = np.array([fired_law(p, q, "masked", "accepted") for p, q in zip(p1, q1, strict=True)])
    observed = np.zeros((8, 8, 8))
    np.add.at(observed, tuple(out.sequences[:, -3:].T.numpy()), 1)

    def p_value(second):
        expected = (6000 * p0[:, None, None] * second[:, :, None] * p2).ravel()
        rare = expected < 5
        cells = [np.append(each[~rare], each[rare].sum()) for each in (observed.ravel(), expected)]
        return chisquare(*cells).pvalue

    assert p_value(fired) > 1e-4
    assert p_value(p1) < 1e-20  # the target's own law, which this rule must not have


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
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        EASD(**options)
