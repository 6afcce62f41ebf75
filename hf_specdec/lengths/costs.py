"""What drafting and verifying cost, as a table that can be frozen and saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, final

from hf_specdec.errors import InvalidConfigError


__all__ = ["CostTable"]


@final
@dataclass(frozen=True)
class CostTable:
    """Seconds of a draft step and of target passes.

    Args:
        draft_step (`float`): Seconds of one draft step.
        target (`tuple[tuple[int, float], ...]`): `(tokens fed, seconds)` of target passes, by growing number of tokens.
    """

    draft_step: float
    target: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", tuple((int(width), float(seconds)) for width, seconds in self.target))
        widths = [width for width, _ in self.target]
        if not self.target or widths != sorted(set(widths)) or widths[0] < 1:
            raise InvalidConfigError(
                f"target must list (tokens, seconds) by growing number of tokens, got {self.target}"
            )
        if self.draft_step < 0 or any(seconds <= 0 for _, seconds in self.target):
            raise InvalidConfigError("seconds must be positive")

    @cached_property
    def _growing(self) -> list[tuple[int, float]]:
        """The table with measurement noise removed that would make a wider pass cheaper than a narrower one."""
        result: list[tuple[int, float]] = []
        for width, seconds in self.target:
            result.append((width, max(seconds, result[-1][1]) if result else seconds))
        return result

    def to_dict(self) -> dict[str, Any]:
        """The table as plain Python values: `CostTable(**table.to_dict())` is the table."""
        return {"draft_step": self.draft_step, "target": [list(each) for each in self.target]}

    @cached_property
    def _priced(self) -> dict[int, float]:
        return {}

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens: between two known widths a straight line, flat to the left of them,
        and to the right of them the mean slope of all. A wider pass is never taken for cheaper."""
        if width not in self._priced:
            self._priced[width] = self._price(width)
        return self._priced[width]

    def _price(self, width: int) -> float:
        known = self._growing
        (first, lowest), (last, highest) = known[0], known[-1]
        if width <= first:
            return lowest
        for (left, low), (right, high) in pairwise(known):
            if width <= right:
                return low + (high - low) * (width - left) / (right - left)
        slope = (highest - lowest) / (last - first) if last > first else 0.0
        return highest + slope * (width - last)
