"""Additive growth and decay, row by row."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Budget, Round


__all__ = ["AdditiveLength"]


@final
@dataclass(frozen=True)
class AdditiveLength:
    """Two more tokens after a draft that was accepted whole, one fewer otherwise: transformers' heuristic schedule.

    Args:
        initial (`int`): Length of the first draft.
        shortest, longest (`int`): Bounds.
    """

    initial: int = 5
    shortest: int = 1
    longest: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.initial <= self.longest:
            raise InvalidConfigError(
                f"expected 1 <= shortest <= initial <= longest, got {self.shortest}, {self.initial}, {self.longest}"
            )

    def start(self, batch_size: int) -> "AdditiveSchedule":
        """The schedule of one `generate` call with `batch_size` rows."""
        return AdditiveSchedule(self, torch.full((batch_size,), self.initial))


@final
@dataclass
class AdditiveSchedule:
    controller: AdditiveLength
    lengths: Tensor

    def next_budget(self) -> Budget:
        return Budget(self.lengths)

    def observe(self, round_: Round) -> None:
        whole = round_.num_accepted == round_.num_drafted
        moved = torch.where(whole, self.lengths + 2, self.lengths - 1)
        moved = moved.clamp(self.controller.shortest, self.controller.longest)
        self.lengths = torch.where(round_.num_drafted > 0, moved, self.lengths)
