"""A loss that also keeps the drafter near the one that its run started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import DraftedRounds, LossValue, PairLoss, TrainingLoss, Unrolled


__all__ = ["NearReferenceLoss"]


@final
@dataclass(frozen=True)
class NearReferenceLoss:
    """`loss + weight * sum_j KL(q_ref_j || q_j)`, over the number of trained anchors (ours; RCSD's abstract names continual
    learning and gives no formula).

    Args:
        loss ([`TrainingLoss`]): What is learnt.
        weight (`float`): How much the distance to the frozen reference counts.

    Raises:
        [`InvalidConfigError`]: If the weight is negative, or there is no reference.
    """

    loss: TrainingLoss
    weight: float = 0.1

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise InvalidConfigError(f"the reference's weight must be at least 0, got {self.weight}")

    def __call__(self, unrolled: Unrolled) -> LossValue:
        if not unrolled.reference_logits:
            raise InvalidConfigError(
                "the distance to a frozen reference needs its logits: take a recipe that has reference=True"
            )
        terms, anchors = [], unrolled.masks[0].sum().clamp(min=1)
        for student, reference, mask in zip(
            unrolled.student_logits, unrolled.reference_logits, unrolled.masks, strict=True
        ):
            log_q, log_reference = student.float().log_softmax(-1), reference.float().log_softmax(-1)
            terms.append(((log_reference.exp() * (log_reference - log_q)).sum(-1) * mask).sum() / anchors)
        value, distance = self.loss(unrolled), torch.stack(terms).sum()
        return LossValue(value.total + self.weight * distance, {**value.parts, "distance": float(distance.detach())})

    def num_pairs(self, rounds: DraftedRounds, masks: Sequence[Tensor]) -> int:
        """Those of the loss itself."""
        return self.loss.num_pairs(rounds, masks) if isinstance(self.loss, PairLoss) else 0
