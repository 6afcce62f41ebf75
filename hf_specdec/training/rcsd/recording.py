"""One text with the rounds that wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_specdec.training.texts import Text


__all__ = ["DraftedRound", "Recording", "TopLaws"]


@dataclass(frozen=True)
class TopLaws:
    """The target's law at each drafted position, cut to its likeliest tokens.

    Args:
        tokens (`torch.IntTensor` of shape `(drafts, top)`): The likeliest tokens, best first.
        log_p (`torch.HalfTensor` of shape `(drafts, top)`): `ln p` of each, before any processor.
        tail (`torch.HalfTensor` of shape `(drafts,)`): What all other tokens have together.
    """

    tokens: Tensor
    log_p: Tensor
    tail: Tensor


@dataclass(frozen=True)
class DraftedRound:
    """One round of one text.

    Args:
        anchor (`int`): Index, in the text, of the token before the newest that was committed when the round began: the last
            one whose feature the drafter could know. Draft `j` is about token `anchor + 2 + j`.
        drafts (`tuple[int, ...]`): The drafted tokens.
        choices (`tuple[int, ...]`): What the target chooses at each, after the drafts before it: its best token there.
        num_accepted (`int`): Drafts that were accepted and kept.
        laws ([`TopLaws`], *optional*): What the target says at each draft.
    """

    anchor: int
    drafts: tuple[int, ...]
    choices: tuple[int, ...]
    num_accepted: int
    laws: TopLaws | None = None


@dataclass(frozen=True)
class Recording:
    """A text and its rounds.

    Args:
        text ([`Text`]): The text.
        rounds (`tuple[DraftedRound, ...]`): Its rounds that drafted something, in their order.
    """

    text: Text
    rounds: tuple[DraftedRound, ...]
