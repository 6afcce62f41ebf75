"""Counts folded from rounds; every rate is a property beside its formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.lengths import CostTable
from hf_specdec.records import Round


__all__ = ["RowStats", "SpeculativeStats"]


@dataclass
class RowStats:
    """Counts of one row, or the sums over rows.

    Args:
        num_rounds (`int`): Target forward passes of the decode phase in which the row was unfinished. The prompt's
            forward pass (prefill) is not a round.
        num_draft_tokens (`int`): Drafts put before the target; all nodes of a tree.
        num_verified_tokens (`int`): Drafts judged: the accepted ones and the first rejected one of each round. What
            follows a rejection stands on a wrong prefix and is not judged. The children of one node of a tree count as one.
        num_accepted_tokens (`int`): Drafts accepted and kept.
        num_new_tokens (`int`): Tokens emitted, the prefill's included.
        accepted_at_position (`list[int]`): `[i]` counts the rounds that accepted at least `i + 1` drafts.
        drafted_at_position (`list[int]`): `[i]` counts the rounds that drafted at least `i + 1` tokens in a row.
        events (`Counter[str]`): What the rule and the loop counted, such as `easd_fired`; 0 for what never happened.
            `exit_depths`, of self-drafting, is a histogram: the number of drafts by layers run.
        num_known_steps, num_unknown_steps (`int`): Judged positions whose total variation to the target's law is known, and
            is not; both 0 without `diagnostics`, `max_step_tv` or `tv_budget`.
        total_step_tv (`float`): Sum of the known ones.
        max_step_tv (`float`, *optional*): The largest; None where none is known.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_new_tokens: int = 0
    num_prefill_tokens: int = 0
    accepted_at_position: list[int] = field(default_factory=list)
    drafted_at_position: list[int] = field(default_factory=list)
    events: Any = field(default_factory=Counter)
    num_known_steps: int = 0
    num_unknown_steps: int = 0
    total_step_tv: float = 0.0
    max_step_tv: float | None = None

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, the correction or bonus included: `(new - prefill's own) / rounds`; 0.0 without rounds.

        Published as tau or mean acceptance length: 1.0 says that nothing was accepted.
        """
        return (self.num_new_tokens - self.num_prefill_tokens) / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """`accepted / verified` drafts; 0.0 when nothing was verified."""
        return self.num_accepted_tokens / self.num_verified_tokens if self.num_verified_tokens else 0.0

    @property
    def mean_step_tv(self) -> float | None:
        """`total_step_tv / num_known_steps`, the mean total variation of a judged position; None where none is known."""
        return self.total_step_tv / self.num_known_steps if self.num_known_steps else None

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as plain Python values."""
        return {
            "num_rounds": self.num_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_verified_tokens": self.num_verified_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_new_tokens": self.num_new_tokens,
            "accepted_at_position": list(self.accepted_at_position),
            "drafted_at_position": list(self.drafted_at_position),
            "tokens_per_round": self.tokens_per_round,
            "acceptance_rate": self.acceptance_rate,
            "events": dict(self.events),
            "num_known_steps": self.num_known_steps,
            "num_unknown_steps": self.num_unknown_steps,
            "total_step_tv": self.total_step_tv,
            "mean_step_tv": self.mean_step_tv,
            "max_step_tv": self.max_step_tv,
        }

    def _add(self, round_: Round, row: int) -> None:
        emitted = len(round_.emitted[row])
        self.num_new_tokens += emitted
        if round_.is_prefill:
            self.num_prefill_tokens += emitted
            return
        if emitted == 0:
            return
        drafted, accepted = int(round_.num_drafted[row]), int(round_.num_accepted[row])
        self.num_rounds += 1
        self.num_draft_tokens += drafted
        self.num_verified_tokens += int(round_.num_verified[row])
        self.num_accepted_tokens += accepted
        _count_positions(self.drafted_at_position, drafted if round_.longest is None else int(round_.longest[row]))
        _count_positions(self.accepted_at_position, accepted)
        for name, counts in round_.events.items():
            if counts.ndim == 1:
                self.events[name] += int(counts[row])
            else:
                self.events[name] = _merge_histogram(self.events[name] or {}, counts[row].tolist())
        if "step_tv" in round_.marks:
            self._add_distances(round_.marks["step_tv"][row, : int(round_.num_verified[row])].tolist())

    def _add_distances(self, step_tv: list[float]) -> None:
        known = [each for each in step_tv if not math.isnan(each)]
        self.num_known_steps += len(known)
        self.num_unknown_steps += len(step_tv) - len(known)
        self.total_step_tv += sum(known)
        self.max_step_tv = max((*known, *([] if self.max_step_tv is None else [self.max_step_tv])), default=None)


