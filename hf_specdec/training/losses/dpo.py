"""RCSD's DPO stage: what verification accepted and rejected, as preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import DraftedRounds, LossValue, Unrolled
from hf_specdec.training.losses.kl import KLLoss
from hf_specdec.training.losses.survival import on_draft_vocabulary


__all__ = ["DPOLoss"]


@final
@dataclass(frozen=True)
class DPOLoss:
    """`-ln sigmoid(beta (S_w - S_l))` with `S = sum_i decay^(i - n) m_i ln(q / q_ref)`, over rounds that rejected their draft
    `n` (pairs and the masked loss are named by RCSD's abstract and its Figure 3; the formulas are *ours*).

    The rejected side is the draft from its first rejected token on, each token scored after the drafts before it. The chosen
    side depends on the reading: `"continuation"` takes what the target wrote from there on, `"literal"` the accepted
    tokens, as Figure 3 draws it. The loss is the mean over the pairs of an optimiser step.

    Args:
        pairs (`"literal"` or `"continuation"`): What is preferred to the rejected tokens.
        rejected (`"first"` or `"all"`): Whether the first rejected draft is the rejected side, or those behind it too, which
            the drafter would not have drafted after the right token.
        masked (`bool`): Whether drafts that are the target's own choice after the drafts before them are not penalised.
        beta (`float`): How sharply preferences count.
        decay (`float`): Weight of a token, relative to the token before it; 1 for none.
        anchor_weight (`float`): Weight of [`KLLoss`] to the target, since the pairwise loss alone may lower both sides.

    Raises:
        [`InvalidConfigError`]: If an option is out of range, or there are no rounds or no reference.
    """

    pairs: Literal["literal", "continuation"] = "continuation"
    rejected: Literal["first", "all"] = "all"
    masked: bool = True
    beta: float = 0.1
    decay: float = 1.0
    anchor_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.pairs not in ("literal", "continuation"):
            raise InvalidConfigError(f'pairs must be "literal" or "continuation", got {self.pairs!r}')
        if self.rejected not in ("first", "all"):
            raise InvalidConfigError(f'rejected must be "first" or "all", got {self.rejected!r}')
        if self.beta <= 0 or not 0 < self.decay <= 1:
            raise InvalidConfigError(
                f"beta must be above 0 and decay above 0 and at most 1, got {self.beta} and {self.decay}"
            )

    def __call__(self, unrolled: Unrolled) -> LossValue:
        rounds = unrolled.rounds
        if rounds is None or not rounds.reference_logits or not unrolled.reference_logits:
            raise InvalidConfigError(
                "the DPO loss compares recorded rounds with a frozen reference: train with rounds=... and a recipe that has "
                "reference=True"
            )
        chosen_mask, rejected_mask, ages = self.pair_masks(rounds, unrolled.masks)
        weights = self.decay ** ages.clamp(min=0)
        chosen = _gain(unrolled.tokens, unrolled.student_logits, unrolled.reference_logits, unrolled.target_ids)
        rejected = _gain(rounds.tokens, rounds.student_logits, rounds.reference_logits, unrolled.target_ids)
        won = _masked_sum(chosen[0] * weights, chosen_mask & chosen[1])
        lost = _masked_sum(rejected[0] * weights, rejected_mask & rejected[1])
        is_pair, anchors = rejected_mask.any(0) & chosen_mask.any(0), unrolled.masks[0].sum().clamp(min=1)
        found = float(is_pair.sum() / anchors)
        per_anchor = found if rounds.pairs_per_anchor is None else rounds.pairs_per_anchor
        num_pairs = anchors * (per_anchor or 1.0)
        total = torch.where(is_pair, -logsigmoid(self.beta * (won - lost)), 0.0).sum() / num_pairs
        preferred = ((won > lost) & is_pair).sum() / num_pairs
        parts = {"preference": float(total.detach()), "preferred": float(preferred), "pairs": found}
        if self.anchor_weight:
            anchor = KLLoss()(unrolled).total
            total, parts["kl"] = total + self.anchor_weight * anchor, float(anchor.detach())
        return LossValue(total, parts)

    def num_pairs(self, rounds: DraftedRounds, masks: Sequence[Tensor]) -> int:
        chosen, rejected, _ = self.pair_masks(rounds, masks)
        return int((chosen.any(0) & rejected.any(0)).sum())

    def pair_masks(self, rounds: DraftedRounds, masks: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The masks of the chosen and of the rejected tokens, both `(K, batch, tokens)`, and how many drafts each token stands
        behind the first rejected one, negative for those before it. All of a round is masked that rejected nothing."""
        drafted, accepted = torch.stack(list(rounds.drafted)), torch.stack(list(rounds.accepted))
        trained = torch.stack(list(masks))
        steps = torch.arange(len(drafted), device=drafted.device)[:, None, None]
        ages = steps - accepted.sum(0)
        rejects = drafted.any(0) & (accepted.sum(0) < drafted.sum(0))
        rejected = drafted & ((ages == 0) if self.rejected == "first" else (ages >= 0)) & rejects & trained[0]
        if self.masked:
            rejected = rejected & (torch.stack(list(rounds.tokens)) != torch.stack(list(rounds.choices)))
        chosen = trained & rejects & ((ages >= 0) if self.pairs == "continuation" else accepted)
        return chosen, rejected, ages


def _gain(
    tokens: Sequence[Tensor], student: Sequence[Tensor], reference: Sequence[Tensor], target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`ln(q / q_ref)` of each token, and which of them can be drafted at all; both `(K, batch, tokens)`."""
    gains, known = [], []
    for wanted, mine, theirs in zip(tokens, student, reference, strict=True):
        places, is_known = on_draft_vocabulary(wanted, target_ids)
        gains.append(_log_q(mine, places) - _log_q(theirs, places))
        known.append(is_known)
    return torch.stack(gains), torch.stack(known)


def _log_q(logits: Tensor, places: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, places[..., None])[..., 0]


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(0)
