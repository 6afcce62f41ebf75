"""N-gram drafts where the text repeats itself, model drafts elsewhere, and matches that go on where the model stops."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter, offer
from hf_specdec.laws import one_hot
from hf_specdec.records import Budget, Context, Draft, Forecast


__all__ = ["HybridDrafter"]


@final
class HybridDrafter(DrafterBase):
    """Per round and row: the n-gram match or the model's draft, whichever is expected to be worth more.

    Where the length controller forecasts (`GoodputLength`), it chooses, and a match of the text with the model's draft may
    extend that draft for nothing. Under other controllers the match goes first, as long as there is one.

    A rule that measures the drafter's uncertainty (EASD) is blind in the rows and rounds that an n-gram match serves.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        ngram ([`PromptLookupDrafter`]): Finds matches.
        model ([`DrafterBase`]): Drafts the rest.
        model_first (`bool`): Without a forecast, the model is asked first, and the match serves rows where it finds nothing.
    """

    def __init__(
        self, settings: DraftSettings, ngram: PromptLookupDrafter, model: DrafterBase, *, model_first: bool = False
    ) -> None:
        super().__init__(settings)
        self.ngram, self.model, self.model_first = ngram, model, model_first

    def propose(self, context: Context, budget: Budget) -> Draft:
        offered = self.ngram.match(context, budget.limit)
        from_match, from_model = self._plan(context, budget, offered)
        if not bool((from_model > 0)[context.unfinished].any()):
            return offered.first(from_match)
        modelled = self.model.propose(context, replace(budget, max_tokens=from_model, ceiling=None, forecast=None))
        if offered.width == 0 and budget.forecast is None:
            return modelled
        modelled = modelled.read()
        # A model may find nothing worth proposing, as exit heads do where none is sure.
        matched = offered.first(torch.where((from_model > 0) & (modelled.lengths == 0), from_model, from_match))
        extended = Draft.empty(context.batch_size)
        if budget.forecast is not None:
            extended = self._extension(context, modelled, budget, budget.forecast)
        if matched.width == 0 and extended.width == 0:
            return modelled
        return _joined(matched, modelled, extended)

    @property
    def device(self) -> torch.device:
        """That of the model's drafter."""
        return self.model.device

    @property
    def can_drop_rows(self) -> bool:
        return self.model.can_drop_rows

    def keep_rows(self, kept: Tensor) -> None:
        self.ngram.keep_rows(kept)
        self.model.keep_rows(kept)

    def _plan(self, context: Context, budget: Budget, matched: Draft) -> tuple[Tensor, Tensor]:
        """Tokens of each row's match, and of the model."""
        if budget.forecast is None and self.model_first:
            return torch.zeros_like(budget.max_tokens), budget.max_tokens
        if budget.forecast is None:
            return matched.lengths, torch.where(matched.lengths > 0, 0, budget.max_tokens)
        rows = (context.unfinished & (budget.limit > 0)).nonzero()[:, 0].tolist()
        offers = [offer(matched, row) for row in rows]
        plan = budget.forecast.plan(offers, with_model=True, weights=budget.weights_of(rows))
        from_match, from_model = torch.zeros_like(budget.limit), torch.zeros_like(budget.limit)
        from_match[rows], from_model[rows] = torch.tensor(plan.from_match), torch.tensor(plan.from_model)
        return from_match, from_model.minimum(budget.limit)

    def _extension(self, context: Context, modelled: Draft, budget: Budget, forecast: Forecast) -> Draft:
        """What the matches of the text with the model's draft add to it."""
        room = torch.where(modelled.lengths > 0, budget.limit - modelled.lengths, 0)
        matched = self.ngram.match(_with_draft(context, modelled), room)
        rows = context.unfinished.nonzero()[:, 0].tolist()
        offers = [self._offer_after(modelled, matched, row) for row in rows]
        most = torch.zeros_like(room)
        most[rows] = torch.tensor(forecast.extensions(offers, modelled.width, budget.weights_of(rows)))
        return matched.first(most)

    def _offer_after(self, modelled: Draft, matched: Draft, row: int) -> tuple[str, int, int] | None:
        """The match that a row's model draft could go on with: its kind, its tokens, and the model's."""
        found, drafted = offer(matched, row), int(modelled.lengths[row])
        if found is None or drafted == 0 or int(modelled.tokens[row, drafted - 1]) in self.settings.eos_token_ids:
            return None
        return *found, drafted


def _with_draft(context: Context, draft: Draft) -> Context:
    """The context as it would be if the draft were accepted whole."""
    lengths = context.lengths + draft.lengths
    tokens = torch.nn.functional.pad(context.tokens, (0, max(0, int(lengths.max()) - context.tokens.shape[1])))
    rows, columns = draft.valid.nonzero(as_tuple=True)
    tokens = tokens.clone()
    tokens[rows, context.lengths[rows] + columns] = draft.tokens[rows, columns]
    return replace(context, tokens=tokens, lengths=lengths)


def _joined(matched: Draft, modelled: Draft, extended: Draft) -> Draft:
    """Each row's match or model draft, and what extends the latter. N-gram tokens are point masses."""
    lengths = matched.lengths + modelled.lengths + extended.lengths
    width = int(lengths.max())
    tokens = torch.zeros(len(lengths), width, dtype=torch.long)
    free = torch.arange(width) < lengths[:, None]
    for part, first in ((matched, 0), (modelled, 0), (extended, modelled.lengths)):
        rows, columns = part.valid.nonzero(as_tuple=True)
        places = columns + (first if isinstance(first, int) else first[rows])
        tokens[rows, places] = part.tokens[rows, columns]
        if part is modelled:
            free[rows, places] = False
    return Draft(
        tokens,
        lengths,
        q=_with_masses(modelled.q, tokens, free),
        logits=_with_masses(modelled.logits, tokens, free, log=True),
        source="hybrid",
        stretches=[[*a, *b, *c] for a, b, c in zip(matched.kinds, modelled.kinds, extended.kinds, strict=True)],
        prefill_seconds=modelled.prefill_seconds,
        num_attempted=modelled.num_attempted,
        exit_depths=_padded(modelled.exit_depths, width),
        shared_seconds=modelled.shared_seconds,
        num_read=modelled.num_read,
    )


def _padded(values: Tensor | None, width: int) -> Tensor | None:
    return None if values is None else torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _with_masses(laws: Tensor | None, tokens: Tensor, free: Tensor, *, log: bool = False) -> Tensor | None:
    """Laws `(batch, columns, vocab)` as wide as `tokens`, and a point mass wherever the token was `free`."""
    if laws is None:
        return None
    missing = tokens.shape[1] - laws.shape[1]
    laws = torch.nn.functional.pad(laws, (0, 0, 0, missing))
    masses = one_hot(tokens.to(laws.device), laws.shape[-1], laws.dtype)
    return torch.where(free.to(laws.device)[..., None], masses.log() if log else masses, laws)
