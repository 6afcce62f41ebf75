"""Tokens as text while they arrive: whole characters only, and each piece knows whether it was drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_specdec.records import Round


__all__ = ["Piece", "TextPieces", "merged"]

# Tokens of the prompt that are decoded along with the first new one: some tokenizers write a word differently at the start.
_CONTEXT_TOKENS = 6
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """A piece of new text.

    Args:
        text (`str`): Whole characters.
        accepted (`bool`): Whether the token that completed it was an accepted draft, and not the target's own.
    """

    text: str
    accepted: bool


class TextPieces:
    """Decodes a growing sequence of tokens.

    A character may take several tokens; it is held back until it is whole. So the pieces joined are the decoded text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        prompt (sequence of `int`): The tokens before the first new one.
        skip_special_tokens (`bool`): Whether tokens such as EOS are left out.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._tokens = list(prompt)[-_CONTEXT_TOKENS:]
        self._start = 0  # of the tokens decoded together
        self._shown = len(self._tokens)
        self._accepted = False

    def push(self, tokens: Iterable[int], num_accepted: int = 0) -> list[Piece]:
        """What the next tokens complete, of which the first `num_accepted` are accepted drafts."""
        pieces = []
        for index, token in enumerate(tokens):
            self._accepted = index < num_accepted
            self._tokens.append(int(token))
            before, now = self._decode(self._start, self._shown), self._decode(self._start, len(self._tokens))
            if len(now) > len(before) and not now.endswith(_INCOMPLETE):
                pieces.append(Piece(now[len(before) :], self._accepted))
                self._start, self._shown = self._shown, len(self._tokens)
        return merged(pieces)

    def push_round(self, round_: Round, row: int = 0) -> list[Piece]:
        """What one round of the loop adds to a row."""
        return self.push(round_.emitted[row], int(round_.num_accepted[row]))

    def end(self) -> list[Piece]:
        """What is left when no token follows: the pieces of a character that was never completed."""
        before, now = self._decode(self._start, self._shown), self._decode(self._start, len(self._tokens))
        self._start = self._shown = len(self._tokens)
        return [Piece(now[len(before) :], self._accepted)] if len(now) > len(before) else []

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(
            self._tokens[start:end],
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same text in as few pieces as possible."""
    groups = groupby(pieces, key=lambda piece: piece.accepted)
    return [Piece("".join(piece.text for piece in group), accepted) for accepted, group in groups]
