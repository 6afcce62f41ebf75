"""What came of a round, and who learns from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hf_specdec.records.drafting import Budget


__all__ = ["LengthController", "LengthSchedule", "Round"]


@dataclass(frozen=True)
class Round:
    """One target forward pass of the decode phase and what came of it. The first record of a run is the prefill.

    Args:
        emitted (`list[list[int]]`): New tokens of each row, cut where the row stopped.
        num_drafted (`torch.LongTensor` of shape `(batch,)`): Drafts that were put before the target.
        num_verified (`torch.LongTensor` of shape `(batch,)`): Drafts judged: the accepted ones and the first rejected one. The
            children of one node of a tree count as one.
        num_accepted (`torch.LongTensor` of shape `(batch,)`): Drafts accepted *and* kept after stopping criteria.
        unfinished (`torch.BoolTensor` of shape `(batch,)`): Rows that go on after this round.
        draft_seconds (`float`): Time spent drafting.
        prefill_seconds (`float`): Time spent on the prompt: by the target in the record of the prefill, by the drafter in
            the round in which it first sees the prompt.
        verify_seconds (`float`): Time of the target's forward pass, the verdict and the commit.
        source (`str`): What drafted.
        stretches (`Sequence[Sequence[tuple[str, int]]]`): See [`Draft`].
        is_prefill (`bool`): True for the record of the prompt's forward pass, which is not a round.
        events (`dict[str, torch.LongTensor]`): Counts of shape `(batch,)`; of shape `(batch, n)` for histograms, whose
            column `i` counts the value `i`.
        problem (`str`, *optional*): What went wrong with the drafter in this round.
        num_attempted (`torch.LongTensor` of shape `(batch,)`, *optional*): As in [`Draft`].
        path (`torch.LongTensor` of shape `(batch, depth)`, *optional*): Of a tree, the nodes accepted and kept, from the root
            on; -1 after the last.
        longest (`torch.LongTensor` of shape `(batch,)`, *optional*): Tokens of each row's longest path, where it drafted a
            tree; `num_drafted` then counts nodes.
        marks (`dict[str, torch.Tensor]`): What a rule that explains itself says of each judged position, of shape
            `(batch, width)`: `rescued` (bool) and `step_tv` (NaN where unknown).
        num_rows (`int`, *optional*): Rows of the forward pass; fewer than the batch once finished rows have left.
        num_read (`int`): As in [`Draft`].
    """

    emitted: Sequence[Sequence[int]]
    num_drafted: Tensor
    num_verified: Tensor
    num_accepted: Tensor
    unfinished: Tensor
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    source: str = "none"
    stretches: Sequence[Sequence[tuple[str, int]]] = ()
    is_prefill: bool = False
    events: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    num_attempted: Tensor | None = None
    path: Tensor | None = None
    longest: Tensor | None = None
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    num_rows: int | None = None
    num_read: int = 0

    @property
    def kinds(self) -> Sequence[Sequence[tuple[str, int]]]:
        """The stretches of every row, written out."""
        return self.stretches or [[(self.source, length)] if length else [] for length in self.num_drafted.tolist()]


class LengthSchedule(Protocol):
    """The running state of a length controller during one `generate` call."""

    def next_budget(self) -> Budget:
        """The next round's length of each row, before the loop caps it by what the run has left."""
        ...

    def observe(self, round_: Round) -> None:
        """Learns from a finished round."""
        ...


class LengthController(Protocol):
    """Says how far to draft. The controller itself is immutable; what it learns lives in the schedule it starts."""

    def start(self, batch_size: int) -> LengthSchedule: ...
