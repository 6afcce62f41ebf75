"""Costs that a run has measured: by tokens fed, so that they still count once rows have left."""

import pytest

from hf_specdec.lengths.measured import MeasuredCosts


def test_medians_and_straight_lines_between_them():
    costs = MeasuredCosts(longest=4)
    for seconds in (1.0, 9.0, 1.2):
        costs.add_pass(1, 1, seconds)
    costs.add_pass(1, 3, 1.6)
    costs.add_steps(1, 2, 0.5)
    table = costs.table(1)
    assert table.draft_step == 0.25
    assert [table.pass_seconds(width) for width in (1, 2, 3, 5)] == pytest.approx([1.2, 1.4, 1.6, 2.0])


def test_a_slow_reading_does_not_make_a_narrow_pass_dear():
    costs = MeasuredCosts(longest=4)
    costs.add_pass(8, 1, 2.0)
    costs.add_pass(8, 2, 1.0)
    costs.add_pass(8, 4, 1.4)
    assert [costs.table(8).pass_seconds(width) for width in (1, 2, 3, 4)] == pytest.approx([1.0, 1.0, 1.2, 1.4])


def test_what_many_rows_showed_holds_for_few():
    costs = MeasuredCosts(longest=4)
    costs.add_pass(8, 1, 0.9)
    costs.add_pass(8, 2, 1.1)
    assert costs.table(4).pass_seconds(2) == pytest.approx(0.9)  # as many tokens as eight plain steps
    assert costs.table(4).pass_seconds(4) == pytest.approx(1.1)
    assert costs.table(4).pass_seconds(1) == pytest.approx(0.8)  # the line goes on to the left
    assert costs.num_plain(8) == 1
    assert costs.num_plain(4) == 0


def test_fewer_tokens_cost_at_least_their_share():
    costs = MeasuredCosts(longest=4)
    costs.add_pass(8, 1, 0.8)
    for _ in range(3):
        costs.add_pass(8, 2, 4.0)
    assert costs.table(1).pass_seconds(1) == pytest.approx(0.1)


def test_before_a_draft_step_was_measured_it_is_taken_for_a_quarter_of_a_plain_step():
    costs = MeasuredCosts(longest=4)
    costs.add_pass(2, 1, 1.0)
    assert costs.table(2).draft_step == pytest.approx(0.25)
    costs.add_steps(2, 1, 0.4)
    costs.add_steps(1, 1, 0.3)
    assert costs.table(2).draft_step == 0.4
    assert costs.table(1).draft_step == 0.3
    assert costs.table(5).draft_step == 0.4


def test_what_was_measured_once_counts_only_if_narrow_passes_would_not_have_been_faster():
    costs = MeasuredCosts(longest=4)
    costs.add_pass(1, 1, 1.0)
    costs.add_pass(1, 3, 3.5)
    assert costs.table(1).pass_seconds(3) == pytest.approx(1.04)  # as if it had not been measured
    for _ in range(2):
        costs.add_pass(1, 3, 3.5)
    assert costs.table(1).pass_seconds(3) == pytest.approx(3.5)


def test_a_batch_finds_out_in_steps_what_wide_passes_cost():
    """One slow plain step would make them look free: the slope is then none at all."""
    costs = MeasuredCosts(longest=16)
    costs.add_pass(rows=8, width=1, seconds=0.9)
    costs.add_pass(rows=8, width=3, seconds=0.8)
    table = costs.table(rows=8)
    assert [table.pass_seconds(width) for width in (1, 3, 6)] == [0.8] * 3
    assert table.pass_seconds(7) == pytest.approx(0.8 * 7 / 6)
    assert table.pass_seconds(17) == pytest.approx(0.8 * 17 / 6)
    costs.add_pass(rows=8, width=6, seconds=1.2)
    assert costs.table(rows=8).pass_seconds(12) == pytest.approx(1.2 + 0.4 * 48 / 40)


def test_the_slope_is_trusted_where_few_tokens_are_fed():
    costs = MeasuredCosts(longest=16)
    for width, seconds in ((1, 0.30), (2, 0.31)):
        for _ in range(3):
            costs.add_pass(rows=1, width=width, seconds=seconds)
    assert costs.table(rows=1).pass_seconds(17) == pytest.approx(0.46)
