"""The goodput controller against simulated drafters whose acceptance and costs are known."""

import json
import random
import statistics
from dataclasses import replace

import pytest
import torch

from hf_specdec import CostTable, EASDConfig, GoodputLength, InvalidConfigError, SelfDraftConfig, SpeculativeConfig
from hf_specdec.lengths.forecast import GoodputForecast, expected_tokens
from hf_specdec.records import Plan, Round
from tests.toys import noisy_copy, prompts, tiny_llama


def verify_cost(length):
    return 1 + 0.06 * length


def round_of(num_emitted, counts, draft_seconds, verify_seconds, kind="model"):
    stretches = [[(kind, int(counts[0]))] if int(counts[0]) else []]
    times = {"draft_seconds": draft_seconds, "verify_seconds": verify_seconds}
    return Round([[0] * num_emitted], *counts, torch.tensor([True]), **times, source=kind, stretches=stretches)


def simulate(acceptance, draft_cost, *, rounds=400, seed=0, noise=0.05, controller=None, source="model"):
    """Plays rounds; returns tokens per plain step, and the lengths that were chosen."""
    rng = random.Random(seed)
    schedule, tokens, seconds, lengths = (controller or GoodputLength()).start(1), 0, 0.0, []
    for _ in range(rounds):
        length = int(schedule.next_budget().max_tokens[0])
        accepted = 0
        while accepted < length and rng.random() < acceptance:
            accepted += 1
        drafting = length * draft_cost * (1 + noise * rng.gauss(0, 1))
        verifying = verify_cost(length) * (1 + noise * rng.gauss(0, 1))
        counts = [torch.tensor([number]) for number in (length, min(length, accepted + 1), accepted)]
        schedule.observe(round_of(accepted + 1, counts, drafting, verifying, source))
        tokens, seconds = tokens + accepted + 1, seconds + length * draft_cost + verify_cost(length)
        lengths.append(length)
    return tokens / seconds, lengths


def optimum(acceptance, draft_cost):
    return max(
        expected_tokens([acceptance] * 10, length) / (length * draft_cost + verify_cost(length)) for length in range(11)
    )


@pytest.mark.parametrize("draft_cost", [0.05, 0.32])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_it_converges_to_the_optimum(acceptance, draft_cost):
    ratios = [simulate(acceptance, draft_cost, seed=seed)[0] / optimum(acceptance, draft_cost) for seed in range(6)]
    assert statistics.mean(ratios) >= 0.97


def test_a_useless_drafter_is_switched_off_and_probed_rarely():
    ratios, shares = [], []
    for seed in range(12):
        speed, lengths = simulate(0.0, 0.3, seed=seed)
        ratios.append(speed)
        shares.append(sum(length > 0 for length in lengths) / len(lengths))
    assert min(ratios) >= 0.97
    assert max(shares) <= 0.06
    assert all(share > 0.01 for share in shares)  # it never gives up for good


def test_a_drafter_that_becomes_useful_is_found_again():
    controller = GoodputLength()
    schedule, lengths = controller.start(1), []
    for number in range(400):
        length = int(schedule.next_budget().max_tokens[0])
        accepted = 0 if number < 100 else length
        counts = [torch.tensor([each]) for each in (length, min(length, accepted + 1), accepted)]
        schedule.observe(round_of(1, counts, 0.1 * length, verify_cost(length)))
        lengths.append(length)
    assert sum(lengths[60:100]) <= 4
    assert min(lengths[-50:]) >= 8


def test_ngram_drafts_are_not_charged_for_drafting():
    _, lengths = simulate(0.6, 0.0, source="ngram-3")
    _, charged = simulate(0.6, 0.6, source="model")
    assert statistics.mean(lengths[50:]) > statistics.mean(charged[50:])


def test_frozen_costs_make_the_lengths_a_function_of_the_text():
    costs = CostTable(0.2, ((1, 1.0), (5, 1.3)))
    controller = GoodputLength(costs=costs)
    calm = simulate(0.7, 0.2, controller=controller, noise=0.0, rounds=80)[1]
    assert calm == simulate(0.7, 0.2, controller=controller, noise=3.0, rounds=80)[1]


def test_rows_of_a_batch_share_the_length():
    schedule = GoodputLength(costs=CostTable(0.2, ((1, 1.0), (5, 1.3)))).start(3)
    assert schedule.next_budget().max_tokens.unique().numel() == 1


