"""The same length in every round."""

from dataclasses import dataclass
from typing import final

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Budget, Round


__all__ = ["ConstantLength"]


@final
@dataclass(frozen=True)
class ConstantLength:
    """Drafts `length` tokens per round; 0 decodes plainly."""

    length: int = 5

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise InvalidConfigError(f"length must be an integer of at least 0, got {self.length!r}")

    def start(self, batch_size: int) -> "ConstantSchedule":
        """The schedule of one `generate` call with `batch_size` rows."""
        return ConstantSchedule(Budget(torch.full((batch_size,), self.length)))


@final
@dataclass(frozen=True)
class ConstantSchedule:
    budget: Budget

    def next_budget(self) -> Budget:
        return self.budget

    def observe(self, round_: Round) -> None:
        """Nothing is learnt."""
