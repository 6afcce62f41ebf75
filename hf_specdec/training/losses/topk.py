"""Distillation of the target's likeliest tokens, the top-k part of HASS (arXiv 2408.15766) by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import draft_laws


__all__ = ["TopKLoss", "topk_cross_entropy"]


@final
@dataclass(frozen=True)
class TopKLoss:
    """`-sum_j decay^j sum_{x in top-k of p_j} p_j ln q_j` (published as a part of HASS: `k = 10`, and `p` is not renormalised
    over its top-k), over the number of trained anchors. Ours: by itself, for every network; the top k are those that can be
    drafted.

    Args:
        topk (`int`): How many tokens.
        decay (`float`): Weight of a step, relative to the step before.

    Raises:
        [`InvalidConfigError`]: If `topk` is not positive.
    """

    topk: int = 10
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.topk < 1:
            raise InvalidConfigError(f"topk must be at least 1, got {self.topk}")

    def __call__(self, unrolled: Unrolled) -> LossValue:
        anchors = unrolled.masks[0].sum().clamp(min=1)
        laws = zip(draft_laws(unrolled), unrolled.masks, strict=True)
        terms = [(topk_cross_entropy(p, log_q, self.topk) * mask).sum() / anchors for (p, log_q), mask in laws]
        return LossValue.of_steps(terms, self.decay)


def topk_cross_entropy(p: Tensor, log_q: Tensor, topk: int) -> Tensor:
    """`-sum_{x in top-k of p} p ln q`, of shape `(batch, tokens)` from two of shape `(batch, tokens, vocab)`."""
    likely = p.topk(min(topk, p.shape[-1]), -1).indices
    return -(p.gather(-1, likely) * log_q.gather(-1, likely)).sum(-1)