def test_expected_tokens_by_hand():
    assert expected_tokens([0.5, 0.5], 0) == 1.0
    assert expected_tokens([0.5, 0.25], 2) == 1 + 0.5 + 0.125


def test_cost_table():
    table = CostTable(0.1, ((1, 1.0), (3, 1.4), (4, 1.3)))
    assert [table.pass_seconds(width) for width in (1, 2, 3, 4)] == pytest.approx([1.0, 1.2, 1.4, 1.4])
    assert table.pass_seconds(8) == pytest.approx(1.4 + 4 * 0.4 / 3)  # the mean slope goes on
    assert CostTable(0.0, ((2, 1.0),)).pass_seconds(9) == 1.0
    assert CostTable(0.0, ((1, 1.0), (2, 1.5))).pass_seconds(4) == pytest.approx(2.5)
    for wrong in ((), ((2, 1.0), (1, 1.0)), ((0, 1.0),), ((1, 0.0),)):
        with pytest.raises(InvalidConfigError):
            CostTable(0.1, wrong)


def test_options_are_checked_and_saved(tmp_path):
    for wrong in ({"longest": 0}, {"prior": 1.0}, {"memory": 0.0}, {"first_pause": 0}):
        with pytest.raises(InvalidConfigError):
            GoodputLength(**wrong)
    config = SpeculativeConfig(length=GoodputLength(costs=CostTable(0.1, ((1, 1.0), (5, 1.2)))))
    config.save_pretrained(tmp_path)
    assert SpeculativeConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.1, 5.0])
def test_texts_are_the_targets(batch_size, noise):
    model = tiny_llama()
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**prompts(batch_size), **options)
    for drafting in ("model", "hybrid"):
        config = SpeculativeConfig(length=GoodputLength(), drafting=drafting, on_drafter_error="raise")
        text = model.generate(
            **prompts(batch_size), **options, assistant_model=noisy_copy(model, noise), speculative_config=config
        )
        assert torch.equal(text, plain)


def test_a_seed_reproduces_sampled_text_with_frozen_costs():
    model = tiny_llama()
    config = SpeculativeConfig(length=GoodputLength(costs=CostTable(0.1, ((1, 1.0), (6, 1.2)))), drafting="model")
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(
            model.generate(
                **prompts(2),
                max_new_tokens=30,
                do_sample=True,
                pad_token_id=0,
                assistant_model=noisy_copy(model),
                speculative_config=config,
            )
        )
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SpeculativeConfig, {"do_sample": True}),
        (EASDConfig, {"do_sample": False}),
        (SelfDraftConfig, {"do_sample": True}),
    ],
)
def test_what_is_timed_decides_no_text_that_a_seed_or_threshold_reproduces(config, options):
    model = tiny_llama()
    options = {**prompts(1), **options, "max_new_tokens": 6}
    if config is not SelfDraftConfig:
        options["assistant_model"] = noisy_copy(model)
    with pytest.raises(InvalidConfigError, match=r"GoodputLength\(costs=...\)"):
        model.generate(**options, speculative_config=config(length=GoodputLength()))
    costs = CostTable(0.1, ((1, 1.0), (6, 1.2)))
    assert model.generate(**options, speculative_config=config(length=GoodputLength(costs=costs))).shape[0] == 1
    assert config(length="auto").controller(deterministic=False).length >= 5


def test_a_match_that_extends_a_draft_says_nothing_against_the_draft():
    """What was judged after the model's last token is the match's, also where it was rejected."""
    schedule = GoodputLength(costs=CostTable(0.2, ((1, 1.0), (9, 1.2)))).start(1)
    before = schedule.forecast().rates["model"]
    for _ in range(6):
        counts = [torch.tensor([number]) for number in (3, 2, 1)]
        stretches = [[("model", 1), ("ngram-2", 2)]]
        schedule.observe(Round([[0] * 2], *counts, torch.tensor([True]), source="hybrid", stretches=stretches))
    rates = schedule.forecast().rates["model"]
    assert rates[0] > before[0]
    assert rates[1] > before[1]  # never tried, so it leans on the first


def test_a_first_plain_step_that_was_slow_is_measured_again():
    """One reading must not make plain decoding look slow for a whole run."""
    schedule = GoodputLength().start(1)
    plain = 0
    for number in range(60):
        length = int(schedule.next_budget().max_tokens[0])
        plain += length == 0
        counts = [torch.tensor([value]) for value in (length, min(length, 1), 0 if number % 2 else min(length, 1))]
        seconds = 1.4 if number == 0 else 1.0 + 0.02 * length
        schedule.observe(round_of(1 + int(counts[2]), counts, 0.25 * length, seconds))
    assert plain >= 2
    assert schedule.costs().pass_seconds(1) == 1.0


