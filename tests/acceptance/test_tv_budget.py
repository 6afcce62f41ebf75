"""What a rule says about its distance from the target, against enumeration; and the limits on that distance."""

import dataclasses
import math

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec import ExactConfig, InvalidConfigError, NucleusConfig, SpeculativeConfig
from hf_specdec.acceptance import (
    ASD,
    CSD,
    EASD,
    EarlyExactGuard,
    Exact,
    FLy,
    Nucleus,
    TopK,
    TVBudget,
    step_tv,
    tv_budget,
)
from hf_specdec.acceptance.emission import emitted_law
from hf_specdec.drafters import ScriptedDrafter
from hf_specdec.laws import in_nucleus, nucleus, total_variation
from hf_specdec.quality import RandomRejection
from hf_specdec.records import Evidence, Judged
from tests.acceptance import joint_law, place_of, random_scores, target_law
from tests.acceptance.rules import OFF, ON, familiar_memory
from tests.toys import noisy_copy, prompts, tiny_llama


UNKNOWN = {"cospec", "fly", "judge"}  # their sets depend on more than the two laws and the prefix
RULES = {
    **ON,
    "csd ocm": CSD(frequency_threshold=2, mode="ocm", memory=familiar_memory(), learn=False, protected_tokens=(1, 4)),
    "csd scg": CSD(score_ratio=0.3, mode="scg", learn=False),
    "easd all": EASD(0.5, 0.5, 0.0, apply_to="all"),
    "easd penalty": EASD(0.5, 0.5, 0.0, penalty=0.3),
    "easd plain": EASD(0.5, 0.5, 0.0, resample="plain"),
    "guard open": EarlyExactGuard(ON["topk"], 0),
    "guard shut": EarlyExactGuard(ON["topk"], 9),
}
KNOWN = sorted(set(RULES) - UNKNOWN)


def tables(seed, depth=2, vocab_size=6):
    raw = random_scores(depth, vocab_size, seed=seed)
    noise = random_scores(depth - 1, vocab_size, seed=seed + 100, spread=0.8)
    return raw, [table + other for table, other in zip(raw, noise, strict=False)]


def every_draft(raw, draft, before=None, *, do_sample=True, banned=(), point=False):
    """One row per token of the vocabulary, drafted at the last position; `before` is the token drafted before it."""
    vocab_size = raw[0].shape[-1]
    tokens = torch.arange(vocab_size)[:, None]
    if before is not None:
        tokens = torch.cat([torch.full_like(tokens, before), tokens], -1)

    def rows(levels):
        levels = [levels[0], levels[1][before]] if before is not None else [levels[0]]
        return torch.stack(levels)[None].expand(vocab_size, -1, -1).clone()

    scores = rows(raw)
    scores[..., list(banned)] = -math.inf
    q = None if point else rows(draft).softmax(-1)
    return Evidence(tokens, torch.ones_like(tokens) > 0, scores, rows(raw), do_sample, q, rows(draft), place_of(tokens))


def enumerated(rule, evidence):
    """The law of the token at the last position, summed over everything that may be drafted there."""
    last = torch.full((len(evidence.tokens),), evidence.tokens.shape[1] - 1)
    q, acceptance = evidence.q[0, -1], rule.acceptance(evidence)[:, -1]
    return q * acceptance + (q * (1 - acceptance)) @ rule.replacement(evidence.at(last))


