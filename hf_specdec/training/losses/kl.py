"""The Kullback-Leibler divergence, the usual distillation loss and the control of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hf_specdec.training.losses.base import LossValue, Unrolled


__all__ = ["KLLoss"]


@final
@dataclass(frozen=True)
class KLLoss:
    """`sum_j decay^j KL(p_j || q_j)`, with the target's law renormalised on the draft vocabulary, over the number of trained
    anchors.

    Args:
        decay (`float`): Weight of a step, relative to the step before.
    """

    decay: float = 1.0

    def __call__(self, unrolled: Unrolled) -> LossValue:
        ids, anchors = unrolled.target_ids, unrolled.masks[0].sum().clamp(min=1)
        terms = []
        for student, target, mask in zip(unrolled.student_logits, unrolled.target_logits, unrolled.masks, strict=True):
            log_q = student.float().log_softmax(-1)
            log_p = (target.float() if ids is None else target.float()[..., ids]).log_softmax(-1)
            terms.append(((log_p.exp() * (log_p - log_q)).sum(-1) * mask).sum() / anchors)
        return LossValue.of_steps(terms, self.decay)
