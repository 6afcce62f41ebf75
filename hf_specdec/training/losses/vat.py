"""VAT, verification-aware training: where the first rejection is, and whether the drafter sees it coming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.survival import on_draft_vocabulary


__all__ = ["VATLoss", "greedy_survival"]


@final
@dataclass(frozen=True)
class VATLoss:
    """`sum_k w_k (soft_k + hard_k) + survival_weight * sum_k BCE(s_k, v_k)` (arXiv 2608.30135).

    Published: greedy verification of each chain is simulated, `k*` is the first draft that it rejects, the weight `w_k` is 1
    before `k*` and `decay^(k - k*)` from there on, with a decay of 0.8; a head predicts the survival `v_k`, which is 1 where
    drafts 1 to k are all accepted, with a binary cross entropy of weight 1; soft and hard cross entropies are both taken.

    Ours: the soft one is `-sum_x p ln q` with the target's law renormalised on the draft vocabulary, the hard one is
    `-ln q(argmax p)`, both count alike and only where the target's best token can be drafted; sums are divided by the number of
    trained anchors; the head is [`SurvivalHead`].

    Args:
        decay (`float`): Weight of a draft from the first rejected one on, relative to the draft before it.
        survival_weight (`float`): Weight of the survival head's binary cross entropy.

    Raises:
        [`InvalidConfigError`]: If an option is out of range, or there are no survival logits.
    """

    decay: float = 0.8
    survival_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1 or self.survival_weight < 0:
            raise InvalidConfigError(
                "decay must be above 0 and at most 1, survival_weight at least 0, got "
                f"{self.decay} and {self.survival_weight}"
            )

    def __call__(self, unrolled: Unrolled) -> LossValue:
        if not unrolled.survival_logits:
            raise InvalidConfigError("the VAT loss trains a survival head: take a recipe that has survival=True")
        trained = torch.stack(list(unrolled.masks))
        anchors = trained[0].sum().clamp(min=1)
        survives = greedy_survival(unrolled)
        entropies, known = _cross_entropies(unrolled)
        weighted = (entropies * verification_weights(survives, self.decay) * (trained & known)).sum() / anchors
        predicted = torch.stack(list(unrolled.survival_logits)).float()
        surprise = binary_cross_entropy_with_logits(predicted, survives.float(), reduction="none")
        survival = (surprise * trained).sum() / anchors
        total = weighted + self.survival_weight * survival
        return LossValue(total, {"weighted": float(weighted.detach()), "survival": float(survival.detach())})


@torch.no_grad()
def greedy_survival(unrolled: Unrolled) -> Tensor:
    """`(K, batch, tokens)`, `v_k`: whether the drafter's best tokens up to draft `k` are all the target's."""
    agreed = []
    for student, target in zip(unrolled.student_logits, unrolled.target_logits, strict=True):
        best = student.argmax(-1)
        best = best if unrolled.target_ids is None else unrolled.target_ids[best]
        agreed.append(best == target.argmax(-1))
    return torch.stack(agreed).cumprod(0).bool()


def verification_weights(survives: Tensor, decay: float) -> Tensor:
    """`(K, batch, tokens)`, `w_k`: 1 up to the first rejected draft, and `decay` times the one before after it."""
    steps = torch.arange(len(survives), device=survives.device)[:, None, None]
    return decay ** (steps - survives.sum(0)).clamp(min=0)


def _cross_entropies(unrolled: Unrolled) -> tuple[Tensor, Tensor]:
    """The soft and the hard cross entropy together, and where the target's best token can be drafted; `(K, batch, tokens)`."""
    ids, entropies, knowns = unrolled.target_ids, [], []
    for student, target in zip(unrolled.student_logits, unrolled.target_logits, strict=True):
        log_q, logits = student.float().log_softmax(-1), target.float()
        places, known = on_draft_vocabulary(logits.argmax(-1), ids)
        p = (logits if ids is None else logits[..., ids]).softmax(-1)
        entropies.append(-(p * log_q).sum(-1) - log_q.gather(-1, places[..., None])[..., 0])
        knowns.append(known)
    return torch.stack(entropies), torch.stack(knowns)