def test_one_pass_that_took_ages_does_not_end_drafting_for_good():
    schedule, lengths = GoodputLength().start(1), []
    for number in range(80):
        length = int(schedule.next_budget().max_tokens[0])
        counts = [torch.tensor([length])] * 3
        verifying = 40.0 if number == 1 else 1.0 + 0.02 * length
        schedule.observe(round_of(1 + length, counts, 0.2 * length, verifying))
        lengths.append(length)
    assert lengths[1] > 0
    assert statistics.mean(lengths[20:]) > 4


def test_slow_draft_steps_do_not_end_drafting_for_good():
    schedule, lengths = GoodputLength().start(1), []
    for number in range(80):
        length = int(schedule.next_budget().max_tokens[0])
        counts = [torch.tensor([length])] * 3
        drafting = (40.0 if number < 4 else 0.2) * length
        schedule.observe(round_of(1 + length, counts, drafting, 1.0 + 0.02 * length))
        lengths.append(length)
    assert lengths[4:16].count(0) > 8  # it looks as if nothing paid
    assert statistics.mean(lengths[50:]) > 4


def test_a_clear_gain_is_interrupted_once():
    """The second plain step tells a slow first one from a gain; more would be wasted."""
    _, lengths = simulate(0.95, 0.02)
    assert lengths.count(0) <= 2
    assert min(lengths[8:]) > 0


def test_a_slow_first_plain_step_does_not_pass_for_a_clear_gain():
    """Nothing of this batch pays: drafts cost more than they bring, though not as much as the first step pretends."""
    schedule, lengths = GoodputLength().start(8), []
    for number in range(40):
        length = int(schedule.next_budget().max_tokens[0])
        counts = [torch.full((8,), each) for each in (length, min(length, 2), min(length, 1))]
        emitted, going_on = [[0] * (1 + min(length, 1))] * 8, torch.ones(8, dtype=torch.bool)
        verifying = 3.0 if number == 0 else 1.0 + 0.8 * length
        stretches = [[("model", length)] if length else []] * 8
        schedule.observe(Round(emitted, *counts, going_on, 0.4 * length, verifying, stretches=stretches))
        lengths.append(length)
    assert 0 in lengths[1:6]
    assert lengths[8:].count(0) >= 24


def test_a_batch_is_not_drafted_wide_before_passes_of_several_tokens_were_measured():
    widest = {}
    for batch_size in (1, 32):
        schedule = GoodputLength().start(batch_size)
        counts = [torch.zeros(batch_size, dtype=torch.long)] * 3
        schedule.observe(
            Round([[0]] * batch_size, *counts, torch.ones(batch_size, dtype=torch.bool), verify_seconds=1.0)
        )
        offers = [("ngram-3", 16)] + [None] * (batch_size - 1)
        widest[batch_size] = max(schedule.forecast().plan(offers, with_model=True).from_match)
    assert widest[32] < widest[1]


def test_one_row_does_not_widen_the_pass_of_many():
    """A match that pays for a single text costs a batch a wider pass for every row."""
    rates = {"model": (0.8,) * 16, "ngram-2": (0.7,) * 16}
    forecast = GoodputForecast(CostTable(0.1, ((1, 1.0), (17, 2.6))), rates, "model", 16)
    assert forecast.extensions([("ngram-2", 6, 2)], 2)[0] > 0
    assert forecast.extensions([("ngram-2", 6, 2)] + [None] * 7, 2) == [0] * 8
    assert min(forecast.extensions([("ngram-2", 6, 2)] * 8, 2)) > 0
    assert forecast.extensions([("ngram-2", 6, 2), ("ngram-2", 6, 3)] + [None] * 6, 3)[:2] == [1, 0]  # room is free


