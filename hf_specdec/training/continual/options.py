"""What continual training can be told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.reference import NearReferenceLoss
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import Recipe


__all__ = ["ContinualTraining", "OnlineOptions"]


@final
@dataclass(frozen=True, kw_only=True)
class ContinualTraining:
    """What keeps a drafter from forgetting while it learns from recorded rounds (that RCSD learns continually is published,
    both means and their numbers are ours).

    Args:
        replay_share (`float`): Share of old texts among those that are trained on, at least 0 and below 1.
        reference_weight (`float`): Weight of the divergence from the drafter that learning began with, see
            [`NearReferenceLoss`]; 0 for none.

    Raises:
        [`InvalidConfigError`]: If a number is out of range.
    """

    replay_share: float = 0.5
    reference_weight: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.replay_share < 1 or self.reference_weight < 0:
            raise InvalidConfigError(
                "replay_share must be at least 0 and below 1, reference_weight at least 0, got "
                f"{self.replay_share} and {self.reference_weight}"
            )

    def recipe(self, base: Recipe) -> Recipe:
        """`base`, with a frozen reference that its loss stays near to."""
        if not self.reference_weight:
            return base
        return replace(base, loss=NearReferenceLoss(base.loss, self.reference_weight), reference=True)


@final
@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """Pace of an [`OnlineAdapter`] (all numbers are ours).

    Args:
        every (`int`): Calls from one update to the next; 0 updates only when asked.
        steps (`int`): Optimiser steps of an update.
        batch_size (`int`): Texts per optimiser step, all in one forward pass.
        learning_rate (`float`): Of the first step; it falls on a cosine to 0 within the update.
        capacity (`int`): Recorded texts that are kept, the newest ones.
        seed (`int`): Decides the order of the texts.

    Raises:
        [`InvalidConfigError`]: If a number is out of range.
    """

    every: int = 16
    steps: int = 8
    batch_size: int = 4
    learning_rate: float = 1e-4
    capacity: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or self.capacity < 1:
            raise InvalidConfigError(
                f"every must be at least 0 and capacity at least 1, got {self.every} and {self.capacity}"
            )
        self.training(0)  # validates what is left

    def training(self, update: int) -> TrainingOptions:
        """The options of update number `update`, each with an order of its own."""
        return TrainingOptions(
            max_steps=self.steps,
            batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup=0.0,
            seed=self.seed + update,
        )
