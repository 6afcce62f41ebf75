"""N-gram drafts where the text repeats itself, model drafts elsewhere."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.laws import one_hot
from hf_specdec.records import Budget, Context, Draft


__all__ = ["HybridDrafter"]


@final
class HybridDrafter(DrafterBase):
    """Per round and row: the n-gram match when there is one, else the model's draft.

    A rule that measures the drafter's uncertainty (EASD) is blind in the rows and rounds that an n-gram match serves.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        ngram, model ([`DrafterBase`]): The two drafters.
    """

    def __init__(self, settings: DraftSettings, ngram: DrafterBase, model: DrafterBase) -> None:
        super().__init__(settings)
        self.ngram, self.model = ngram, model

    def propose(self, context: Context, budget: Budget) -> Draft:
        matched = self.ngram.propose(context, budget)
        left_over = torch.where(matched.lengths > 0, 0, budget.max_tokens)
        if not bool((left_over > 0)[context.unfinished].any()):
            return matched
        modelled = self.model.propose(context, Budget(left_over, budget.min_confidence))
        return self._merge(matched, modelled) if bool((matched.lengths > 0).any()) else modelled

    def _merge(self, matched: Draft, modelled: Draft) -> Draft:
        width = max(matched.width, modelled.width)
        from_ngram = matched.lengths > 0
        tokens = torch.where(from_ngram[:, None], _widen(matched.tokens, width), _widen(modelled.tokens, width))
        q = logits = None
        if modelled.q is not None:
            laws = _widen(modelled.q, width)
            masses = one_hot(tokens.to(laws.device), laws.shape[-1], laws.dtype)
            q = torch.where(from_ngram.to(laws.device)[:, None, None], masses, laws)
        if modelled.logits is not None:
            raw = _widen(modelled.logits, width)
            sure = one_hot(tokens.to(raw.device), raw.shape[-1], raw.dtype).log()
            logits = torch.where(from_ngram.to(raw.device)[:, None, None], sure, raw)
        lengths = torch.where(from_ngram, matched.lengths, modelled.lengths)
        return Draft(tokens, lengths, q=q, logits=logits, source="hybrid", prefill_seconds=modelled.prefill_seconds)


def _widen(values: Tensor, width: int) -> Tensor:
    """`values` (`(batch, columns, ...)`) with zero columns appended up to `width`."""
    missing = width - values.shape[1]
    return torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], 1) if missing else values
