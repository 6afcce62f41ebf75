"""WTV, the overlap of both laws along a sampled chain (arXiv 2609.24150)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import (
    LEAST,
    draft_laws,
    mean_share,
    missing_share,
    on_draft_vocabulary,
    with_divergence,
)


__all__ = ["WTVLoss"]


@final
@dataclass(frozen=True)
class WTVLoss:
    """`1 - E[L] / K + kl_weight * KL` with the overlaps `a_i = sum_x min(p_i, q_i)` at the temperature of serving (the name
    is published, the formula is ours).

    The product of overlaps is not exactly `E[L]` of sampled decoding. `ratio=True` makes it so:
    `E[L] = E_{x ~ p} sum_k prod_{i < k} min(1, q_i(x_i) / p_i(x_i)) * a_k`, which holds for texts that the target sampled at
    this temperature without truncation, and only for those.

    Args:
        temperature (`float`): Temperature of serving.
        ratio (`bool`): The unbiased form.
        kl_weight (`float`): Weight of [`KLLoss`], which keeps the drafter's law in place.
        smoothing (`float`): See [`missing_share`]; not with `ratio`.
    """

    temperature: float = 1.0
    ratio: bool = False
    kl_weight: float = 0.1
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise InvalidConfigError(
                f"temperature must be above 0, got {self.temperature}; for greedy decoding take EAL"
            )
        if self.ratio and self.smoothing:
            raise InvalidConfigError("smoothing would bias the unbiased form: pass ratio=True or smoothing, not both")

    def __call__(self, unrolled: Unrolled) -> LossValue:
        laws = draft_laws(unrolled, self.temperature)
        overlaps = [torch.minimum(p, log_q.exp()).sum(-1) for p, log_q in laws]
        if self.ratio:
            missing = _missing_by_ratio(overlaps, laws, unrolled)
        else:
            missing = missing_share([each.clamp(min=LEAST).log() for each in overlaps], unrolled.masks, self.smoothing)
        return with_divergence(missing, unrolled, self.kl_weight)


def _missing_by_ratio(overlaps: list[Tensor], laws: list[tuple[Tensor, Tensor]], unrolled: Unrolled) -> Tensor:
    reached = torch.ones_like(overlaps[0])
    expected, lengths = torch.zeros_like(reached), torch.zeros_like(reached)
    for (p, log_q), overlap, mask, tokens in zip(laws, overlaps, unrolled.masks, unrolled.tokens, strict=True):
        expected, lengths = expected + reached * overlap * mask, lengths + mask
        places, known = on_draft_vocabulary(tokens, unrolled.target_ids)
        ratio = log_q.gather(-1, places[..., None]).exp() / p.gather(-1, places[..., None]).clamp(min=1e-12)
        reached = reached * torch.where(known, ratio[..., 0].clamp(max=1.0), 0.0)
    return mean_share(expected, lengths)
