"""How far a chain of drafts survives, differentiably: what the acceptance-aware losses share.

The expected accepted length of a chain is `E[L] = sum_k prod_{i <= k} a_i`, with the acceptance `a_i` of its drafts given that
all before were accepted. The definitions here are *ours*, derived from the abstract of arXiv 2609.24150, whose text is not
public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.kl import KLLoss


__all__ = ["LEAST", "draft_laws", "mean_share", "missing_share", "on_draft_vocabulary", "with_divergence"]

LEAST = 1e-6  # of an acceptance, the logarithm of which would else be infinite, and its gradient not a number


def draft_laws(unrolled: Unrolled, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """`(p, ln q)` of each step, both of shape `(batch, tokens, draft_vocab)` in float32 and tempered alike. `p` is not
    renormalised on the draft vocabulary: the mass that cannot be drafted is lost acceptance."""
    ids = unrolled.target_ids
    laws = []
    for student, target in zip(unrolled.student_logits, unrolled.target_logits, strict=True):
        p = (target.float() / temperature).log_softmax(-1).exp()  # as q is computed: equal laws are equal to the bit
        laws.append((p if ids is None else p[..., ids], (student.float() / temperature).log_softmax(-1)))
    return laws


def on_draft_vocabulary(tokens: Tensor, target_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens' places in the draft vocabulary, and which of them are in it at all; any place for those that are not."""
    if target_ids is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    order = target_ids.argsort()  # a published drafter's ids may come in any order
    ranks = torch.searchsorted(target_ids, tokens.contiguous(), sorter=order).clamp(max=len(target_ids) - 1)
    places = order[ranks]
    return places, target_ids[places] == tokens


def missing_share(log_acceptance: Sequence[Tensor], masks: Sequence[Tensor], smoothing: float = 0.0) -> Tensor:
    """`1 - E[L] / K_t`, a mean over the anchors that are trained; `K_t` counts the trained drafts of anchor `t`.

    Args:
        log_acceptance (`Sequence[torch.FloatTensor]`): K tensors `(batch, tokens)`: `ln a_i` of each draft.
        masks (`Sequence[torch.BoolTensor]`): K tensors of the same shape, cumulative along the chain.
        smoothing (`float`): `s` in `(1 - s) a + s`, which keeps late drafts in the gradient while early ones fail.
    """
    acceptance = torch.stack([each.clamp(min=math.log(LEAST)) for each in log_acceptance])
    if smoothing:
        acceptance = ((1.0 - smoothing) * acceptance.exp() + smoothing).log()
    trained = torch.stack(list(masks)).long()
    expected = (acceptance.cumsum(0).exp() * trained).sum(0)
    lengths = trained.sum(0)
    return mean_share(expected, lengths)


def mean_share(expected: Tensor, lengths: Tensor) -> Tensor:
    """`1 - E[L] / K_t`, a mean over the anchors whose chain has a draft; both of shape `(batch, tokens)`."""
    shares = (lengths - expected) / lengths.clamp(min=1)
    return (shares * (lengths > 0)).sum() / (lengths > 0).sum().clamp(min=1)


def with_divergence(missing: Tensor, unrolled: Unrolled, kl_weight: float) -> LossValue:
    """`missing + kl_weight * KL`, see [`KLLoss`]."""
    kl = KLLoss()(unrolled).total
    return LossValue(missing + kl_weight * kl, {"missing": float(missing.detach()), "kl": float(kl.detach())})
