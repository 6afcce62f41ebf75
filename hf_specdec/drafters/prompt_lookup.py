"""Prompt lookup: the continuation of an earlier occurrence of the last tokens (Saxena 2023, "prompt lookup decoding")."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.suffix_index import SuffixIndex
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Budget, Context, Draft


__all__ = ["PromptLookupDrafter", "offer"]


@final
class PromptLookupDrafter(DrafterBase):
    """Drafts what followed the most recent earlier occurrence of the longest matching suffix, in prompt and output.

    Each row has an index that grows with its text ([`SuffixIndex`]), so a round's search costs the same in a long text as in
    a short one (ours; transformers and the published method read the whole text in each round).

    Its drafts are point masses: a rule that measures the drafter's uncertainty finds none.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        largest, smallest (`int`): Longest and shortest suffix to look for, in tokens.
    """

    def __init__(self, settings: DraftSettings, largest: int = 3, smallest: int = 1) -> None:
        super().__init__(settings)
        if not 1 <= smallest <= largest:
            raise InvalidConfigError(f"expected 1 <= smallest <= largest n-gram, got {smallest} and {largest}")
        self.largest, self.smallest = largest, smallest
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, context: Context, budget: Budget) -> Draft:
        matched = self.match(context, budget.limit)
        if budget.forecast is None or matched.width == 0:
            return matched
        rows = context.unfinished.nonzero()[:, 0].tolist()
        offers = [offer(matched, row) for row in rows]
        plan = budget.forecast.plan(offers, with_model=False, weights=budget.weights_of(rows))
        most = torch.zeros_like(matched.lengths)
        most[rows] = torch.tensor(plan.from_match)
        return matched.first(most)

    @property
    def can_drop_rows(self) -> bool:
        return True

    def keep_rows(self, kept: Tensor) -> None:
        places = {old: new for new, old in enumerate(kept.tolist())}
        self._indexes = {places[row]: index for row, index in self._indexes.items() if row in places}

    def match(self, context: Context, max_tokens: Tensor) -> Draft:
        """All that followed each row's match, at most `max_tokens[b]` tokens."""
        found = [
            self._lookup(context, row, int(max_tokens[row])) if bool(context.unfinished[row]) else (0, [])
            for row in range(context.batch_size)
        ]
        width = max(len(drafted) for _, drafted in found)
        if width == 0:
            return Draft.empty(context.batch_size)
        tokens = torch.tensor([drafted + [0] * (width - len(drafted)) for _, drafted in found])
        lengths = torch.tensor([len(drafted) for _, drafted in found])
        stretches = [[(f"ngram-{size}", len(drafted))] if drafted else [] for size, drafted in found]
        return Draft(tokens, lengths, source="ngram", stretches=stretches)

    def _lookup(self, context: Context, row: int, max_tokens: int) -> tuple[int, list[int]]:
        """The size of the longest match, and the tokens after it."""
        if max_tokens < 1:
            return 0, []
        prefix = context.tokens[row, : int(context.lengths[row])]
        if context.prompt_mask is not None:
            prefix = prefix[int((context.prompt_mask[row] == 0).sum()) :]
        index = self._indexes.setdefault(row, SuffixIndex(self.largest, self.smallest))
        index.follow(prefix)
        found = index.match()
        if found is None:
            return 0, []
        size, start = found
        return size, self._usable(index.tokens(start, max_tokens))

    def _usable(self, drafted: list[int]) -> list[int]:
        """The draft up to and including its first EOS, and before the first id that the target has no logit for."""
        for i, token in enumerate(drafted):
            if token < 0 or token >= self.settings.vocab_size:
                return drafted[:i]
            if token in self.settings.eos_token_ids:
                return drafted[: i + 1]
        return drafted


def offer(matched: Draft, row: int) -> tuple[str, int] | None:
    """The kind and the length of a row's match; None where there is none."""
    stretches = matched.kinds[row]
    return stretches[0] if stretches else None
