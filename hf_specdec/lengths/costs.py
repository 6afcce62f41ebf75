"""What drafting and verifying cost, as a table that can be frozen and saved."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

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

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens: between two known widths a straight line, beyond them flat to the
        left and the last slope to the right. A wider pass is never taken for cheaper."""
        known = _growing(self.target)
        if width <= known[0][0] or len(known) == 1:
            return known[0][1] if width <= known[0][0] else known[-1][1]
        for (left, low), (right, high) in pairwise(known):
            if width <= right or right == known[-1][0]:
                return low + (high - low) * (width - left) / (right - left)
        return known[-1][1]


def _growing(target: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """The table with measurement noise removed that would make a wider pass cheaper than a narrower one."""
    result: list[tuple[int, float]] = []
    for width, seconds in target:
        result.append((width, max(seconds, result[-1][1]) if result else seconds))
    return result