@pytest.mark.parametrize("banned", [(), (2, 5)], ids=["", "bans"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_rule_knows_the_law_that_it_emits(name, banned):
    rule, distances = RULES[name], []
    for seed in range(5):
        for before in (None, 3):
            evidence = every_draft(*tables(seed), before, banned=banned)
            law, claimed = enumerated(rule, evidence), rule.emitted(evidence)
            told = claimed[:, -1]
            assert float((told - told[:1]).abs().max()) == 0  # it does not depend on the draft itself
            torch.testing.assert_close(told[0], law, atol=1e-12, rtol=0)
            distance = float(total_variation(law, evidence.p[0, -1]))
            assert abs(float(step_tv(rule, evidence)[0, -1]) - distance) < 1e-12
            distances.append(distance)
    assert (max(distances) > 1e-3) == (name != "guard shut")


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", [*sorted(RULES), "random"])
def test_of_a_point_mass_every_law_is_known(name, do_sample):
    rule, distances = RULES.get(name, RandomRejection(0.4)), []
    for seed in range(6):
        raw, draft = tables(seed)
        evidence = every_draft(raw, draft, do_sample=do_sample, point=True)
        told = step_tv(rule, evidence)[:, 0]
        for token in range(6):
            joint = joint_law(rule, raw[:2], None, path=[token], do_sample=do_sample, draft_logits=draft[:1])
            law = joint.sum(-1)
            assert abs(float(told[token]) - float(total_variation(law, target_law(raw[:1], do_sample)))) < 1e-12
        distances.append(float(told.max()))
    exact = ["guard shut", "easd plain", "fly"] + ([] if do_sample else ["lenience", "mentored"])
    assert max(distances) > 1e-3 or name in exact


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("name", [*sorted(RULES), "random"])
def test_greedy_distances_along_a_draft_are_those_of_the_laws(name, before):
    rule = RULES.get(name, RandomRejection(0.4))
    evidence = every_draft(*tables(before, depth=3), before=before, do_sample=False, point=True)
    told = total_variation(emitted_law(rule, evidence), evidence.p)
    assert torch.allclose(step_tv(rule, evidence), told, atol=1e-12)
    evidence.valid[::2, 1] = False
    cost = step_tv(rule, evidence)
    assert not cost[::2, 1].any()
    assert torch.allclose(cost[1::2], told[1::2], atol=1e-12) or name in ("fly", "asd")  # which look at later drafts


def test_a_round_is_measured_once(pair, monkeypatch):
    seen = []
    monkeypatch.setattr(tv_budget, "step_tv", lambda *given: seen.append(given) or step_tv(*given))
    rounds = []
    decode(pair, config_of(TopK(3), tv_budget=1.0), round_callback=rounds.append)
    assert 3 < len(seen) == sum(int(each.num_drafted.max()) > 0 for each in rounds)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_is_not_known_is_not_told(name):
    evidence = every_draft(*tables(1))
    assert bool(step_tv(ON[name], evidence).isnan().all())
    assert float(step_tv(TVBudget(ON[name], 0.1), evidence).max()) == 0.0  # so it is judged exactly


@pytest.mark.parametrize("name", sorted(ON))
def test_switched_off_no_rule_is_away_from_the_target(name):
    evidence = every_draft(*tables(2))
    distance = step_tv(OFF[name], evidence)
    assert float(distance.nan_to_num(0.0).abs().max()) < 1e-15
    assert bool(distance.isnan().any()) == (name in UNKNOWN)


@pytest.mark.parametrize("mass", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_the_nucleus_as_a_mask_is_the_nucleus_without_sorting(mass):
    laws = [table.softmax(-1) for table in random_scores(0, 40, seed=4) + random_scores(1, 9, seed=5)]
    laws += [torch.tensor([0.25, 0.25, 0.25, 0.125, 0.125], dtype=torch.float64), torch.tensor([1.0, 0.0])]
    for law in laws:
        mask = nucleus(law, mass)
        for token in range(law.shape[-1]):
            tokens = torch.full(law.shape[:-1], token)
            assert torch.equal(mask[..., token], in_nucleus(law, tokens, mass))


# --- limits, by enumeration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.02, 0.1])
@pytest.mark.parametrize("name", KNOWN)
def test_no_step_exceeds_its_limit(name, limit):
    inner = RULES[name]
    kinds = set()
    for seed in range(6):
        for before in (None, 3):
            evidence = every_draft(*tables(seed), before)
            free = float(step_tv(inner, evidence)[0, -1])
            law = enumerated(TVBudget(inner, max_step_tv=limit), evidence)
            expected = enumerated(inner if free <= limit else Exact(), evidence)
            torch.testing.assert_close(law, expected, atol=0, rtol=0)
            kinds.add(free <= limit)
    assert False in kinds or name == "guard shut" or limit == 0.1


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("budget", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("name", ["nucleus", "topk", "lossy_eps", "cascade_token", "easd", "csd", "fly"])
def test_a_text_stays_within_the_budget(name, budget, do_sample):
    """The law of three tokens, of which the rule decides two, is at most the budget away from the target's."""
    distances = []
    for seed in range(4):
        raw, draft = tables(seed)
        laws = [table.softmax(-1) for table in draft] if do_sample else None
        path = None if do_sample else [int(draft[0].argmax()), int(draft[1][int(draft[0].argmax())].argmax())]
        joint = joint_law(
            TVBudget(ON[name], tv_budget=budget), raw, laws, path=path, do_sample=do_sample, draft_logits=draft
        )
        target = target_law(raw, do_sample)
        distances.append(0.5 * float((joint - target).abs().sum()))
    assert max(distances) <= budget + 1e-12
    if budget == 0.2 and do_sample and name in ("nucleus", "topk", "lossy_eps"):
        assert max(distances) > 0.05


def test_a_budget_lasts_over_rounds_and_is_closed_by_the_step_that_exceeds_it():
    raw, draft = tables(1)
    evidence = every_draft(raw, draft)
    rule = TopK(3)
    cost = float(step_tv(rule, evidence)[0, 0])
    budgeted = TVBudget(rule, tv_budget=2.5 * cost)
    reached = torch.ones_like(evidence.valid)
    spent = []
    for _ in range(4):
        spent.append(float(step_tv(budgeted, evidence)[0, 0]))
        events = budgeted.observe(Judged(evidence, reached, reached))
    assert spent == pytest.approx([cost, cost, 0.0, 0.0])
    assert events["tv_limited"].tolist() == [1] * 6
    cheap = every_draft([raw[0] * 0.0, raw[1]], [raw[0] * 0.0 + torch.arange(6) * 1e-4, draft[1]])
    assert 0 < float(step_tv(rule, cheap)[0, 0]) < 0.5 * cost
    assert float(step_tv(budgeted, cheap).max()) == 0.0  # what is left is not spent on cheaper steps


def test_a_step_that_was_discarded_costs_nothing():
    evidence = every_draft(*tables(1))
    budgeted = TVBudget(TopK(3), tv_budget=100.0)
    assert float(step_tv(budgeted, evidence).min()) > 0
    nothing = torch.zeros_like(evidence.valid)
    budgeted.observe(Judged(evidence, nothing, nothing))
    assert float(budgeted._ledger.spent.max()) == 0.0


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama(layers=1)
    return model, noisy_copy(model, noise=0.3)


def decode(pair, config, *, do_sample=False, batch_size=2, tokens=16, **options):
    torch.manual_seed(4)
    if do_sample:
        options |= {"temperature": 1.2}
    return pair[0].generate(
        **prompts(batch_size), assistant_model=pair[1], speculative_config=config, max_new_tokens=tokens,
        do_sample=do_sample, return_dict_in_generate=True, **options,
    )  # fmt: skip


def config_of(rule, **options):
    options = {"drafting": "model", "length": 4, "on_drafter_error": "raise", "guard": None} | options
    return SpeculativeConfig(acceptance=rule, **options)


@pytest.mark.parametrize(("do_sample", "batching"), [(True, "ragged"), (False, "lockstep")])
@pytest.mark.parametrize("name", sorted(ON))
def test_measuring_changes_no_token_and_no_budget_is_the_exact_run(name, do_sample, batching, pair):
    options = {"do_sample": do_sample, "tokens": 8}
    free = decode(pair, config_of(ON[name], batching=batching), **options)
    measured = decode(pair, config_of(ON[name], batching=batching, diagnostics=True), **options)
    assert torch.equal(measured.sequences, free.sequences)
    counted = measured.speculative_stats.to_dict()["rows"]
    for mine, other in zip(counted, free.speculative_stats.to_dict()["rows"], strict=True):
        assert {key: mine["events"][key] for key in other["events"]} == other["events"]
        assert mine["num_known_steps"] + mine["num_unknown_steps"] == mine["num_verified_tokens"] > 0
        assert other["mean_step_tv"] is other["max_step_tv"] is None
        assert (mine["num_unknown_steps"] > 0) == (do_sample and name in UNKNOWN)
    exact = decode(
        pair, ExactConfig(drafting="model", length=4, batching=batching, on_drafter_error="raise"), **options
    )
    for limits in ({"tv_budget": 0.0}, {"max_step_tv": 0}):
        out = decode(pair, config_of(ON[name], batching=batching, **limits), **options)
        assert torch.equal(out.sequences, exact.sequences)
        assert out.speculative_stats.total_step_tv == 0.0


def test_off_there_is_nothing_around_the_rule():
    for config in (config_of(TopK(3)), NucleusConfig()):
        assert config.run_rule() == config.rule
    assert ExactConfig(diagnostics=True, tv_budget=0.1).run_rule() == Exact()
    config = NucleusConfig(tv_budget=0.5)
    assert config.run_rule() == TVBudget(EarlyExactGuard(Nucleus(), 2), tv_budget=0.5)
    assert config.run_rule()._ledger is not config.run_rule()._ledger


@pytest.mark.parametrize(("batch_size", "batching"), [(1, "ragged"), (2, "ragged"), (2, "lockstep")])
@pytest.mark.parametrize("budget", [0.5, 1.0, 3.0])
def test_a_greedy_run_leaves_the_targets_text_as_often_as_it_may(budget, batch_size, batching):
    """Greedy, each foreign token costs 1. A drafter that is wrong everywhere and a rule that takes everything."""
    model = tiny_llama(layers=1)
    script = [[(7 * step + 11 * row) % 63 + 1 for step in range(16)] for row in range(batch_size)]
    config = config_of(Nucleus(1.0), tv_budget=budget, batching=batching)
    out = decode((model, lambda settings: ScriptedDrafter(settings, script)), config, batch_size=batch_size)
    logits = model(out.sequences, attention_mask=(out.sequences > 0).long()).logits if batch_size == 1 else None
    stats = out.speculative_stats
    for row in stats.rows:
        assert row.total_step_tv == int(budget) == row.events["rescued"] == row.events["changed"]
        assert row.max_step_tv == float(budget >= 1)
        assert row.events["rejected"] == row.num_verified_tokens - row.num_accepted_tokens > 0
        assert row.events["tv_limited"] > 0
    if logits is not None:
        changed = out.sequences[0, 7:] != logits[0, 6:-1].argmax(-1)
        assert int(changed.sum()) == int(budget)


class _BansTheBest(LogitsProcessor):
    """Takes away the favourite of the third generated token."""

    def __call__(self, input_ids, scores):
        return scores.scatter(-1, scores.argmax(-1, keepdim=True), -math.inf) if input_ids.shape[1] == 9 else scores


@pytest.mark.parametrize("batching", ["lockstep", "ragged"])
def test_a_step_costs_what_was_known_when_it_was_judged(batching):
    """In lockstep FLy looks ahead on raw logits, and a processor that sees the next prefix may then object."""
    model = tiny_llama(layers=1)
    text = prompts()["input_ids"][0].tolist()

    def favourite():
        return int(model(torch.tensor([text])).logits[0, -1].argmax())

    text.append(favourite())
    text.append((favourite() + 1) % 63 + 1)
    text.append(favourite())
    script = [*text[7:], 5]
    rule = FLy(window=2, entropy_threshold=0.0)
    out = decode(
        (model, lambda settings: ScriptedDrafter(settings, [script])), config_of(rule, tv_budget=1.0, batching=batching),
        batch_size=1, tokens=4, logits_processor=LogitsProcessorList([_BansTheBest()]),
    )  # fmt: skip
    foreign = int(out.sequences[0, 8] == script[1])
    assert foreign or batching == "ragged"
    assert out.speculative_stats.total_step_tv == foreign == out.speculative_stats.events["rescued"]


def test_easd_changes_are_counted_alike(pair):
    out = decode(pair, config_of(EASD(0.5, 0.5, 0.0), diagnostics=True), do_sample=True)
    events = out.speculative_stats.events
    assert events["changed"] == events["easd_changed_token"] > 0
    assert events["rescued"] == 0


def test_lockstep_and_ragged_rows_measure_the_same(pair):
    found = []
    for batching in ("ragged", "lockstep"):
        out = decode(pair, config_of(TopK(5), diagnostics=True, batching=batching), batch_size=1)
        row = out.speculative_stats.rows[0]
        found.append(
            (out.sequences.tolist(), row.total_step_tv, row.max_step_tv, row.num_known_steps, dict(row.events))
        )
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_the_summary_tells_the_distance(pair):
    text = decode(pair, config_of(TopK(5), diagnostics=True)).speculative_stats.summary()
    assert "total variation to the target's law: mean " in text


# --- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_step_tv": -0.1}, "max_step_tv must lie in"),
        ({"tv_budget": -1}, "tv_budget must lie in"),
        ({"tv_budget": "much"}, "tv_budget must be a number"),
        ({"max_step_tv": True}, "max_step_tv must be a number"),
        ({"tv_budget": math.nan}, "tv_budget must lie in"),
        ({"diagnostics": 1}, "diagnostics must be True or False"),
    ],
)
def test_limits_that_are_none_are_refused(options, message):
    for config in (NucleusConfig, ExactConfig):
        with pytest.raises(InvalidConfigError, match=message):
            config(**options)


def test_a_budget_is_an_option_and_no_rule_of_a_config(tmp_path):
    with pytest.raises(InvalidConfigError, match="serves one run"):
        SpeculativeConfig(acceptance=TVBudget(TopK()))
    with pytest.raises(InvalidConfigError, match="serves one run"):  # from which the config could not tell it
        EarlyExactGuard(TVBudget(TopK()))
    with pytest.raises(InvalidConfigError, match="has a budget already"):
        TVBudget(TVBudget(TopK()))
    config = NucleusConfig(max_step_tv=0.25, tv_budget=2.0, diagnostics=True)
    config.save_pretrained(tmp_path)
    assert NucleusConfig.from_pretrained(tmp_path) == config


def test_asd_claims_nothing_about_later_drafts():
    """What stands before a draft counts against its budget, what stands behind it does not."""
    evidence = every_draft(*tables(3), 3)
    rule = ASD(budget=2.0)
    first = dataclasses.replace(evidence, tokens=evidence.tokens[:, :1], valid=evidence.valid[:, :1])
    assert torch.equal(rule.acceptance(evidence)[:, :1], rule.acceptance(first)[:, :1])


def test_budgets_stay_with_their_rows_when_others_end():
    """Rows end at different places; each spends its own budget, as it does alone."""
    model = tiny_llama(layers=1)
    drafter = noisy_copy(model, noise=0.3)
    inputs = prompts(3)
    found = []
    for kept in ([0, 1, 2], [0], [1], [2]):
        stats = []
        text = model.generate(
            **{name: values[kept] for name, values in inputs.items()}, assistant_model=drafter, do_sample=False,
            max_new_tokens=24, eos_token_id=54, pad_token_id=0, stats_callback=stats.append,
            speculative_config=config_of(TopK(5), tv_budget=3.0, batching="ragged"),
        )  # fmt: skip
        rows = [(row.total_step_tv, row.num_new_tokens, dict(row.events)) for row in stats[0].rows]
        found.append((text[:, 7:].tolist(), rows))
    lengths = [length for _, length, _ in found[0][1]]
    assert len(set(lengths)) > 1
    for place in range(3):
        (alone,), (row,) = found[1 + place]
        assert found[0][0][place][: row[1]] == alone[: row[1]]
        assert found[0][1][place][0] == row[0] <= 3.0
