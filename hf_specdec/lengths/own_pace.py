"""What rounds bring and take in which the drafter itself decides where its draft ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final


__all__ = ["OwnPace"]

_PRIOR_ROUNDS, _PRIOR_TOKENS, _PRIOR_SQUARE = 2.0, 1.5, 2.5  # what is assumed at first: tokens 1.5 +- 0.5
_PRIOR_SECONDS = 1.1  # plain steps that such a round is taken to last
_ENOUGH = 24.0  # rounds after which the mean is believed
_STRAY = 2.0  # times the mean: a round that lasts longer was disturbed


@final
@dataclass
class OwnPace:
    """Decaying means of tokens and seconds of whole rounds (ours).

    A drafter that stops where it is unsure makes rounds of very different lengths and costs. A table of costs by length would
    charge each length for steps that are mostly not taken, so whole rounds are compared with plain steps.

    Args:
        plain (`float`): Seconds of a plain step, from which the first guess is made.
        memory (`float`): Weight that a round keeps for each newer one.
    """

    plain: float
    memory: float
    _rounds: float = field(default=_PRIOR_ROUNDS, init=False)
    _tokens: float = field(default=_PRIOR_ROUNDS * _PRIOR_TOKENS, init=False)
    _squares: float = field(default=_PRIOR_ROUNDS * _PRIOR_SQUARE, init=False)
    _seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self._seconds = _PRIOR_ROUNDS * _PRIOR_SECONDS * self.plain

    def observe(self, tokens: float, seconds: float) -> None:
        """Learns from a round that yielded `tokens` per row, its correction or bonus included."""
        seconds = min(seconds, _STRAY * max(self.seconds, self.plain))
        self._rounds = self._rounds * self.memory + 1.0
        self._tokens = self._tokens * self.memory + tokens
        self._squares = self._squares * self.memory + tokens**2
        self._seconds = self._seconds * self.memory + seconds

    @property
    def seconds(self) -> float:
        """Mean seconds of a round."""
        return self._seconds / self._rounds

    def tokens(self, patience: float = 0.0) -> float:
        """Mean tokens of a round, raised by `patience` standard errors until enough rounds were seen."""
        mean = self._tokens / self._rounds
        if self._rounds >= _ENOUGH:
            return mean
        spread = math.sqrt(max(0.0, self._squares / self._rounds - mean**2))
        return mean + patience * spread / math.sqrt(self._rounds)
