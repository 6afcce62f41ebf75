"""What drafts of each kind would bring in the coming round, and what they would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from hf_specdec.lengths.costs import CostTable
from hf_specdec.records import Plan


__all__ = ["GoodputForecast", "expected_tokens", "is_free"]

_SUREST = 0.95  # no survival bound asks for more


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """`1 + a_1 + a_1 a_2 + ...`: tokens that a draft of `length` yields, its correction or bonus included.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1, with an acceptance `a_i` for each position.
    """
    total, reached = 1.0, 1.0
    for position in range(length):
        reached *= acceptance[position]
        total += reached
    return total


def is_free(kind: str) -> bool:
    """Whether drafts of this kind need no forward pass."""
    return kind.startswith("ngram")


@final
@dataclass(frozen=True)
class GoodputForecast:
    """Chooses drafts by what they are expected to bring per second (ours).

    A text has to be covered, token by token, so time is worth what the model drafter, or plain decoding, would make of it:
    a draft is worth `E[tokens] - value_of_time * seconds`. With one drafter this is the same as the largest ratio.

    Args:
        costs ([`CostTable`]): Seconds of draft steps and target passes.
        rates (`Mapping[str, tuple[float, ...]]`): Acceptance by position of each kind that may draft now. Only kinds that are
            drafted or offered are looked up.
        kind (`str`): The kind that the model drafts, or any drafter without alternatives.
        longest (`int`): Longest draft.
        on_trial (`bool`): Whether the model drafts one token whatever is expected of it: what made it rest may have been a
            slow moment.
        own_pace (`tuple[float, float]`, *optional*): Expected tokens and seconds of a round in which the model drafts as far as
            it decides itself. It is then asked for the longest draft or for none.
    """

    costs: CostTable
    rates: Mapping[str, tuple[float, ...]]
    kind: str
    longest: int
    on_trial: bool = False
    own_pace: tuple[float, float] | None = None

    @cached_property
    def _expected(self) -> dict[str, tuple[float, ...]]:
        return {}

    def expected(self, kind: str) -> tuple[float, ...]:
        """Expected tokens of a kind (`str`) by length, from 0 up to the longest."""
        if kind not in self._expected:
            totals, reached = [1.0], 1.0
            for rate in self.rates[kind][: self.longest]:
                reached *= rate
                totals.append(totals[-1] + reached)
            self._expected[kind] = tuple(totals)
        return self._expected[kind]

    def seconds(self, length: int, steps: int) -> float:
        """Seconds of a round that verifies `length` drafts, for which the model made `steps` steps."""
        if steps and self.own_pace is not None:
            return self.own_pace[1]
        return steps * self.costs.draft_step + self.costs.pass_seconds(length + 1)

    @cached_property
    def length(self) -> int:
        """The length with the largest expected tokens per second for a drafter without alternatives."""
        if self.kind not in self.rates:
            return 0
        if self.on_trial and not is_free(self.kind):
            return 1
        if self.own_pace is not None:
            return self.longest
        expected = self.expected(self.kind)
        goodput = [expected[n] / self.seconds(n, 0 if is_free(self.kind) else n) for n in range(self.longest + 1)]
        return max(range(self.longest + 1), key=lambda n: (goodput[n], -n))

    @cached_property
    def value_of_time(self) -> float:
        """Tokens per second and row that the model drafter or plain decoding makes, whichever is more."""
        if self.kind not in self.rates:
            return self.plain_speed
        return max(self.plain_speed, self._by_model(self.length) / self.seconds(self.length, self.length))

    @property
    def plain_speed(self) -> float:
        """Tokens per second and row of plain decoding."""
        return 1.0 / self.seconds(0, 0)

    @cached_property
    def min_survival(self) -> float:
        """Chance of the draft so far below which another draft step is not expected to pay for itself."""
        if self.length == 0 or self.own_pace is not None:
            return 0.0
        step = self.seconds(self.length, 1) - self.costs.pass_seconds(self.length)
        return min(_SUREST, self.value_of_time * step / max(self.rates[self.kind][0], 0.05))

    def plan(
        self, offers: Sequence[tuple[str, int] | None], *, with_model: bool, weights: Sequence[float] | None = None
    ) -> Plan:
        with_model = with_model and self.kind in self.rates
        if with_model and self.on_trial:
            return Plan([0] * len(offers), [1] * len(offers))
        worth = self.value_of_time if with_model else self.plain_speed
        best = ([0] * len(offers), [0] * len(offers))
        weights = [1.0] * len(offers) if weights is None else weights
        best_value = sum(weights) - len(offers) * worth * self.seconds(0, 0)
        for use_model in (False, True)[: 1 + with_model]:
            for cap in range(self._shortest if use_model else 1, self.longest + 1):
                found, modelled, tokens = self._shares(offers, weights, cap, use_model)
                seconds = self.seconds(max(found + modelled), max(modelled))
                value = tokens - len(offers) * worth * seconds
                if value > best_value:
                    best, best_value = (found, modelled), value
        return Plan(*best)

    @property
    def _shortest(self) -> int:
        """Of the drafts that the model may be asked for."""
        return 1 if self.own_pace is None else self.longest

    def _by_model(self, length: int) -> float:
        """Expected tokens of a round that the model drafts `length` tokens in."""
        if length and self.own_pace is not None:
            return self.own_pace[0]
        return self.expected(self.kind)[length]

    def _shares(
        self, offers: Sequence[tuple[str, int] | None], weights: Sequence[float], cap: int, use_model: bool
    ) -> tuple[list[int], list[int], float]:
        """What each row drafts, from its match and by the model, when none drafts more than `cap`; and the tokens expected, by
        their weight."""
        found, modelled, tokens = [0] * len(offers), [0] * len(offers), 0.0
        by_model = self._by_model(cap) if use_model else 1.0
        for row, offer in enumerate(offers):
            kind, offered = offer if offer is not None and offer[0] in self.rates else ("", 0)
            by_match = self.expected(kind)[min(cap, offered)] if offered else 1.0
            if offered and by_match >= by_model:
                found[row] = min(cap, offered)
            elif use_model:
                modelled[row] = cap
            tokens += weights[row] * max(by_match, by_model)
        return found, modelled, tokens

    def extensions(
        self, offers: Sequence[tuple[str, int, int] | None], width: int, weights: Sequence[float] | None = None
    ) -> list[int]:
        weighed = [1.0] * len(offers) if weights is None else weights
        caps = range(width, max(width, self.longest) + 1)
        return self._extended(offers, max(caps, key=lambda cap: (self._worth(offers, weighed, width, cap), -cap)))

    def _worth(
        self, offers: Sequence[tuple[str, int, int] | None], weights: Sequence[float], width: int, cap: int
    ) -> float:
        """Tokens that extensions up to a width of `cap` are expected to bring, less what their seconds are worth."""
        gain = 0.0
        for offer, weight, length in zip(offers, weights, self._extended(offers, cap), strict=True):
            if offer is not None and length:
                kind, _, drafted = offer
                ours = self.expected(self.kind)
                reached = ours[drafted] - ours[drafted - 1]
                gain += weight * reached * (self.expected(kind)[length] - 1.0)
        more = self.costs.pass_seconds(cap + 1) - self.costs.pass_seconds(width + 1)
        return gain - len(offers) * self.value_of_time * more

    def _extended(self, offers: Sequence[tuple[str, int, int] | None], cap: int) -> list[int]:
        """How much of its match each row takes if no draft becomes wider than `cap`."""
        return [
            min(offer[1], cap - offer[2]) if offer is not None and offer[0] in self.rates else 0 for offer in offers
        ]
