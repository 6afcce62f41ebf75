"""Cross entropy on the target's own choice, the second control beside the divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch.nn.functional import nll_loss

from hf_specdec.training.losses import LossValue, Unrolled


__all__ = ["ChoiceLoss"]


@final
@dataclass(frozen=True)
class ChoiceLoss:
    """`-sum_j ln q_j(argmax p_j)`, over the number of trained anchors, for drafters with the target's whole vocabulary.

    Cross entropy with the target's whole law has the gradient of [`KLLoss`]; with its choice alone it asks for what greedy
    verification accepts.
    """

    def __call__(self, unrolled: Unrolled) -> LossValue:
        anchors = unrolled.masks[0].sum().clamp(min=1)
        terms = []
        for student, target, mask in zip(unrolled.student_logits, unrolled.target_logits, unrolled.masks, strict=True):
            log_q = student.float().log_softmax(-1)
            losses = nll_loss(log_q.flatten(0, -2), target.argmax(-1).flatten(), reduction="none")
            terms.append((losses.view_as(mask) * mask).sum() / anchors)
        return LossValue.of_steps(terms)
