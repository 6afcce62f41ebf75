"""Isolated costs that were measured all along a run, so that a machine which slows down does so for both sides alike."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, final

from hf_specdec.bench.costs import CostMeter, Costs, Turn, median_costs, widths_of
from hf_specdec.files import mended_lines


__all__ = ["CostLog", "Priced", "typical_costs"]

_ENOUGH = 5  # turns whose medians count


class Priced(Protocol):
    """Costs that may depend on when something ran."""

    @property
    def typical(self) -> Costs:
        """Those of the whole run."""

    def beside(self, prompt: int) -> Costs:
        """Those of the time when a prompt was decoded."""


@final
@dataclass
class CostLog:
    """Turns of a [`CostMeter`], one before each prompt and one or more after the last (ours).

    The shape of the costs is that of the whole run, medians over its turns; each prompt has a pace of its own, the median
    of what the readings of the turns before and after it took in terms of these.

    Args:
        meter ([`CostMeter`]): Measures.
        file (`Path`, *optional*): Where turns are kept, one JSON object a line; those of an interrupted run are read.
    """

    meter: CostMeter
    file: Path | None = None
    turns: dict[int, Turn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in [] if self.file is None else mended_lines(self.file):
            number, turn = json.loads(line)
            self.turns[number] = turn

    def complete(self, num_prompts: int) -> None:
        """The turn after the last prompt, and more where a run is so short that medians would be of too few."""
        self.measure(num_prompts)
        for number in range(num_prompts + 1, num_prompts + _ENOUGH):
            if len(self.turns) < _ENOUGH:
                self.measure(number)

    def measure(self, number: int) -> None:
        """The turn before prompt `number` (`int`), unless it is known."""
        if number in self.turns:
            return
        self.turns[number] = self.meter.turn()
        self.__dict__.pop("typical", None)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([number, self.turns[number]]) + "\n")

    def forget(self, number: int) -> None:
        """Leaves the turn before prompt `number` (`int`) to be measured anew; of two in the file the later one counts."""
        self.turns.pop(number, None)

    @cached_property
    def typical(self) -> Costs:
        """Medians over the turns so far, of which there is one at least."""
        return typical_costs([self])

    def beside(self, prompt: int) -> Costs:
        """The typical costs at the pace of the time when prompt `prompt` (`int`) was decoded; where that was not measured, at
        the typical one."""
        turns = [self.turns[number] for number in (prompt, prompt + 1) if number in self.turns]
        return self.typical.times(_pace(turns, self.typical)) if turns else self.typical


def typical_costs(logs: Sequence[CostLog]) -> Costs:
    """Those of several runs with one meter."""
    return median_costs([turn for log in logs for turn in log.turns.values()], logs[0].meter)


def _pace(turns: Iterable[Turn], typical: Costs) -> float:
    """How slow the machine was in some turns."""
    steps = {"draft": typical.draft_step, "reduced": typical.reduced_step}
    paces: list[float] = []
    for turn in turns:
        passes = zip(widths_of(turn), turn["target"], strict=True)
        paces += [seconds / typical.target[width] for width, seconds in passes]
        paces += [seconds / usual for name, usual in steps.items() if usual for seconds in turn.get(name, ())]
    return statistics.median(paces)
