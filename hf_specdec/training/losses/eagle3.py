"""The loss of EAGLE-3's training-time test (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import on_draft_vocabulary


__all__ = ["Eagle3Loss"]


@final
@dataclass(frozen=True)
class Eagle3Loss:
    """`-sum_j decay^j * sum_x p ln q`, where `p` is the target's law renormalised on the draft vocabulary, over the drafts
    where the target's best token can be drafted (published; decay 0.8).

    Each step is a sum over the trained drafts divided by the number of trained anchors (published: by that of all columns,
    padding included).

    Args:
        decay (`float`): Weight of a step, relative to the step before.
    """

    decay: float = 0.8

    def __call__(self, unrolled: Unrolled) -> LossValue:
        ids, anchors = unrolled.target_ids, unrolled.masks[0].sum().clamp(min=1)
        terms = []
        for student, target, mask in zip(unrolled.student_logits, unrolled.target_logits, unrolled.masks, strict=True):
            log_q, logits = student.float().log_softmax(-1), target.float()
            if ids is not None:
                mask = mask & on_draft_vocabulary(logits.argmax(-1), ids)[1]
                logits = logits[..., ids]
            terms.append(-((logits.softmax(-1) * log_q).sum(-1) * mask).sum() / anchors)
        return LossValue.of_steps(terms, self.decay)
