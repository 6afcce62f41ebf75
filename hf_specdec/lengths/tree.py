"""How large a tree is drafted: always the same, or the size that yields the most tokens per second."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths.costs import CostTable
from hf_specdec.records import Budget, Round
from hf_specdec.trees import TreeShape


__all__ = ["GoodputTree", "TreeLength"]

_WINDOW = 9  # measurements whose median counts
_TRIAL = 16  # rounds after which the largest tree is drafted again, to see what others would have done


@final
@dataclass(frozen=True)
class TreeLength:
    """Trees of one size.

    Args:
        shape ([`TreeShape`]): The size.
    """

    shape: TreeShape = field(default_factory=TreeShape)

    def start(self, batch_size: int) -> TreeLengthSchedule:
        """The schedule of one `generate` call with `batch_size` rows."""
        return TreeLengthSchedule(_budget(batch_size, self.shape.depth, self.shape.total_nodes))


@final
@dataclass(frozen=True)
class TreeLengthSchedule:
    budget: Budget

    def next_budget(self) -> Budget:
        return self.budget

    def observe(self, round_: Round) -> None:
        """Nothing to learn."""


@final
@dataclass(frozen=True)
class GoodputTree:
    """The number of nodes that yields the most tokens per second, from what passes cost and trees would have brought (ours).

    A tree's nodes are ordered by value, so its first `n` are the tree of `n` nodes: one round shows what every smaller tree
    would have brought. Each size is tried once, largest first; then the one with the largest
    `E[tokens](n) / (draft + target pass(n + 1))` is drafted, which may be none at all, and every 16th round the largest.

    What is measured depends on the clock, and the number of rounds and drafts with it, but no text: greedy or sampled, it is
    the same for trees of all sizes. Pass `costs` where the rounds too must be a function of the texts alone.

    Args:
        shape ([`TreeShape`]): The largest tree.
        sizes (`tuple[int, ...]`): Numbers of nodes to choose from, by growing number, besides `shape.total_nodes` and none.
        costs ([`CostTable`], *optional*): Frozen costs; nothing is measured then. A draft costs `depth` draft steps.
        memory (`float`): Weight that an observation keeps for each newer one.
    """

    shape: TreeShape = field(default_factory=TreeShape)
    sizes: tuple[int, ...] = (4, 8, 16, 24, 32, 48)
    costs: CostTable | None = None
    memory: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if any(size < 1 for size in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise InvalidConfigError(f"sizes must be growing numbers of at least 1, got {self.sizes}")
        if not 0.0 < self.memory <= 1.0:
            raise InvalidConfigError(f"memory must lie in (0, 1], got {self.memory}")

    @property
    def choices(self) -> tuple[int, ...]:
        """All sizes, none included, by growing number."""
        smaller = (size for size in self.sizes if size < self.shape.total_nodes)
        return (0, *smaller, self.shape.total_nodes)

    def start(self, batch_size: int) -> GoodputTreeSchedule:
        """The schedule of one `generate` call with `batch_size` rows."""
        return GoodputTreeSchedule(self, batch_size)


@final
class GoodputTreeSchedule:
    """What one run has learnt about costs and acceptance."""

    def __init__(self, controller: GoodputTree, batch_size: int) -> None:
        self.controller = controller
        self.batch_size = batch_size
        self.num_rounds = 0
        largest_first = list(reversed(controller.choices))
        self._untried = largest_first if controller.costs is None else largest_first[:1]
        self._accepted: dict[int, float] = {}
        self._passes: dict[int, deque[float]] = {}
        self._drafts: dict[int, deque[float]] = {}
        self._size = 0

    def next_budget(self) -> Budget:
        shape = self.controller.shape
        if self._untried:
            self._size = self._untried.pop(0)
        else:
            self._size = shape.total_nodes if self.num_rounds % _TRIAL == 0 else self.best()
        return _budget(self.batch_size, min(shape.depth, self._size), self._size)

    def best(self) -> int:
        """The size with the most expected tokens per second; the smallest of equals."""
        return max(self.controller.choices, key=lambda size: (self._tokens(size) / self._seconds(size), -size))

    def observe(self, round_: Round) -> None:
        self.num_rounds += 1
        drafted = int(round_.num_drafted.max())
        self._passes.setdefault(drafted + 1, deque(maxlen=_WINDOW)).append(round_.verify_seconds)
        if drafted == 0:
            return
        self._drafts.setdefault(self._size, deque(maxlen=_WINDOW)).append(round_.draft_seconds)
        rows = torch.tensor([len(each) > 0 for each in round_.emitted])
        if round_.path is None or not bool(rows.any()):
            return
        for size in self.controller.choices:
            if 0 < size <= self._size:
                accepted = ((round_.path >= 0) & (round_.path < size)).sum(-1)[rows].float().mean()
                known = self._accepted.get(size, float(accepted))
                memory = self.controller.memory
                self._accepted[size] = memory * known + (1 - memory) * float(accepted)

    def known_costs(self) -> CostTable | None:
        if self.controller.costs is not None or not self._passes:
            return self.controller.costs
        depth = self.controller.shape.depth
        steps = [statistics.median(each) / min(depth, size) for size, each in self._drafts.items() if size]
        return CostTable(statistics.median(steps) if steps else 0.0, self._measured())

    def _tokens(self, size: int) -> float:
        return 1.0 + self._accepted.get(size, 0.0)

    def _seconds(self, size: int) -> float:
        costs = self.controller.costs
        if costs is not None:
            steps = min(self.controller.shape.depth, size)
            return costs.pass_seconds(size + 1) + steps * costs.draft_step
        draft = statistics.median(self._drafts[size]) if size in self._drafts else 0.0
        return CostTable(0.0, self._measured()).pass_seconds(size + 1) + draft

    def _measured(self) -> tuple[tuple[int, float], ...]:
        """Median seconds of target passes, by tokens fed."""
        return tuple((width, statistics.median(self._passes[width])) for width in sorted(self._passes))


def _budget(batch_size: int, depth: int, nodes: int) -> Budget:
    most: Tensor = torch.full((batch_size,), depth)
    return Budget(most, max_nodes=max(1, nodes))
