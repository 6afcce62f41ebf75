"""What a length controller went by in a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

from hf_specdec.lengths.costs import CostTable
from hf_specdec.records import LengthController, LengthSchedule


__all__ = ["NotedLength", "Priced"]


@runtime_checkable
class Priced(Protocol):
    """A schedule that chooses by costs."""

    def known_costs(self) -> CostTable | None:
        """Frozen costs, or what was measured so far; None before anything was."""
        ...


@final
@dataclass
class NotedLength:
    """Another controller, whose latest schedule can be asked once the run is over.

    Args:
        controller ([`LengthController`]): What says how far to draft.
    """

    controller: LengthController
    _schedule: LengthSchedule | None = field(default=None, init=False, repr=False)

    def start(self, batch_size: int) -> LengthSchedule:
        """The other controller's schedule."""
        self._schedule = self.controller.start(batch_size)
        return self._schedule

    @property
    def costs(self) -> CostTable | None:
        """The costs that lengths were chosen by; None for a controller that asks for none."""
        return self._schedule.known_costs() if isinstance(self._schedule, Priced) else None
