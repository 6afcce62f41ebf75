"""What a loss is given and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


__all__ = ["DraftedRounds", "LossValue", "PairLoss", "TrainingLoss", "Unrolled"]


@dataclass(frozen=True)
class DraftedRounds:
    """Rounds of decoding, slot-aligned as in [`Unrolled`]: entry `j` of each sequence, at column `t`, is about the draft `j` of
    the round whose chain is anchored at column `t`.

    Args:
        tokens (`Sequence[torch.LongTensor]`): K tensors of shape `(batch, tokens)`: the drafts, on the target's vocabulary.
        choices (`Sequence[torch.LongTensor]`): K tensors of the same shape: what the target chooses there, *given the drafts
            before*; -1 where it is not known.
        drafted (`Sequence[torch.BoolTensor]`): K tensors of the same shape: where there is a draft.
        accepted (`Sequence[torch.BoolTensor]`): K tensors of the same shape: which drafts were accepted.
        student_logits (`Sequence[torch.FloatTensor]`): K tensors of shape `(batch, tokens, draft_vocab)`: the drafter's
            logits along the drafts.
        reference_logits (`Sequence[torch.FloatTensor]`): Those of the frozen reference.
        pairs_per_anchor (`float`, *optional*): Preference pairs of the whole optimiser step by its trained anchors, where these
            are the rounds of a part of its texts, so that a mean over pairs does not depend on how a step is cut; those of
            these rounds unless given.
    """

    tokens: Sequence[Tensor]
    choices: Sequence[Tensor]
    drafted: Sequence[Tensor]
    accepted: Sequence[Tensor]
    student_logits: Sequence[Tensor] = ()
    reference_logits: Sequence[Tensor] = ()
    pairs_per_anchor: float | None = None

    def to(self, device: torch.device) -> DraftedRounds:
        """The same rounds on a device."""
        names = ("tokens", "choices", "drafted", "accepted", "student_logits", "reference_logits")
        moved: dict[str, Any] = {name: [part.to(device) for part in getattr(self, name)] for name in names}
        return replace(self, **moved)


@dataclass(frozen=True)
class Unrolled:
    """Chains of K drafts from every column of a text, slot-aligned: entry `j` of each sequence, at column `t`, is about the
    draft `j` of the chain anchored at column `t`, whose last true feature is that of column `t`.

    That draft is about token `t + 2 + j` of the text, since column `t` of a drafter network reads token `t + 1`.

    Args:
        student_logits (`Sequence[torch.FloatTensor]`): K tensors of shape `(batch, tokens, draft_vocab)`.
        target_logits (`Sequence[torch.FloatTensor]`): K tensors of shape `(batch, tokens, vocab)`, already shifted: where the
            mask is on, entry `j` at `t` is what the target says about the same token.
        masks (`Sequence[torch.BoolTensor]`): K tensors of shape `(batch, tokens)`: which drafts are trained.
        tokens (`Sequence[torch.LongTensor]`): K tensors of shape `(batch, tokens)`: the text's own token there, on the target's
            vocabulary.
        target_ids (`torch.LongTensor` of shape `(draft_vocab,)`, *optional*): The target's id of each draft token, in any
            order; None where both vocabularies are one.
        student_states (`Sequence[torch.FloatTensor]`): K tensors of shape `(batch, tokens, hidden_size)`: what recurs.
        target_states (`Sequence[torch.FloatTensor]`): K tensors of the same shape: the features that `student_states` stand in
            for. Empty for networks whose states stand in for no single feature (EAGLE-3).
        reference_logits (`Sequence[torch.FloatTensor]`): The logits of a frozen reference, for recipes that have one.
        survival_logits (`Sequence[torch.FloatTensor]`): K tensors of shape `(batch, tokens)`: what a [`SurvivalHead`] says, for
            recipes that have one.
        rounds ([`DraftedRounds`], *optional*): Recorded rounds on these texts, for recipes that learn from them.
        seeds (`Sequence[int]`): One number for each text, for losses that draw: the same in whatever batch the text stands.
    """

    student_logits: Sequence[Tensor]
    target_logits: Sequence[Tensor]
    masks: Sequence[Tensor]
    tokens: Sequence[Tensor]
    target_ids: Tensor | None = None
    student_states: Sequence[Tensor] = ()
    target_states: Sequence[Tensor] = ()
    reference_logits: Sequence[Tensor] = ()
    survival_logits: Sequence[Tensor] = ()
    rounds: DraftedRounds | None = None
    seeds: Sequence[int] = ()


@dataclass(frozen=True)
class LossValue:
    """A loss.

    Args:
        total (`torch.FloatTensor`): A scalar, what is differentiated.
        parts (`Mapping[str, float]`): What it is made of, by name, for the log; means over the trained anchors too.
    """

    total: Tensor
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_steps(cls, terms: Sequence[Tensor], decay: float = 1.0) -> LossValue:
        """The sum of the steps' terms, step `j` weighted by `decay^j`."""
        total = torch.stack([decay**step * term for step, term in enumerate(terms)]).sum()
        return cls(total, {f"step_{step}": float(term.detach()) for step, term in enumerate(terms)})


class TrainingLoss(Protocol):
    """A loss on unrolled drafts."""

    def __call__(self, unrolled: Unrolled) -> LossValue:
        """The loss of one batch; a mean over the trained anchors."""
        ...


@runtime_checkable
class PairLoss(TrainingLoss, Protocol):
    """A loss that is a mean over preference pairs, which not every anchor has."""

    def num_pairs(self, rounds: DraftedRounds, masks: Sequence[Tensor]) -> int:
        """Pairs among rounds, `masks` being those of [`Unrolled`]."""
        ...
