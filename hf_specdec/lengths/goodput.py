"""The length that yields the most tokens per second, from what acceptance and cost turn out to be."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths.costs import CostTable
from hf_specdec.records import Budget, Round


__all__ = ["GoodputLength", "expected_tokens"]

_COSTLY = ("model", "self")  # sources that draft by running a model
_WINDOW = 9  # measurements whose median counts
_WARM_UP = (2, 0)  # first lengths, so that the costs of plain and of verifying passes are known early


def expected_tokens(acceptance: list[float], length: int) -> float:
    """`1 + a_1 + a_1 a_2 + ...`: tokens that a draft of `length` yields, its correction or bonus included.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1, with an acceptance `a_i` for each position.
    """
    total, reached = 1.0, 1.0
    for position in range(length):
        reached *= acceptance[position]
        total += reached
    return total


@final
@dataclass(frozen=True)
class GoodputLength:
    """Maximises expected tokens per second, and stops drafting where no draft pays.

    Each round it takes the length `g` with the largest `E[tokens](g) / (g * draft step + target pass(g + 1))`. Acceptance
    is tracked per position and drafter, costs are medians of what this run measured. Where plain decoding wins, it decodes
    plainly and probes again after 16 rounds, then 32, 64, and so on.

    What is measured depends on the clock. Where the length must not (a seed should reproduce a sampled text), pass `costs`.

    Args:
        longest (`int`): Longest draft.
        costs ([`CostTable`], *optional*): Frozen costs; nothing is measured then, and the lengths are a function of the
            texts alone.
        prior (`float`): Acceptance that is assumed at first.
        memory (`float`): Weight that an observation keeps for each newer one of its kind.
        first_pause (`int`): Plain rounds before the first new probe.
        patience (`float`): Standard errors by which the acceptance may be better than it looks before drafting stops.
    """

    longest: int = 10
    costs: CostTable | None = None
    prior: float = 0.7
    memory: float = 0.97
    first_pause: int = 16
    patience: float = 0.8

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise InvalidConfigError(f"longest must be at least 1, got {self.longest}")
        if not 0.0 < self.prior < 1.0 or not 0.0 < self.memory <= 1.0:
            raise InvalidConfigError(f"prior and memory must lie in (0, 1), got {self.prior} and {self.memory}")
        if self.first_pause < 1:
            raise InvalidConfigError(f"first_pause must be at least 1, got {self.first_pause}")

    def start(self, batch_size: int) -> GoodputSchedule:
        """The schedule of one `generate` call with `batch_size` rows."""
        return GoodputSchedule(self, batch_size)


@dataclass
class _Acceptance:
    """Decaying counts of accepted and verified drafts at each position."""

    controller: GoodputLength
    accepted: list[float] = field(init=False)
    verified: list[float] = field(init=False)

    def __post_init__(self) -> None:
        weight = 1.5  # of the prior, in observations
        self.accepted = [self.controller.prior * weight] * self.controller.longest
        self.verified = [weight] * self.controller.longest

    def observe(self, num_verified: Tensor, num_accepted: Tensor) -> None:
        for position in range(min(int(num_verified.max()), self.controller.longest)):
            tried = int((num_verified > position).sum())
            kept = self.controller.memory**tried
            self.verified[position] = self.verified[position] * kept + tried
            self.accepted[position] = self.accepted[position] * kept + int((num_accepted > position).sum())

    def rates(self, optimism: float = 0.0) -> list[float]:
        """Estimates by position, raised by `optimism` standard errors; one that was hardly ever reached leans on the
        position before it."""
        rates: list[float] = []
        for accepted, verified in zip(self.accepted, self.verified, strict=True):
            own = accepted / verified
            own = min(1.0, own + optimism * math.sqrt(max(own * (1 - own), 0.01) / verified))
            trust = verified / (verified + 4.0)
            rates.append(own if not rates else trust * own + (1 - trust) * rates[-1])
        return rates


@final
class GoodputSchedule:
    """What one run has learnt about acceptance and cost."""

    def __init__(self, controller: GoodputLength, batch_size: int) -> None:
        self.controller = controller
        self.batch_size = batch_size
        self.num_rounds = 0
        self._acceptance: defaultdict[str, _Acceptance] = defaultdict(lambda: _Acceptance(controller))
        self._passes: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._draft_steps: deque[float] = deque(maxlen=_WINDOW)
        self._pause = controller.first_pause
        self._resume_at: int | None = None
        self._source = "model"

    def next_budget(self) -> Budget:
        return Budget(torch.full((self.batch_size,), self._next_length()))

    def _next_length(self) -> int:
        if self.controller.costs is None and self.num_rounds < len(_WARM_UP):
            return min(_WARM_UP[self.num_rounds], self.controller.longest)
        if self._resume_at is not None:
            if self.num_rounds < self._resume_at:
                return 0
            return max(1, self.best_length(self._source, at_least=1))
        best = self.best_length(self._source)
        if best > 0:
            return best
        if self.best_length(self._source, optimism=self.controller.patience) > 0:
            return 1  # too few drafts were judged to be sure that none pays
        self._resume_at = self.num_rounds + self._pause
        self._pause = min(self._pause * 2, 512)
        return 0

    def best_length(self, source: str, at_least: int = 0, optimism: float = 0.0) -> int:
        """The length with the largest expected tokens per second."""
        rates, costs = self._acceptance[source].rates(optimism), self.costs()
        step = costs.draft_step if source in _COSTLY else 0.0
        goodput = {
            length: expected_tokens(rates, length) / (length * step + costs.pass_seconds(length + 1))
            for length in range(at_least, self.controller.longest + 1)
        }
        return max(goodput, key=lambda length: (goodput[length], -length))

    def costs(self) -> CostTable:
        """Frozen costs, or the medians so far."""
        if self.controller.costs is not None:
            return self.controller.costs
        passes = tuple((width, statistics.median(self._passes[width])) for width in sorted(self._passes))
        return CostTable(statistics.median(self._draft_steps) if self._draft_steps else 0.0, passes)

    def observe(self, round_: Round) -> None:
        self.num_rounds += 1
        attempted, judged = round_.num_drafted, round_.num_verified
        if round_.num_attempted is not None:  # where the drafter found nothing worth proposing, drafting did not pay
            attempted, judged = round_.num_attempted, round_.num_attempted.minimum(round_.num_accepted + 1)
        width, num_drafted = int(attempted.max()), int(round_.num_drafted.max())
        self._passes[width + 1].append(round_.verify_seconds)
        if width == 0:
            return
        self._source = round_.source
        if round_.source in _COSTLY and num_drafted > 0:
            self._draft_steps.append(round_.draft_seconds / num_drafted)
        self._acceptance[round_.source].observe(judged, round_.num_accepted)
        if self._resume_at is not None and self.best_length(round_.source) > 0:
            self._resume_at, self._pause = None, self.controller.first_pause
        elif self._resume_at is not None and self.num_rounds > self._resume_at:
            self._resume_at = self.num_rounds + self._pause
            self._pause = min(self._pause * 2, 512)
