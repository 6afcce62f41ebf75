"""The bootstrap on cases that can be worked out by hand, and against scipy's."""

import numpy as np
import pytest
from scipy import stats

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality import Estimate, bootstrap_mean, paired_difference


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
