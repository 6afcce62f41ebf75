"""How often drafts of one kind were accepted, position by position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


__all__ = ["TrackRecord"]

_PRIOR_WEIGHT = 2.5  # of the prior, in observations
_LEAN = 4.0  # observations at which a position's own estimate counts as much as that of the position before it
_LONGEST_PAUSE = 512
_FADING = 0.3  # of the speed at which observations give way to newer ones, where there are none


@dataclass
class TrackRecord:
    """Decaying counts of accepted and verified drafts at each position, and when this kind may be tried again.

    Args:
        prior (`float`): Acceptance that is assumed at first.
        longest (`int`): Positions that are tracked.
        memory (`float`): Weight that an observation keeps for each newer one of its position.
        pause (`int`): Rounds that the kind rests when it turns out not to pay; doubled each time.
    """

    prior: float
    longest: int
    memory: float
    pause: int
    resume_at: int | None = None
    _accepted: list[float] = field(init=False)
    _verified: list[float] = field(init=False)
    _first_pause: int = field(init=False)

    def __post_init__(self) -> None:
        self._accepted = [self.prior * _PRIOR_WEIGHT] * self.longest
        self._verified = [_PRIOR_WEIGHT] * self.longest
        self._first_pause = self.pause

    def observe(self, num_verified: int, num_accepted: int, weight: float = 1.0) -> None:
        """Learns from one stretch of drafts: `num_verified` were judged, the first `num_accepted` of them accepted.

        It counts as `weight` observations. What was seen of positions that were not judged fades too, so that it cannot keep
        drafts short for ever.
        """
        kept = self.memory**weight
        faded = kept**_FADING
        for position in range(self.longest):
            judged = position < num_verified
            keep, right = kept if judged else faded, judged and position < num_accepted
            self._verified[position] = self._verified[position] * keep + weight * judged
            self._accepted[position] = self._accepted[position] * keep + weight * right

    def rates(self, optimism: float = 0.0) -> tuple[float, ...]:
        """Estimates by position, raised by `optimism` standard errors; one that was hardly ever reached leans on the
        position before it."""
        rates: list[float] = []
        for accepted, verified in zip(self._accepted, self._verified, strict=True):
            own = accepted / verified
            own = min(1.0, own + optimism * math.sqrt(max(own * (1 - own), 0.01) / verified))
            trust = verified / (verified + _LEAN)
            rates.append(own if not rates else trust * own + (1 - trust) * rates[-1])
        return tuple(rates)

    def rests(self, round_number: int) -> bool:
        """Whether this kind sits out the round."""
        return self.resume_at is not None and round_number < self.resume_at

    def rest(self, round_number: int) -> None:
        """Sits out some rounds, twice as many as the last time."""
        self.resume_at = round_number + self.pause
        self.pause = min(self.pause * 2, _LONGEST_PAUSE)

    def wake(self, round_number: int) -> None:
        """Ends a rest before its time, for a trial."""
        if self.resume_at is not None:
            self.resume_at = min(self.resume_at, round_number)

    def work(self) -> None:
        """Pays again."""
        self.resume_at, self.pause = None, self._first_pause
