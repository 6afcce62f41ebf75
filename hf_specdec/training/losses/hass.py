"""The loss of HASS (arXiv 2408.15766)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.topk import topk_cross_entropy


__all__ = ["HassLoss"]


@final
@dataclass(frozen=True)
class HassLoss:
    """`sum_j [feature_weight * SmoothL1(f', f) - soft_weight * sum_x p ln q - topk_weight * sum_{x in top-k of p} p ln q]`
    (published: HASS, section 3.1; weights 1, 0.1 and 1, k = 10, and p is not renormalised over its top-k).

    Each term is a sum over the trained drafts divided by the number of trained anchors (published: by that of the step).

    Args:
        feature_weight (`float`): Weight of the smooth L1 distance of features, a mean over their entries.
        soft_weight (`float`): Weight of the cross entropy with the whole law of the target.
        topk_weight (`float`): Weight of the cross entropy with its likeliest tokens.
        topk (`int`): How many those are.

    Raises:
        [`InvalidConfigError`]: If the network's states stand in for no feature of the target (EAGLE-3).
    """

    feature_weight: float = 1.0
    soft_weight: float = 0.1
    topk_weight: float = 1.0
    topk: int = 10

    def __call__(self, unrolled: Unrolled) -> LossValue:
        if not unrolled.target_states:
            raise InvalidConfigError(
                "the HASS loss compares the drafter's states with its target's features, which need family=\"eagle\": train "
                "an EAGLE-3 network with the eagle3 loss"
            )
        sums: dict[str, list[Tensor]] = {"feature": [], "soft": [], "topk": []}
        for student, target, mask, states, features in zip(
            unrolled.student_logits,
            unrolled.target_logits,
            unrolled.masks,
            unrolled.student_states,
            unrolled.target_states,
            strict=True,
        ):
            log_q, p = student.float().log_softmax(-1), target.float().softmax(-1)
            distance = smooth_l1_loss(states.float(), features.float(), reduction="none").mean(-1)
            sums["feature"].append((distance * mask).sum())
            sums["soft"].append(-((p * log_q).sum(-1) * mask).sum())
            sums["topk"].append((topk_cross_entropy(p, log_q, self.topk) * mask).sum())
        anchors = unrolled.masks[0].sum().clamp(min=1)
        parts = {name: torch.stack(terms).sum() / anchors for name, terms in sums.items()}
        weights = {"feature": self.feature_weight, "soft": self.soft_weight, "topk": self.topk_weight}
        total = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        return LossValue(total, {name: float(part.detach()) for name, part in parts.items()})
