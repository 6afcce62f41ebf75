"""The draft that yields the most tokens per second, from what acceptance and cost turn out to be."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths.costs import CostTable
from hf_specdec.lengths.forecast import GoodputForecast, is_free
from hf_specdec.lengths.measured import MeasuredCosts
from hf_specdec.lengths.own_pace import OwnPace
from hf_specdec.lengths.row_weights import row_weights
from hf_specdec.lengths.track_record import TrackRecord
from hf_specdec.records import Budget, Round


__all__ = ["GoodputLength"]

_SECOND = 3  # rounds before the second plain step: the first may be slow for reasons of its own
_VAST = 3.0  # advantage over plain decoding from which that is not worth a round
_PLAIN = 3  # plain steps to measure where drafting gains little
_SPACING = 8  # rounds between these
_SLIGHT = 1.1  # advantage up to which plain steps are measured until their median is sound
_TRIAL = 1.5  # plain steps that the pass over a free draft on trial may cost
_FAMILIAR = 0.7  # share of a match's doubt that each further token of it leaves
_CERTAIN = 1.0
_NEWEST = 2  # tokens that a drafter reads in a round after one that it drafted in
_LATEST = 8  # tokens that a drafter may read first in a round that shows its own pace
_CHECK = 0.25  # of a draft step: what looking for a token is taken to cost that was not found, where costs are frozen


@final
@dataclass(frozen=True)
class GoodputLength:
    """Maximises expected tokens per second, and stops drafting where no draft pays.

    Each round it takes the length `g` with the largest `E[tokens](g) / (g * draft step + target pass(g + 1))`, and a draft
    ends early where its own probability says that another step is not worth its seconds. Acceptance is tracked per position
    and kind of draft (n-gram matches by the length of the match), costs are medians of what this run measured. The hybrid
    drafter chooses between match and model by the same figures. A kind that does not pay rests for 16 rounds, then 32, 64,
    and so on, with a short trial in between.

    A drafter that decides itself how far it goes, as self-drafting does, is asked for the longest draft or for none: tokens and
    seconds of its whole rounds are compared with plain steps.

    What is measured depends on the clock. Where the length must not, because it changes a text that a seed or threshold should
    reproduce, `costs` are asked for: without them this controller is refused for sampling and for rules that are not exact.

    Args:
        longest (`int`): Longest draft.
        costs ([`CostTable`], *optional*): Frozen costs; nothing is measured then, and the lengths are a function of the
            texts alone.
        prior (`float`): Acceptance that is assumed of a drafter at first.
        memory (`float`): Weight that an observation keeps for each newer one of its kind.
        first_pause (`int`): Rounds for which a kind that does not pay rests the first time.
        patience (`float`): Standard errors by which the acceptance may be better than it looks before drafting stops.
    """

    longest: int = 16
    costs: CostTable | None = None
    prior: float = 0.8
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

    def prior_of(self, kind: str) -> float:
        """Acceptance assumed of a kind nobody has seen; a longer match deserves more trust."""
        if not is_free(kind):
            return self.prior
        return 1.0 - _FAMILIAR ** int(kind.rpartition("-")[2])


@final
class _Rates(Mapping[str, tuple[float, ...]]):
    """Acceptance by position of the kinds that may draft, worked out where it is asked for: a round is offered few of them."""

    def __init__(self, find: Callable[[str], tuple[float, ...] | None]) -> None:
        self._find = find
        self._found: dict[str, tuple[float, ...] | None] = {}

    def __getitem__(self, kind: str) -> tuple[float, ...]:
        if kind not in self._found:
            self._found[kind] = self._find(kind)
        if (rates := self._found[kind]) is None:
            raise KeyError(kind)
        return rates

    def __iter__(self) -> Iterator[str]:
        return (kind for kind, rates in self._found.items() if rates is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@final
class GoodputSchedule:
    """What one run has learnt about acceptance and cost."""

    def __init__(self, controller: GoodputLength, batch_size: int) -> None:
        self.controller = controller
        self.batch_size = batch_size
        self.num_rounds = 0
        self._records: dict[str, TrackRecord] = {}
        self._measured = MeasuredCosts(controller.longest)
        self._num_rows = batch_size  # of the latest pass
        self._judged_rows = batch_size  # when all kinds were last given a trial
        self._num_tokens = torch.zeros(batch_size, dtype=torch.long)
        self._unfinished = torch.ones(batch_size, dtype=torch.bool)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_SPACING)  # tokens per row, and seconds, of rounds
        self._kind = "model"
        self._table: CostTable | None = None  # of what was measured so far
        self._pace: OwnPace | None = None  # of a drafter that decides itself how far it goes

    def next_budget(self) -> Budget:
        forecast = self.forecast() if self.controller.costs is not None or self.num_rounds > 0 else None
        if forecast is None or self._measures_plain(forecast):
            return Budget(torch.zeros(self.batch_size, dtype=torch.long))
        ceiling = torch.full((self.batch_size,), self.controller.longest)
        return Budget(
            ceiling.clamp(max=forecast.length),
            min_survival=forecast.min_survival,
            ceiling=ceiling,
            forecast=forecast,
            weights=None if self.batch_size == 1 else self._weights(),
        )

    def forecast(self) -> GoodputForecast:
        """What is known now."""
        costs = self.costs()
        rates = _Rates(lambda kind: self._rates(kind, costs))
        record = self._record(self._kind)
        on_trial = record.resume_at is not None and not record.rests(self.num_rounds)
        pace = self._pace and (self._pace.tokens(self.controller.patience), self._pace.seconds)
        return GoodputForecast(costs, rates, self._kind, self.controller.longest, on_trial, pace)

    def costs(self) -> CostTable:
        """Frozen costs, or the medians so far."""
        if self.controller.costs is not None:
            return self.controller.costs
        if self._table is None:
            self._table = self._measured.table(self._num_rows)
        return self._table

    def known_costs(self) -> CostTable | None:
        if self.controller.costs is not None or self.num_rounds == 0:
            return self.controller.costs
        return self._measured.table(self.batch_size)

    def observe(self, round_: Round) -> None:
        self.num_rounds += 1
        self._num_rows = self.batch_size if round_.num_rows is None else round_.num_rows
        paces_itself = round_.num_attempted is not None and bool((round_.num_attempted > 0).any())
        if not paces_itself:
            self._measured.add_pass(self._num_rows, int(round_.num_drafted.max()) + 1, round_.verify_seconds)
        weights, emitted = self._weights(), torch.tensor([len(row) for row in round_.emitted])
        seconds = round_.draft_seconds + round_.verify_seconds
        self._recent.append((float((weights * emitted).sum() / weights.sum().clamp(min=1)), seconds))
        self._num_tokens, self._unfinished = self._num_tokens + emitted, round_.unfinished.cpu()
        lengths = self._learn(round_, weights.tolist())
        steps = max((length for kind, length in lengths.items() if not is_free(kind)), default=0)
        # What others drafted since must be read once, whatever is drafted then: no step costs that.
        if steps and (round_.num_read <= _NEWEST or not self._measured.knows_steps):
            self._measured.add_steps(self._num_rows, steps, round_.draft_seconds)
        self._table = None
        costs = self.costs()
        self._kind = next((kind for kind in sorted(lengths) if not is_free(kind)), self._kind)
        # What others wrote must be read once, which takes long after a rest and says nothing of the rounds to come.
        shows_pace = paces_itself and round_.num_read <= _LATEST
        if shows_pace:
            self._learn_pace(round_, weights, costs)
        judged = {*lengths}
        if paces_itself:
            judged.discard(self._kind)
        if shows_pace:
            judged.add(self._kind)
        for kind in sorted(judged):
            self._judge(kind, costs)
        if self._num_rows <= self._judged_rows // 2:
            # What did not pay for many rows may pay for few.
            self._judged_rows = self._num_rows
            for record in self._records.values():
                record.wake(self.num_rounds)
            self._pace = self._pace and self._new_pace(self.costs())

    def _new_pace(self, costs: CostTable) -> OwnPace:
        return OwnPace(costs.pass_seconds(1), self.controller.memory)

    def _learn_pace(self, round_: Round, weights: Tensor, costs: CostTable) -> None:
        """Notes a round of a drafter that decides itself how far it goes, without what n-gram matches brought to it."""
        assert round_.num_attempted is not None
        self._pace = self._pace or self._new_pace(costs)
        own = torch.tensor([sum(n for kind, n in row if not is_free(kind)) for row in round_.kinds])
        accepted = torch.minimum(own, round_.num_accepted.cpu())
        asked = weights * (round_.num_attempted > 0)
        tokens = 1.0 + float((asked * accepted).sum() / asked.sum())
        seconds = round_.draft_seconds + round_.verify_seconds
        if self.controller.costs is not None:
            checks = float((round_.num_attempted > own).any())
            width = int(own.max())
            seconds = (width + checks * _CHECK) * costs.draft_step + costs.pass_seconds(width + 1)
        self._pace.observe(tokens, seconds)

    def _weights(self) -> Tensor:
        """`(batch,)`, what tokens of each row are worth; all of them where nobody has finished yet or everybody has."""
        if self.batch_size == 1 or not bool(self._unfinished.any()):
            return torch.ones(self.batch_size)
        return row_weights(self._num_tokens, self._unfinished)

    def _learn(self, round_: Round, weights: Sequence[float]) -> dict[str, int]:
        """Counts what became of each row's drafts; returns the longest draft of each kind.

        What rows do at the same time is alike: `n` drafts of one kind count as the square root of `n`, those of rows that are
        behind for more.
        """
        longest: dict[str, int] = {}
        alike = Counter(kind for stretches in round_.kinds for kind in {kind for kind, _ in stretches})
        for row, stretches in enumerate(round_.kinds):
            verified, accepted = int(round_.num_verified[row]), int(round_.num_accepted[row])
            if not stretches and round_.num_attempted is not None and int(round_.num_attempted[row]) > 0:
                # It was asked and found nothing worth proposing.
                stretches = [(self._kind if round_.source == "hybrid" else round_.source, 0)]
            for kind, length in stretches:
                weight = weights[row] / max(alike[kind], 1) ** 0.5
                self._record(kind).observe(min(verified, length), min(accepted, length), weight)
                verified, accepted = max(0, verified - length), max(0, accepted - length)
                longest[kind] = max(longest.get(kind, 0), length)
        return longest

    def _measures_plain(self, forecast: GoodputForecast) -> bool:
        """Whether the round should show once more what a plain step costs."""
        count = self._measured.num_plain(self._num_rows)
        if self.controller.costs is not None or not 0 < count < self._measured.enough:
            return False
        if count == 1:
            return self.num_rounds >= _SECOND and forecast.value_of_time < _VAST * forecast.plain_speed
        if self.num_rounds < count * _SPACING:
            return False
        if count < _PLAIN:
            return forecast.value_of_time < _SLIGHT * forecast.plain_speed
        tokens, seconds = (sum(each) for each in zip(*self._recent, strict=True))
        return tokens < _SLIGHT * forecast.plain_speed * seconds

    def _record(self, kind: str) -> TrackRecord:
        if kind not in self._records:
            options = self.controller
            self._records[kind] = TrackRecord(
                options.prior_of(kind), options.longest, options.memory, options.first_pause
            )
        return self._records[kind]

    def _rates(self, kind: str, costs: CostTable) -> tuple[float, ...] | None:
        """Acceptance by position; None while the kind rests, and the best that can be hoped for when it is on trial."""
        record = self._record(kind)
        if record.rests(self.num_rounds):
            return None
        if self._pace_of(kind) is not None:
            return record.rates()
        if record.resume_at is not None:
            return self._trial(kind, (_CERTAIN,) * self.controller.longest, costs)
        rates = record.rates()
        # Too few drafts may have been judged to be sure that none pays.
        if self._pays(kind, rates, costs):
            return rates
        return self._trial(kind, record.rates(self.controller.patience), costs)

    def _trial(self, kind: str, rates: tuple[float, ...], costs: CostTable) -> tuple[float, ...]:
        """Free drafts are tried as far as a pass over them is cheap, those of a model with a single token."""
        length, most = 1, _TRIAL * costs.pass_seconds(1)
        while is_free(kind) and length < self.controller.longest and costs.pass_seconds(length + 2) <= most:
            length += 1
        return rates[:length] + (0.0,) * (self.controller.longest - length)

    def _judge(self, kind: str, costs: CostTable) -> None:
        """Lets a kind rest that does not pay, even if its acceptance were somewhat better than it looks."""
        record = self._record(kind)
        if self._pays(kind, record.rates(), costs):
            record.work()
        elif record.resume_at is not None or not self._pays(kind, record.rates(self.controller.patience), costs):
            record.rest(self.num_rounds)

    def _pace_of(self, kind: str) -> OwnPace | None:
        return self._pace if kind == self._kind else None

    def _pays(self, kind: str, rates: tuple[float, ...], costs: CostTable) -> bool:
        if (pace := self._pace_of(kind)) is not None:
            return pace.tokens(self.controller.patience) * costs.pass_seconds(1) > pace.seconds
        return GoodputForecast(costs, {kind: rates}, kind, self.controller.longest).length > 0