@dataclass
class SpeculativeStats(RowStats):
    """What one `generate` call did, in total and per row (`rows`).

    Args:
        rows (`list[RowStats]`): The counts of each row of the batch; those of the object itself are their sums.
        num_target_forwards (`int`): Forward passes of the target, the prefill included: plain decoding needs one per token.
        draft_seconds (`float`): Time spent drafting.
        verify_seconds (`float`): Time of the target's decode-phase passes with verdict and commit.
        prefill_seconds (`float`): Time of the prompt's forward pass, the target's and the drafter's.
        total_seconds (`float`): From the call of the decoding method to its return.
        predicted_speedup (`float`, *optional*): Speed-up that the measured costs predict for these rounds; None where the
            costs of isolated passes are not known.
        lossless (`bool`): Whether every part of the run keeps the target's own law.
        costs ([`CostTable`], *optional*): What [`GoodputLength`] or [`GoodputTree`] chose lengths by: its frozen costs, or what
            the run measured, to be passed as `costs=` where a seed must reproduce its text. None under other controllers.
        problems (`list[str]`): What went wrong with the drafter, in words.
    """

    rows: list[RowStats] = field(default_factory=list)
    num_target_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    predicted_speedup: float | None = None
    lossless: bool = True
    costs: CostTable | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per second of the whole call; 0.0 before it ended."""
        return self.num_new_tokens / self.total_seconds if self.total_seconds else 0.0

    def add(self, round_: Round) -> None:
        """Folds one round in."""
        if not self.rows:
            self.rows = [RowStats() for _ in round_.emitted]
        for row, counts in enumerate(self.rows):
            counts._add(round_, row)
            self._add(round_, row)
        if not round_.is_prefill:
            self.draft_seconds += round_.draft_seconds
            self.verify_seconds += round_.verify_seconds
            self.prefill_seconds += round_.prefill_seconds
        if round_.problem is not None:
            self.problems.append(round_.problem)
            self.note("drafter_failed")

    def note(self, event: str) -> None:
        """Counts something that concerns the run and not one row."""
        self.events[event] += 1

    @classmethod
    def fold(cls, rounds: Iterable[Round]) -> SpeculativeStats:
        """The statistics of recorded rounds."""
        stats = cls()
        for round_ in rounds:
            stats.add(round_)
        return stats

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        return super().to_dict() | {
            "num_target_forwards": self.num_target_forwards,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "prefill_seconds": self.prefill_seconds,
            "total_seconds": self.total_seconds,
            "tokens_per_second": self.tokens_per_second,
            "predicted_speedup": self.predicted_speedup,
            "lossless": self.lossless,
            "costs": None if self.costs is None else self.costs.to_dict(),
            "problems": list(self.problems),
            "rows": [row.to_dict() for row in self.rows],
        }

    def summary(self) -> str:
        """A few lines to print."""
        law = "exactly the target's law" if self.lossless else "relaxed: not the target's law"
        lines = [
            f"{self.num_new_tokens} tokens in {self.num_rounds} rounds, {self.tokens_per_round:.2f} per round ({law})",
            f"{self.num_accepted_tokens} of {self.num_verified_tokens} verified drafts accepted "
            f"({self.acceptance_rate:.1%}), {self.num_draft_tokens} drafted",
            f"{self.total_seconds:.2f} s ({self.tokens_per_second:.1f} tokens/s): prefill {self.prefill_seconds:.2f} s, "
            f"drafting {self.draft_seconds:.2f} s, verifying {self.verify_seconds:.2f} s",
        ]
        if self.mean_step_tv is not None:
            unknown = f", unknown at {self.num_unknown_steps} more" if self.num_unknown_steps else ""
            lines.append(
                f"total variation to the target's law: mean {self.mean_step_tv:.4f}, max {self.max_step_tv:.4f} over "
                f"{self.num_known_steps} judged positions{unknown}"
            )
        if self.events:
            lines.append(", ".join(f"{name}: {count}" for name, count in sorted(self.events.items())))
        return "\n".join(lines + self.problems)


def _count_positions(counts: list[int], reached: int) -> None:
    counts.extend([0] * (reached - len(counts)))
    for position in range(reached):
        counts[position] += 1


def _merge_histogram(counts: dict[int, int], more: list[int]) -> dict[int, int]:
    """`counts` by value with those of `more` added; a new dictionary by growing value. The value 0 stands for none."""
    values = sorted(counts.keys() | {value for value, count in enumerate(more) if value and count})
    return {value: counts.get(value, 0) + (more[value] if value < len(more) else 0) for value in values}
