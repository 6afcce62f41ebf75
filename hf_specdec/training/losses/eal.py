"""EAL, the expected acceptance length of greedy decoding (arXiv 2609.24150)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import draft_laws, missing_share, on_draft_vocabulary, with_divergence


__all__ = ["EALLoss"]


@final
@dataclass(frozen=True)
class EALLoss:
    """`1 - E[L] / K + kl_weight * KL` with `a_i = q_i(argmax p_i)` (the name is published, the formula is ours).

    The gradient of `-E[L]` is that of the cross entropy with the target's best token, each draft weighted by
    `sum_{j >= k} prod_{i <= j} a_i`. It vanishes where little is accepted: begin with a trained drafter.

    Args:
        kl_weight (`float`): Weight of [`KLLoss`], which keeps the drafter's law in place.
        smoothing (`float`): See [`missing_share`].
    """

    kl_weight: float = 0.1
    smoothing: float = 0.0

    def __call__(self, unrolled: Unrolled) -> LossValue:
        log_acceptance = []
        for (_, log_q), target in zip(draft_laws(unrolled), unrolled.target_logits, strict=True):
            places, known = on_draft_vocabulary(target.argmax(-1), unrolled.target_ids)
            chosen = log_q.gather(-1, places[..., None])[..., 0]
            log_acceptance.append(torch.where(known, chosen, float("-inf")))
        missing = missing_share(log_acceptance, unrolled.masks, self.smoothing)
        return with_divergence(missing, unrolled, self.kl_weight)
