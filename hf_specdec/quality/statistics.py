"""Accuracies with their uncertainty: the percentile bootstrap over questions (Efron 1979)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_specdec.errors import InvalidConfigError


__all__ = ["LEVEL", "RESAMPLES", "Estimate", "bootstrap_mean", "paired_difference"]

RESAMPLES, LEVEL = 10_000, 0.95

_DRAWS_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval.

    Args:
        mean (`float`): The mean of the sample.
        low, high (`float`): Percentiles of the resampled means.
    """

    mean: float
    low: float
    high: float


def bootstrap_mean(values: ArrayLike, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0) -> Estimate:
    """The mean of one number per question, with the percentile interval of `resamples` means of as many redrawn questions.

    Args:
        values (array of shape `(questions,)`): One number per question, such as its share of correct seeds.
        resamples (`int`): Number of resamples.
        level (`float`): Coverage, such as 0.95.
        seed (`int`): Seed of the resampling.

    Raises:
        [`InvalidConfigError`]: If there is no question, or more than one number for each.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise InvalidConfigError(
            f"a bootstrap needs one number for each of some questions, got the shape {sample.shape}"
        )
    means = np.concatenate(list(_means(sample, resamples, np.random.default_rng(seed))))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(sample.mean()), float(low), float(high))


def paired_difference(first: ArrayLike, second: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of `first - second` question by question: both arms are redrawn with the same questions.

    Raises:
        [`InvalidConfigError`]: If the two hold different numbers of questions.
    """
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if left.shape != right.shape:
        raise InvalidConfigError(f"a paired comparison needs the same questions, got {left.shape} and {right.shape}")
    return bootstrap_mean(left - right, resamples=resamples, seed=seed)


def _means(
    sample: NDArray[np.float64], resamples: int, generator: np.random.Generator
) -> Iterator[NDArray[np.float64]]:
    """The resampled means, some at a time: all draws together need not fit into memory."""
    step = max(1, _DRAWS_AT_ONCE // sample.size)
    for start in range(0, resamples, step):
        drawn = generator.integers(sample.size, size=(min(step, resamples - start), sample.size))
        yield sample[drawn].mean(-1)
