"""Accuracies with their uncertainty: the percentile bootstrap over questions (Efron 1979)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_specdec.errors import InvalidConfigError


__all__ = [
    "LEVEL",
    "RESAMPLES",
    "Estimate",
    "bootstrap_mean",
    "bootstrap_seeds",
    "paired_difference",
    "seeds_difference",
]

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


def bootstrap_seeds(values: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean over seeds and questions, with the percentile interval of means over as many redrawn seeds and, of these,
    as many redrawn questions.

    All seeds answer the same questions, so all drawn seeds share a draw of questions (Owen 2007, "The pigeonhole bootstrap");
    a draw of its own for each would average the differences between questions away. A single seed says nothing of what
    another would give, and of few seeds `n` the bootstrap finds the share `(n - 1) / n` of the variance between them.

    Args:
        values (array of shape `(seeds, questions)`): One number per seed and question.
        resamples (`int`): Number of resamples.
        seed (`int`): Seed of the resampling.

    Raises:
        [`InvalidConfigError`]: If there is no seed or no question.
    """
    return seeds_difference(values, np.zeros((1, _table(values).shape[1])), resamples=resamples, seed=seed)


def seeds_difference(first: ArrayLike, second: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of `first - second` with an interval over seeds and questions, see [`bootstrap_seeds`].

    Both arms are redrawn with the same questions, and with the same seeds where they have as many: what a seed decides for
    both, such as an order, is no difference between them. Otherwise their seeds are drawn apart.

    Args:
        first, second (arrays of shapes `(seeds, questions)`): One number per seed and question.
        resamples (`int`): Number of resamples.
        seed (`int`): Seed of the resampling.

    Raises:
        [`InvalidConfigError`]: If there is no seed or no question, or the two hold different numbers of questions.
    """
    left, right = _table(first), _table(second)
    if left.shape[1] != right.shape[1]:
        raise InvalidConfigError(f"a paired comparison needs the same questions, got {left.shape} and {right.shape}")
    generator = np.random.default_rng(seed)
    drawn_left = _shares(left.shape[0], resamples, generator)
    drawn_right = drawn_left if len(left) == len(right) else _shares(right.shape[0], resamples, generator)
    means = []
    step = max(1, _DRAWS_AT_ONCE // left.shape[1])
    for start in range(0, resamples, step):
        part = slice(start, start + step)
        differences = drawn_left[part] @ left - drawn_right[part] @ right
        means.append((differences * _shares(left.shape[1], len(differences), generator)).sum(-1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(left.mean() - right.mean()), float(low), float(high))


def _table(values: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 2 or sample.size == 0:
        raise InvalidConfigError(
            f"a bootstrap over seeds needs a number for each of some seeds and questions, got the shape {sample.shape}"
        )
    return sample


def _shares(count: int, resamples: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """`(resamples, count)`: how much of each redrawn sample each of `count` things is."""
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples) / count


def _means(
    sample: NDArray[np.float64], resamples: int, generator: np.random.Generator
) -> Iterator[NDArray[np.float64]]:
    """The resampled means, some at a time: all draws together need not fit into memory."""
    step = max(1, _DRAWS_AT_ONCE // sample.size)
    for start in range(0, resamples, step):
        drawn = generator.integers(sample.size, size=(min(step, resamples - start), sample.size))
        yield sample[drawn].mean(-1)
