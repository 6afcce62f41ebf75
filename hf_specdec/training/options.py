"""What a training run can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from hf_specdec.errors import InvalidConfigError


__all__ = ["TrainingOptions"]


@final
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Length and pace of a training run. AdamW with betas 0.9 and 0.95, a cosine with warm-up (ours; published: linear).

    Args:
        max_steps (`int`): Optimiser steps.
        batch_size (`int`): Texts per optimiser step, over all processes.
        micro_batch_size (`int`): Texts per forward pass of a process.
        learning_rate (`float`): The highest one.
        warmup (`float`): Share of the steps in which it rises.
        clip (`float`): Largest norm of a gradient.
        mixed_precision (`str`): `"bf16"` computes in bfloat16 with weights and moments in float32.
        save_every (`int`): Steps between checkpoints, of which the last step has one too; 0 writes none.
        eval_every (`int`): Steps between evaluations.
        seed (`int`): Decides the order of the texts.

    Raises:
        [`InvalidConfigError`]: If a number is out of range.
    """

    max_steps: int
    batch_size: int = 8
    micro_batch_size: int = 1
    learning_rate: float = 1e-4
    warmup: float = 0.01
    clip: float = 0.5
    mixed_precision: Literal["no", "bf16"] = "no"
    save_every: int = 500
    eval_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "micro_batch_size", "learning_rate", "clip", "eval_every"):
            if getattr(self, name) <= 0:
                raise InvalidConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.warmup <= 1 or self.save_every < 0:
            raise InvalidConfigError(
                f"warmup must be 0 to 1 and save_every at least 0, got {self.warmup} and {self.save_every}"
            )

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint follows the step."""
        return bool(self.save_every) and (step % self.save_every == 0 or step == self.max_steps)

    def check_processes(self, num_processes: int) -> None:
        """Raises an [`InvalidConfigError`] if so many processes cannot share a batch evenly."""
        if self.batch_size % num_processes:
            raise InvalidConfigError(
                f"batch_size={self.batch_size} cannot be shared evenly by {num_processes} processes: pass a multiple of that"
            )
