"""Prompt lookup: the continuation of an earlier occurrence of the last tokens (Saxena 2023, "prompt lookup decoding")."""

from __future__ import annotations

from typing import final

import torch

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.suffix_index import SuffixIndex
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Budget, Context, Draft


__all__ = ["PromptLookupDrafter"]


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
        found = [
            self._lookup(context, row, int(budget.max_tokens[row])) if bool(context.unfinished[row]) else []
            for row in range(context.batch_size)
        ]
        width = max(map(len, found), default=0)
        if width == 0:
            return Draft.empty(context.batch_size)
        tokens = torch.tensor([drafted + [0] * (width - len(drafted)) for drafted in found])
        return Draft(tokens, torch.tensor([len(drafted) for drafted in found]), source="ngram")

    def _lookup(self, context: Context, row: int, max_tokens: int) -> list[int]:
        if max_tokens < 1:
            return []
        prefix = context.tokens[row, : int(context.lengths[row])]
        if context.prompt_mask is not None:
            prefix = prefix[int((context.prompt_mask[row] == 0).sum()) :]
        index = self._indexes.setdefault(row, SuffixIndex(self.largest, self.smallest))
        index.follow(prefix)
        start = index.match()
        return [] if start is None else self._usable(index.tokens(start, max_tokens))

    def _usable(self, drafted: list[int]) -> list[int]:
        """The draft up to and including its first EOS, and before the first id that the target has no logit for."""
        for i, token in enumerate(drafted):
            if token < 0 or token >= self.settings.vocab_size:
                return drafted[:i]
            if token in self.settings.eos_token_ids:
                return drafted[: i + 1]
        return drafted
