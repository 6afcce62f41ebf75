"""What recorded rounds would have cost in a loop that costs nothing, and what the best choice in hindsight would have saved.

Everything here is *ours*, built on the cost model of Leviathan et al. (arXiv 2211.17192, section 3.4). With `d_s` the isolated
seconds of one draft step of source `s` (0 for n-grams), `P(w)` those of a target pass over `w` tokens, and `r` the seconds per
token that plain decoding took in the same run.
`predicted_speedup` and `ceiling_speedup` are medians over prompts, with `r` of the prompt, as the speed-up is; the constant
length is judged over all prompts together:

* The *replay* of an arm sums `g * d_s + P(g + 1)` over its rounds, `g` tokens drafted in each; where a match extends a model's
  draft, only the model's tokens cost steps. `predicted_speedup` is `r * tokens / replay`.
* A *constant length* `g` in hindsight: `r * (w_0 + sum_s w_s E_s(g)) / (w_0 P(1) + sum_s w_s (g d_s + P(g + 1)))`. `w_s` is the
  share of rounds that `s` drafted for, `w_0` that of rounds without a draft, and `E_s(g) = 1 + a_1 + a_1 a_2 + ...` up to `g`
  factors (equation 1 there, with an acceptance for each position). `a_i` is the share of the drafts of `s` judged at position
  `i` that were accepted, and 0 where none was judged.
* The *ceiling* of an arm is the best that recorded acceptances give at isolated costs, without any loop: the highest
  `predicted_speedup`, and the highest of the best constant lengths, of all exact arms that draft from nothing but the
  sources of the arm, itself among them.
* The *oracle* is the fastest way through the same text for one who knows beforehand how much of each recorded draft is
  right: `f(T) = 0`, `f(t) = min(P(1) + f(t + 1), min over s, g <= m_s(t) of g d_s + P(g + 1) + f(t + g + 1))`. `m_s(t)` is the
  longest right draft of `s` that a recorded round shows after `t` tokens (one that is right for `m` tokens is right for
  `m - 1` a token later), and a model's draft may go on as an n-gram's. `oracle_speedup` is `r * T / f(0)`. It knows the
  rounds of all arms that wrote the same text, of the sources that the arm itself uses, so for a hybrid it is the best mix of
  n-gram and model drafts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_specdec.bench.costs import Costs
from hf_specdec.bench.runner import Row
from hf_specdec.lengths.forecast import expected_tokens


__all__ = ["PRICED", "best_constant", "oracle_seconds", "replay_seconds", "sources_of"]

PRICED = frozenset({"model", "ngram"})  # sources whose draft steps have a measured cost, which is none for n-grams


def step_seconds(source: str, costs: Costs) -> float:
    """`d_s`: seconds of one draft step of a source."""
    return (costs.draft_step or 0.0) if source == "model" else 0.0


def replay_seconds(rows: Iterable[Row], costs: Costs) -> float:
    """Isolated seconds of all rounds of some rows."""
    total = 0.0
    for drafted, _, _, parts in (each for row in rows for each in row.rounds):
        total += sum(length * step_seconds(source, costs) for source, length in parts) + costs.pass_seconds(drafted + 1)
    return total


def sources_of(rows: Iterable[Row]) -> set[str]:
    """What drafted in some rows."""
    return {source for row in rows for *_, parts in row.rounds for source, _ in parts}


@dataclass
class _Judged:
    """Accepted and judged drafts of one source at each position, and the rounds it drafted for."""

    num_rounds: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    verified: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, emitted: int, is_last: bool) -> None:
        right = min(drafted, emitted - 1)
        self.num_rounds += 1
        self.accepted.update(range(right))
        # In the last round of a text, what came after its end was not rejected.
        self.verified.update(range(right + (right < drafted and not is_last)))

    def expected_tokens(self, length: int) -> float:
        judged = self.verified
        rates = [self.accepted[each] / judged[each] if judged[each] else 0.0 for each in range(length)]
        return expected_tokens(rates, length)


def best_constant(rows: list[Row], costs: Costs, plain_seconds: float) -> dict[str, Any]:
    """The constant draft length that would have been fastest, in hindsight.

    Args:
        rows (`list[Row]`): The rows of one arm.
        costs ([`Costs`]): Isolated costs.
        plain_seconds (`float`): Seconds per token of plain decoding.

    Returns:
        `length`, its `speedup`, and `by_length`, the speed-up of every length up to the longest that was judged; 0 is plain
        decoding without a loop.
    """
    judged: defaultdict[str, _Judged] = defaultdict(_Judged)
    undrafted = 0
    for row in rows:
        for number, (_, emitted, _, parts) in enumerate(row.rounds, start=1):
            if parts:  # what a match adds to a model's draft is not counted
                source, drafted = parts[0]
                judged[source].add(drafted, emitted, number == len(row.rounds))
            else:
                undrafted += 1
    longest = max((1 + max(each.verified, default=-1) for each in judged.values()), default=0)
    by_length = {0: plain_seconds / costs.pass_seconds(1)}
    for length in range(1, longest + 1):
        tokens = undrafted + sum(each.num_rounds * each.expected_tokens(length) for each in judged.values())
        seconds = undrafted * costs.pass_seconds(1) + sum(
            each.num_rounds * (length * step_seconds(source, costs) + costs.pass_seconds(length + 1))
            for source, each in judged.items()
        )
        by_length[length] = plain_seconds * tokens / seconds
    best = max(by_length, key=lambda length: (by_length[length], -length))
    return {"length": best, "speedup": by_length[best], "by_length": by_length}


def oracle_seconds(row: Row, known: Iterable[Row], sources: set[str], costs: Costs) -> float:
    """`f(0)`: the fewest isolated seconds in which the row's text can be decoded.

    A batch's rows share their passes and none can be faster than its own fastest way, so a batch takes at least as long as
    the slowest of them; its `costs` are those of batched passes.

    Args:
        row (`Row`): The text, or the texts of a batch.
        known (`Iterable[Row]`): Rows whose rounds tell what is right; those of another text are passed over.
        sources (`set[str]`): What may draft.
        costs ([`Costs`]): Isolated costs.
    """
    if row.batch:
        parts = [_rows_of(each) for each in known]
        return max(
            oracle_seconds(own, [each[place] for each in parts if place < len(each)], sources, costs)
            for place, own in enumerate(_rows_of(row))
        )
    length = _num_tokens(row)
    reach = {source: [0] * (length + 1) for source in sources}
    for each in known:
        if (each.prompt, each.tokens) == (row.prompt, row.tokens):
            _learn(reach, each, length)
    passes = _cheapest_passes(costs, 1 + sum(max(right) for right in reach.values()))
    fastest = [0.0] * (length + 1)
    free = reach.get("ngram", [0] * (length + 1))
    for place in range(length - 1, -1, -1):
        choices = [passes[1] + fastest[place + 1]]
        for source, right in reach.items():
            step = step_seconds(source, costs)
            for drafted in range(1, right[place] + 1):
                for more in range(free[min(place + drafted, length)] + 1 if source != "ngram" else 1):
                    rest = fastest[min(place + drafted + more + 1, length)]
                    choices.append(drafted * step + passes[drafted + more + 1] + rest)
        fastest[place] = min(choices)
    return fastest[0]


def _rows_of(batch: Row) -> list[Row]:
    """The rows of a batch as if each had been decoded alone."""
    return [
        replace(batch, tokens=tokens, rounds=rounds, batch=[], row_rounds=[])
        for tokens, rounds in zip(batch.batch, batch.row_rounds, strict=True)
    ]


def _num_tokens(row: Row) -> int:
    return sum(emitted for _, emitted, *_ in row.rounds)


def _learn(reach: dict[str, list[int]], row: Row, length: int) -> None:
    place = 0
    for _, emitted, _, parts in row.rounds:
        accepted, first = emitted - 1, place
        for source, drafted in parts:
            right = min(drafted, accepted)
            for ahead in range(min(right, length - first) if source in reach else 0):
                reach[source][first + ahead] = max(reach[source][first + ahead], right - ahead)
            accepted, first = accepted - right, first + right
        place += emitted


def _cheapest_passes(costs: Costs, widest: int) -> dict[int, float]:
    """`P(w)`, where a pass may also be run wider than needed: measured medians do not always grow with the width."""
    widths = range(1, max(widest, *costs.target) + 1)
    passes: dict[int, float] = {}
    for width in reversed(widths):
        passes[width] = min(costs.pass_seconds(width), passes.get(width + 1, float("inf")))
    return passes
