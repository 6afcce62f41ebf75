"""Drafting as long as the drafter is sure."""

from dataclasses import dataclass
from typing import final

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths.constant import ConstantSchedule
from hf_specdec.records import Budget


__all__ = ["ConfidenceLength"]


@final
@dataclass(frozen=True)
class ConfidenceLength:
    """Stops before the first position whose largest draft probability is below `threshold`.

    The decision is made from the law before a token is drawn from it. Discarding a token *after* seeing it would bias
    sampling; this does not. N-gram drafts have confidence 1.

    Args:
        threshold (`float`): Least confidence, in [0, 1].
        longest (`int`): Most tokens per draft.
    """

    threshold: float = 0.4
    longest: int = 16

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise InvalidConfigError(f"threshold must lie in [0, 1], got {self.threshold}")
        if self.longest < 1:
            raise InvalidConfigError(f"longest must be at least 1, got {self.longest}")

    def start(self, batch_size: int) -> ConstantSchedule:
        """The schedule of one `generate` call with `batch_size` rows."""
        return ConstantSchedule(Budget(torch.full((batch_size,), self.longest), self.threshold))
