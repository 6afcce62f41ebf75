"""What each part of the exit rule is worth, by replaying traces without it (ours; the parts are SpecBound's)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from hf_specdec.drafters import ExitPolicy
from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.exit_heads.replay import (
    ANNEALINGS,
    THRESHOLDS,
    WIDTHS,
    ExitTrace,
    LayerCosts,
    Replayed,
    best_of,
)


__all__ = ["COVERAGES", "FEWEST_EXITS", "ablate", "precision_at_coverage"]

FEWEST_EXITS = 3  # that an ablation needs
COVERAGES = (0.3, 0.5, 0.7, 0.9)
_UNBOUNDED = 32  # drafts in a round that only a hard token ends


def ablate(
    traces: Sequence[ExitTrace], exits: Sequence[int], num_layers: int, costs: LayerCosts
) -> dict[str, Replayed]:
    """The best policy that asks all exits down to its depth bound, and the best ones without one of its parts. Whatever is
    left, the threshold with it, is tuned anew.

    Args:
        traces (`Sequence[ExitTrace]`): Traces with these exits and the annealings of the replay.
        exits (`Sequence[int]`): Candidate exit layers, from the bottom; at least three.
        num_layers (`int`): Depth of the target.
        costs ([`LayerCosts`]): What layers, heads and steps cost.

    Returns:
        By `"whole rule"`, `"no annealing"`, `"no depth bound"` (every exit is asked) and `"no width bound"` (only a hard token
        ends a draft), the policy with the largest predicted speed-up.

    Raises:
        [`InvalidConfigError`]: If there are no traces, or fewer than three exits.
    """
    if not traces or len(exits) < FEWEST_EXITS:
        raise InvalidConfigError(
            f"an ablation needs texts and three exits or more, got {len(traces)} and {list(exits)}"
        )
    parts = {
        "whole rule": (exits, ANNEALINGS, WIDTHS),
        "no annealing": (exits, (0.0,), WIDTHS),
        "no depth bound": (exits[-1:], ANNEALINGS, WIDTHS),
        "no width bound": (exits, ANNEALINGS, (_UNBOUNDED,)),
    }
    return {name: best_of(traces, _policies(exits, *grid), num_layers, costs) for name, grid in parts.items()}


def precision_at_coverage(
    traces: Sequence[ExitTrace],
    exits: Sequence[int],
    annealings: Sequence[float] = ANNEALINGS,
    coverages: Sequence[float] = COVERAGES,
) -> dict[float, dict[float, float]]:
    """By annealing and coverage, how many of the tokens that leave are right. The threshold of each is the one with which
    that share of all tokens leaves at some exit, so that annealings are compared at equal coverage.

    Args:
        traces (`Sequence[ExitTrace]`): Traces with these exits and annealings.
        exits (`Sequence[int]`): Exit layers, from the bottom.
        annealings (`Sequence[float]`): 0 is a constant temperature.
        coverages (`Sequence[float]`): Shares of tokens that leave.
    """
    right = torch.stack([torch.cat([trace.right[depth] for trace in traces]) for depth in exits])
    found: dict[float, dict[float, float]] = {}
    for annealing in annealings:
        sure = torch.stack([torch.cat([trace.confidence[depth, annealing] for trace in traces]) for depth in exits])
        found[annealing] = {coverage: _precision(sure, right, coverage) for coverage in coverages}
    return found


def _precision(sure: Tensor, right: Tensor, coverage: float) -> float:
    """Of confidences and hits `(exits, positions)`: the hits of the first sure exits, where `coverage` of all have one."""
    most = sure.max(0).values
    count = max(1, round(coverage * len(most)))
    leaves = sure >= most.sort(descending=True).values[count - 1]
    first = leaves.long().argmax(0)
    return float(right.gather(0, first[None])[0][leaves.any(0)].float().mean())


def _policies(
    exits: Sequence[int], depths: Sequence[int], annealings: Sequence[float], widths: Sequence[int]
) -> Iterator[ExitPolicy]:
    every = ExitPolicy(exit_layers=tuple(exits))
    for depth, annealing, threshold, width in product(depths, annealings, THRESHOLDS, widths):
        yield replace(every, max_depth=depth, annealing=annealing, confidence_threshold=threshold, max_width=width)
