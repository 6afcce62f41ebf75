"""The bootstrap on cases that can be worked out by hand, and against scipy's."""

import numpy as np
import pytest
from scipy import stats

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality import Estimate, bootstrap_mean, bootstrap_seeds, paired_difference, seeds_difference


def test_equal_values_leave_no_uncertainty():
    assert bootstrap_mean([0.5, 0.5, 0.5]) == Estimate(0.5, 0.5, 0.5)
    assert bootstrap_mean([1]) == Estimate(1.0, 1.0, 1.0)


def test_two_questions_worked_out_by_hand():
    """Means of two draws of {0, 1} are 0, 0.5 and 1 with probabilities 1/4, 1/2, 1/4."""
    assert bootstrap_mean([0, 1]) == Estimate(0.5, 0.0, 1.0)
    assert bootstrap_mean([0, 1], level=0.4) == Estimate(0.5, 0.5, 0.5)  # 30 % to 70 %: inside the middle half


def test_the_interval_is_the_binomials():
    """For right and wrong answers the resampled count of right ones is binomial with n and the sample's own share."""
    values = [1] * 120 + [0] * 180
    found = bootstrap_mean(values)
    low, high = stats.binom.ppf([0.025, 0.975], 300, 0.4) / 300
    assert found.mean == 0.4
    assert found.low == pytest.approx(low, abs=1.5 / 300)
    assert found.high == pytest.approx(high, abs=1.5 / 300)


def test_it_agrees_with_scipy():
    values = np.random.default_rng(5).normal(size=80)
    found = bootstrap_mean(values)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=1).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_pairs_are_compared_question_by_question():
    """Both arms vary much between questions, and their difference does not vary at all."""
    first = [1.0, 0.0] * 50
    assert paired_difference(np.array(first) + 0.25, first) == Estimate(0.25, 0.25, 0.25)
    mixed = paired_difference([1, 1, 0, 0], [1, 0, 1, 0])
    assert mixed.mean == 0.0
    assert mixed.low < 0 < mixed.high


def test_one_changed_question_of_two():
    """The differences are {0, 1}, the same case as above; unpaired resampling would reach -1."""
    assert paired_difference([1, 1], [1, 0]) == Estimate(0.5, 0.0, 1.0)


def test_the_resampling_is_seeded():
    values = [0.1, 0.5, 0.9, 0.2]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3, resamples=50) != bootstrap_mean(values, seed=4, resamples=50)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InvalidConfigError, match="same questions"):
        paired_difference([1, 0], [1])
    for values in ([], [[1, 0]]):
        with pytest.raises(InvalidConfigError, match="one number for each"):
            bootstrap_mean(values)


def test_two_seeds_worked_out_by_hand():
    """Seeds that differ by 1 on every question: the mean of two draws is 0, 0.5 or 1, however many questions there are."""
    assert bootstrap_seeds([[0.0] * 50, [1.0] * 50]) == Estimate(0.5, 0.0, 1.0)
    assert bootstrap_mean(np.mean([[0.0] * 50, [1.0] * 50], axis=0)) == Estimate(0.5, 0.5, 0.5)  # would not see it


def test_three_seeds_are_binomial():
    """Of three draws of {0, 0, 3} one third are 3: their number has the quantiles 0 and 3 of that binomial."""
    found = bootstrap_seeds([[0.0] * 7, [0.0] * 7, [3.0] * 7])
    low, high = stats.binom.ppf([0.025, 0.975], 3, 1 / 3)
    assert (found.mean, found.low, found.high) == pytest.approx((1, low, high))


def test_questions_are_drawn_for_all_seeds_together():
    """Questions that differ the same way for each seed stay as uncertain as for one seed."""
    values = np.random.default_rng(2).normal(size=60)
    one, many = bootstrap_mean(values), bootstrap_seeds([values] * 5)
    assert (many.low, many.high) == pytest.approx((one.low, one.high), abs=0.02)
    assert many.mean == pytest.approx(one.mean)


def test_variances_of_seeds_and_questions_add_up():
    """`x_ij = a_i + b_j` with many of both: the resampled mean is normal with variance `var(a) / n + var(b) / m`."""
    generator = np.random.default_rng(3)
    seeds, questions = generator.normal(size=80), 2 * generator.normal(size=120)
    deviation = (seeds.var() / 80 + questions.var() / 120) ** 0.5
    found = bootstrap_seeds(seeds[:, None] + questions)
    assert found.high - found.low == pytest.approx(2 * 1.96 * deviation, rel=0.03)


def test_differences_pair_questions_always_and_seeds_where_there_are_as_many():
    first = np.random.default_rng(4).normal(size=(3, 40))
    found = seeds_difference(first + 0.25, first)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    alike = np.tile(first[:1], (3, 1))
    one = seeds_difference(alike + 0.25, first[:1])
    assert (one.low, one.high) == pytest.approx((0.25, 0.25))
    apart = seeds_difference(first, np.concatenate([first, first]))  # other seeds
    assert apart.low < -0.05 < 0.05 < apart.high
    assert apart.mean == pytest.approx(0)


def test_what_has_no_seeds_is_refused():
    for values in ([], [1.0, 2.0], [[]]):
        with pytest.raises(InvalidConfigError, match="some seeds and questions"):
            bootstrap_seeds(values)
    with pytest.raises(InvalidConfigError, match="same questions"):
        seeds_difference([[1.0, 2.0]], [[1.0]])
