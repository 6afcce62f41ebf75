"""LK losses, which aim at the acceptance rate of each draft by itself (arXiv 2602.23881)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import draft_laws


__all__ = ["LKLoss"]


@final
@dataclass(frozen=True)
class LKLoss:
    """With the overlap `a = sum_x min(p, q)` of each draft: `-ln a` (`form="alpha"`), or `w KL + (1 - w)(1 - a)` with
    `w = exp(-rate * a)`, not differentiated (`form="lambda"`); published. Each is a sum over the steps divided by the number
    of trained anchors.

    Args:
        form (`"alpha"` or `"lambda"`): Which.
        rate (`float`): How fast the divergence gives way to the overlap; 3 in the paper.
    """

    form: Literal["alpha", "lambda"] = "lambda"
    rate: float = 3.0

    def __post_init__(self) -> None:
        if self.form not in ("alpha", "lambda"):
            raise InvalidConfigError(f'form must be "alpha" or "lambda", got {self.form!r}')

    def __call__(self, unrolled: Unrolled) -> LossValue:
        anchors = unrolled.masks[0].sum().clamp(min=1)
        terms = []
        for (p, log_q), mask in zip(draft_laws(unrolled), unrolled.masks, strict=True):
            overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp(min=1e-6)
            if self.form == "alpha":
                value = -overlap.log()
            else:
                law = p / p.sum(-1, keepdim=True).clamp(min=1e-12)
                divergence = (torch.special.xlogy(law, law) - law * log_q).sum(-1)
                weight = (-self.rate * overlap.detach()).exp()
                value = weight * divergence + (1.0 - weight) * (1.0 - overlap)
            terms.append((value * mask).sum() / anchors)
        return LossValue.of_steps(terms)