def hybrid_seconds_per_token(acceptance, slope, *, rounds=300, seed=0):
    """Plays a batch of eight with matches as bad as the model, in plain steps; the clock errs by up to 30 %."""
    rng, batch, tokens, seconds = random.Random(seed), 8, 0.0, 0.0
    schedule = GoodputLength().start(batch)
    for _ in range(rounds):
        offers = [(f"ngram-{rng.randint(1, 4)}", 16) if rng.random() < 0.9 else None for _ in range(batch)]
        forecast = schedule.next_budget().forecast
        plan = Plan([0] * batch, [0] * batch) if forecast is None else forecast.plan(offers, with_model=True)
        lengths = [found or modelled for found, modelled in zip(plan.from_match, plan.from_model, strict=True)]
        accepted = [0] * batch
        for row, length in enumerate(lengths):
            while accepted[row] < length and rng.random() < acceptance:
                accepted[row] += 1
        kinds = [offer[0] if found else "model" for offer, found in zip(offers, plan.from_match, strict=True)]
        times = [0.4 * max(plan.from_model), 1 + slope * batch * max(lengths)]
        measured = [each * rng.uniform(0.7, 1.3) for each in times]
        drafted, kept = torch.tensor(lengths), torch.tensor(accepted)
        counts = [drafted, torch.minimum(drafted, kept + 1), kept]
        stretches = [[(kind, length)] if length else [] for kind, length in zip(kinds, lengths, strict=True)]
        emitted, going_on = [[0] * (number + 1) for number in accepted], torch.ones(batch, dtype=torch.bool)
        schedule.observe(Round(emitted, *counts, going_on, *measured[:1], measured[1], stretches=stretches))
        tokens, seconds = tokens + 1 + sum(accepted) / batch, seconds + sum(times)
    return seconds / tokens


@pytest.mark.parametrize("slope", [0.02, 0.1])
def test_useless_matches_and_a_useless_model_cost_a_batch_little(slope):
    assert statistics.mean(hybrid_seconds_per_token(0.1, slope, seed=seed) for seed in range(8)) <= 1.05


def test_free_drafts_on_trial_are_as_long_as_their_pass_is_cheap():
    widest = {}
    for cost in (0.01, 0.2, 1.0):
        schedule = GoodputLength(costs=CostTable(0.2, ((1, 1.0), (17, 1.0 + 16 * cost)))).start(1)
        schedule._record("ngram-3").resume_at = 0
        widest[cost] = schedule.forecast().rates["ngram-3"].count(1.0)
    assert widest == {0.01: 16, 0.2: 2, 1.0: 1}


def test_the_costs_of_a_run_are_in_its_statistics():
    """Frozen ones as they were given, measured ones ready to be frozen."""
    model, costs = tiny_llama(), CostTable(0.1, ((1, 1.0), (6, 1.2)))
    draft = noisy_copy(model)

    def stats_of(length, **options):
        config = SpeculativeConfig(length=length, drafting="model", on_drafter_error="raise")
        options = {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True, **options}
        return model.generate(
            **prompts(2), **options, assistant_model=draft, speculative_config=config
        ).speculative_stats

    frozen = stats_of(GoodputLength(costs=costs), do_sample=True)
    assert frozen.costs == costs
    assert CostTable(**json.loads(json.dumps(frozen.to_dict()))["costs"]) == costs
    measured = stats_of("auto").costs
    assert measured.pass_seconds(1) > 0
    assert stats_of(GoodputLength(costs=measured), do_sample=True).costs == measured
    assert stats_of(3).costs is None
    assert stats_of(3).to_dict()["costs"] is None
    assert stats_of("auto", max_new_tokens=1).costs is None  # nothing was measured


def test_what_others_drafted_is_read_once_and_charged_to_no_step():
    schedule = GoodputLength().start(1)
    steady = [(2, 0.2), (2, 0.2), (30, 5.0), (30, 5.0), (30, 5.0)]
    for num_read, drafting in steady:
        counts = [torch.tensor([1])] * 3
        schedule.observe(replace(round_of(2, counts, drafting, 1.0), num_read=num_read))
    assert schedule.costs().draft_step == pytest.approx(0.2)
    first = GoodputLength().start(1)
    first.observe(replace(round_of(2, [torch.tensor([1])] * 3, 5.0, 1.0), num_read=30))
    assert first.costs().draft_step == pytest.approx(5.0)  # better than nothing


def test_only_kinds_that_are_offered_are_priced():
    schedule = GoodputLength(costs=CostTable(0.1, ((1, 1.0), (17, 2.6)))).start(2)
    forecast = schedule.forecast()
    forecast.plan([("ngram-2", 4), None], with_model=True)
    assert set(forecast.rates) == {"model", "ngram-2"}
    assert forecast.expected("ngram-2")[4] == pytest.approx(expected_tokens(forecast.rates["ngram-2"], 4))
