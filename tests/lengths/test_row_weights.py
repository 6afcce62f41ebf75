"""Rows that are behind decide how long a batch takes, so their tokens weigh more."""

import pytest
import torch

from hf_specdec import CostTable, GoodputLength
from hf_specdec.lengths.forecast import GoodputForecast
from hf_specdec.lengths.row_weights import row_weights
from hf_specdec.records import Budget, Round


EVERYBODY = torch.ones(4, dtype=torch.bool)
RATES = {"model": (0.3,) * 16, "ngram-4": (0.8,) * 16}


def test_rows_that_are_equally_far_weigh_the_same():
    assert row_weights(torch.full((4,), 20), EVERYBODY).tolist() == pytest.approx([1.0] * 4)


def test_weights_by_hand():
    weights = row_weights(torch.tensor([0, 16, 16, 99]), torch.tensor([True, True, True, False]))
    last = torch.tensor([1.0, 1 / torch.e, 1 / torch.e])
    expected = 0.3 + 0.7 * 3 * last / last.sum()
    assert weights.tolist() == pytest.approx([*expected.tolist(), 0.0])
    assert float(weights.sum()) == pytest.approx(3.0)


def test_a_match_widens_the_pass_for_the_row_that_is_behind_only():
    forecast = GoodputForecast(CostTable(0.4, ((1, 1.0), (17, 5.0))), RATES, "model", 16)
    offers = [("ngram-4", 8), None, None, None]
    behind = row_weights(torch.tensor([0, 40, 40, 40]), EVERYBODY).tolist()
    ahead = row_weights(torch.tensor([40, 0, 0, 0]), EVERYBODY).tolist()
    assert forecast.plan(offers, with_model=False, weights=behind).from_match[0] > 0
    assert forecast.plan(offers, with_model=False, weights=ahead).from_match == [0] * 4
    longer = [("ngram-4", 8, 1), None, None, None]
    sure = GoodputForecast(forecast.costs, RATES | {"model": (0.9,) * 16}, "model", 16)
    assert sure.extensions(longer, 1, behind)[0] > sure.extensions(longer, 1, ahead)[0] == 0


def test_a_budget_is_cut_with_its_weights():
    budget = Budget(torch.tensor([3, 3, 3]), weights=torch.tensor([0.5, 1.0, 1.5]))
    assert budget.of_rows(torch.tensor([0, 2])).weights_of([0, 1]) == [0.5, 1.5]
    assert budget.capped(torch.tensor([1, 1, 1])).weights_of([1]) == [1.0]
    assert Budget(torch.tensor([3])).weights_of([0]) is None


def rounds(schedule, batch, *, accepted, number=1, num_rows=None):
    for _ in range(number):
        drafted = torch.ones(batch, dtype=torch.long)
        kept = torch.tensor(accepted)
        emitted = [[0] * (1 + each) for each in accepted]
        schedule.observe(
            Round(
                emitted, drafted, drafted, kept, torch.ones(batch, dtype=torch.bool), 0.4, 1.2,
                stretches=[[("model", 1)]] * batch, num_rows=num_rows,
            )
        )  # fmt: skip


def test_one_bad_round_of_a_batch_does_not_stop_the_drafting():
    """The rows of a round are alike: eight rejections are not eight independent ones."""
    schedule = GoodputLength(costs=CostTable(0.3, ((1, 1.0), (17, 3.0)))).start(8)
    rounds(schedule, 8, accepted=[1, 1, 1, 0, 0, 0, 0, 0])
    assert int(schedule.next_budget().max_tokens[0]) > 0
    rounds(schedule, 8, accepted=[0] * 8, number=6)
    assert int(schedule.next_budget().max_tokens[0]) == 0


def test_the_row_that_is_behind_counts_for_more():
    rates = {}
    for lagging in (0, 1):
        schedule = GoodputLength(costs=CostTable(0.3, ((1, 1.0), (17, 3.0)))).start(2)
        schedule._num_tokens = torch.tensor([40, 0] if lagging else [0, 40])
        rounds(schedule, 2, accepted=[1, 0], number=4)
        rates[lagging] = schedule._record("model").rates()[0]
    assert rates[1] < rates[0]


def test_what_did_not_pay_for_many_rows_is_tried_again_with_few():
    schedule = GoodputLength(costs=CostTable(0.3, ((1, 1.0), (17, 3.0)))).start(8)
    rounds(schedule, 8, accepted=[0] * 8, number=8)
    assert int(schedule.next_budget().max_tokens[0]) == 0
    quiet = torch.zeros(8, dtype=torch.long)
    nothing = Round([[0]] * 8, quiet, quiet, quiet, torch.ones(8, dtype=torch.bool), 0.0, 1.0, num_rows=4)
    schedule.observe(nothing)
    assert int(schedule.next_budget().max_tokens[0]) == 1


def test_a_single_text_has_no_weights():
    schedule = GoodputLength(costs=CostTable(0.3, ((1, 1.0), (17, 3.0)))).start(1)
    assert schedule.next_budget().weights is None
