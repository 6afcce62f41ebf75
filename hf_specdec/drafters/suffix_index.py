"""Where the last tokens of a growing text occurred before, without reading the text again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


__all__ = ["SuffixIndex"]

_FIRST_CAPACITY = 256


@final
class SuffixIndex:
    """The end of the most recent occurrence of every n-gram of a text.

    Each token that is appended costs one entry per n-gram size, and the search one dictionary access per size, whatever the
    length of the text. What the tokens are is still compared each time, in one pass over raw memory, so that any text may
    follow any other: what no longer holds is undone token by token.

    Args:
        largest, smallest (`int`): Longest and shortest n-gram, in tokens.
    """

    def __init__(self, largest: int, smallest: int) -> None:
        self.sizes = range(largest, smallest - 1, -1)
        self._buffer = torch.empty(_FIRST_CAPACITY, dtype=torch.long)
        self._tokens: list[int] = []
        self._num_indexed = 0  # n-grams that end within so many leading tokens are known
        self._ends: dict[tuple[int, ...], int] = {}
        self._replaced: list[
            list[tuple[tuple[int, ...], int | None]]
        ] = []  # by end: what its entries took the place of

    def follow(self, text: Tensor) -> None:
        """Makes `text` (`(length,)`, on the CPU) the indexed text; its last token stays open, for `match` looks for it."""
        kept = self._common_prefix(text)
        del self._tokens[kept:]
        while self._num_indexed > max(0, min(kept, len(text) - 1)):
            self._undo()
        self._append(text[kept:])
        while self._num_indexed < len(text) - 1:
            self._index()

    def match(self) -> tuple[int, int] | None:
        """The size of the text's longest suffix that occurred before, and the place after its most recent occurrence."""
        for size in self.sizes:
            if size < len(self._tokens):
                end = self._ends.get(tuple(self._tokens[-size:]))
                if end is not None:
                    return size, end
        return None

    def tokens(self, start: int, count: int) -> list[int]:
        """At most `count` tokens of the text from `start` on."""
        return self._tokens[start : start + count]

    def _common_prefix(self, text: Tensor) -> int:
        width = min(len(self._tokens), len(text))
        known, given = self._buffer[:width], text[:width]
        return width if torch.equal(known, given) else int((known == given).long().cumprod(0).sum())

    def _append(self, new_tokens: Tensor) -> None:
        start, length = len(self._tokens), len(self._tokens) + len(new_tokens)
        if length > len(self._buffer):
            self._buffer = torch.cat([self._buffer[:start], torch.empty(2 * length - start, dtype=torch.long)])
        self._buffer[start:length] = new_tokens
        self._tokens += new_tokens.tolist()

    def _index(self) -> None:
        end = self._num_indexed + 1
        replaced = []
        for size in self.sizes:
            if size <= end:
                ngram = tuple(self._tokens[end - size : end])
                replaced.append((ngram, self._ends.get(ngram)))
                self._ends[ngram] = end
        self._replaced.append(replaced)
        self._num_indexed = end

    def _undo(self) -> None:
        for ngram, end in self._replaced.pop():
            if end is None:
                del self._ends[ngram]
            else:
                self._ends[ngram] = end
        self._num_indexed -= 1
