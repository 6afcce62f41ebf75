"""What passes and draft steps of a run took, and what that says of passes that were not run yet."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise
from typing import final

from hf_specdec.lengths.costs import CostTable


__all__ = ["MeasuredCosts"]

_WINDOW = 9  # measurements whose median counts
_TOKEN = (
    0.02  # of a plain step: what each further token of a pass is taken to cost while only plain steps were measured
)
_SOUND = 3  # measurements of which one that went wrong is not the median
_FEW = 20  # tokens up to which a slope is trusted, however few were fed to the widest pass measured
_STEP = 0.25  # of a plain step: what a draft step is taken to cost before one was measured


@final
class MeasuredCosts:
    """Medians of the latest measurements (ours).

    A pass is known by the tokens it was fed, rows times width, so that what many rows showed still counts once finished rows
    have left. A draft step is known by its rows.

    Args:
        longest (`int`): Longest draft that tables are made for.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._passes: dict[int, deque[float]] = {}
        self._steps: dict[int, deque[float]] = {}

    def add_pass(self, rows: int, width: int, seconds: float) -> None:
        """A target pass of `rows` rows with `width` tokens each."""
        self._passes.setdefault(rows * width, deque(maxlen=_WINDOW)).append(seconds)

    def add_steps(self, rows: int, steps: int, seconds: float) -> None:
        """`steps` draft steps of `rows` rows, which took `seconds` together."""
        self._steps.setdefault(rows, deque(maxlen=_WINDOW)).append(seconds / steps)

    @property
    def knows_steps(self) -> bool:
        """Whether draft steps have been measured."""
        return bool(self._steps)

    def num_plain(self, rows: int) -> int:
        """Measurements of plain steps of so many rows, up to those whose median counts."""
        return len(self._passes.get(rows, ()))

    @property
    def enough(self) -> int:
        """Measurements after which more change nothing but replace the oldest."""
        return _WINDOW

    def table(self, rows: int) -> CostTable:
        """Costs of a batch of `rows` rows, by width."""
        known, trusted = self._known(), max(_FEW, 2 * max(self._passes))
        passes = tuple((width, _priced(known, rows * width, trusted)) for width in range(1, self.longest + 2))
        return CostTable(self._step(rows, passes[0][1]), passes)

    def _known(self) -> list[tuple[int, float]]:
        """Medians by tokens fed. A slow reading is more likely than a fast one, so no pass is taken to cost more than one that
        was fed more, and what was measured once or twice counts only if as many narrow passes would not have been faster."""
        result: list[tuple[int, float]] = []
        narrowest = min(self._passes)
        lowest = statistics.median_low(self._passes[narrowest])
        for tokens in sorted(self._passes, reverse=True):
            seconds = statistics.median_low(self._passes[tokens])
            if len(self._passes[tokens]) < _SOUND and seconds * narrowest > lowest * tokens:
                continue
            result.append((tokens, min(seconds, result[-1][1]) if result else seconds))
        result.reverse()
        if len(result) == 1:
            tokens, seconds = result[0]
            more = tokens * self.longest
            result.append((tokens + more, seconds * (1.0 + _TOKEN * more)))
        return result

    def _step(self, rows: int, plain: float) -> float:
        if not self._steps:
            return _STEP * plain
        nearest = min(self._steps, key=lambda known: (abs(known - rows), known))
        return statistics.median_low(self._steps[nearest])


def _priced(known: list[tuple[int, float]], tokens: int, trusted: int) -> float:
    """Seconds of a pass fed so many tokens. Beyond what is trusted the price grows with them, so that a batch finds out in
    steps what wide passes cost: one slow plain step would make them look free."""
    seconds = _between(known, tokens)
    return seconds if tokens <= trusted else max(seconds, _between(known, trusted) * tokens / trusted)


def _between(known: list[tuple[int, float]], tokens: int) -> float:
    """Seconds of a pass fed so many tokens: a straight line between two that are known, and the mean slope of all beyond them,
    but to the left never less than the share of its tokens."""
    (first, lowest), (last, highest) = known[0], known[-1]
    slope = (highest - lowest) / (last - first)
    if tokens < first:
        return max(lowest - slope * (first - tokens), lowest * tokens / first)
    for (left, low), (right, high) in pairwise(known):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return highest + slope * (tokens - last)
