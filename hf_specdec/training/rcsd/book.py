"""Recorded rounds by text, as tensors for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import DraftedRounds
from hf_specdec.training.rcsd.recording import DraftedRound, Recording
from hf_specdec.training.texts import Text


__all__ = ["RoundBook"]


@final
class RoundBook:
    """Looks up the rounds of the texts of a batch. A text that was recorded twice has the rounds of the later recording.

    Args:
        recordings (`Iterable[Recording]`): What was recorded.

    Raises:
        [`InvalidConfigError`]: If nothing was.
    """

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self._rounds = {recording.text: recording.rounds for recording in recordings}
        if not self._rounds:
            raise InvalidConfigError("there are no recorded rounds: decode something with a RoundRecorder first")

    @property
    def texts(self) -> list[Text]:
        """Every text, in the order of recording."""
        return list(self._rounds)

    def __call__(self, texts: Sequence[Text], num_steps: int) -> DraftedRounds:
        """The first `num_steps` drafts of each round, at the columns of their anchors.

        Raises:
            [`InvalidConfigError`]: If a text was not recorded.
        """
        if any(text not in self._rounds for text in texts):
            raise InvalidConfigError("a text has no recorded rounds: record every text of the run")
        columns = max(len(text.tokens) for text in texts)
        shape = (num_steps, len(texts), columns)
        tokens, choices = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
        drafted, accepted = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, text in enumerate(texts):
            for each in self._rounds[text]:
                count = min(num_steps, len(each.drafts))
                place = slice(0, count), row, each.anchor
                tokens[place], choices[place] = _numbers(each.drafts, count), _numbers(each.choices, count)
                drafted[place] = True
                accepted[:, row, each.anchor] = torch.arange(num_steps) < min(each.num_accepted, count)
        return DraftedRounds(list(tokens), list(choices), list(drafted), list(accepted))

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per round."""
        rounds: list[DraftedRound] = [each for rounds in self._rounds.values() for each in rounds]
        return sum(each.num_accepted for each in rounds) / max(len(rounds), 1)


def _numbers(values: Sequence[int], count: int) -> torch.Tensor:
    return torch.tensor(values[:count], dtype=torch.long)
