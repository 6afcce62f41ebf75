"""Self-drafting settings by replaying what exits said along texts (trace replay, ours)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.drafters import ExitPolicy
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["ExitTrace", "LayerCosts", "Replayed", "best_policy", "replay", "trace_exits"]

ANNEALINGS = (0.0, 0.5, 1.0)
THRESHOLDS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
WIDTHS = (1, 2, 4, 6)


@dataclass(frozen=True)
class ExitTrace:
    """What each exit says at each position of one text of the target's own.

    Args:
        right (`dict[int, torch.BoolTensor]`): By exit layer, whether its argmax is the target's.
        confidence (`dict[tuple[int, float], torch.FloatTensor]`): By exit layer and annealing, the largest probability.
    """

    right: dict[int, Tensor]
    confidence: dict[tuple[int, float], Tensor]


@final
@dataclass(frozen=True)
class LayerCosts:
    """Seconds, as measured on this machine.

    Args:
        layer (`float`): One layer for one token.
        head (`float`): One exit's norm and head.
        step (`float`): A whole plain step.
        row (`float`): What each further token adds to a pass, as a share of the step.
    """

    layer: float
    head: float
    step: float
    row: float

    def __post_init__(self) -> None:
        if min(self.layer, self.head, self.step) <= 0 or self.row < 0:
            raise InvalidConfigError(f"seconds must be above 0 and row at least 0, got {self}")


@dataclass(frozen=True)
class Replayed:
    """What a policy would have done along the traces.

    Args:
        policy ([`ExitPolicy`]): The policy.
        tokens_per_round (`float`): tau, the target's own token counted.
        acceptance (`float`): Share of drafts that were accepted.
        speed_up (`float`): Predicted plain seconds over self-drafting seconds.
    """

    policy: ExitPolicy
    tokens_per_round: float
    acceptance: float
    speed_up: float

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


@torch.no_grad()
def trace_exits(
    observer: Observer,
    heads: ExitHeads | None,
    text: Text,
    num_layers: int,
    annealings: Sequence[float] = ANNEALINGS,
) -> ExitTrace:
    """Reads a text once. On an accepted prefix a draft sees what this pass sees, so rounds can be replayed from it."""
    seen = observer.observe(text)
    best = seen.logits.argmax(-1)[0]
    right, confidence = {}, {}
    for depth in observer.exits:
        states = seen.states[depth]
        states = states if heads is None else heads(states.to(heads.device), layer=depth)
        logits = observer.readout(states[:, seen.first :])[0]
        right[depth] = logits.argmax(-1) == best
        for annealing in annealings:
            policy = ExitPolicy(annealing=annealing)
            confidence[depth, annealing] = policy.confidence(logits, depth, num_layers).cpu()
    return ExitTrace({depth: each.cpu() for depth, each in right.items()}, confidence)


def replay(traces: Sequence[ExitTrace], policy: ExitPolicy, num_layers: int, costs: LayerCosts) -> Replayed:
    """Runs the rounds of a policy along the traces. Exact for what is accepted; a draft after a wrong one is taken to end
    the round, though in a run it may go on and cost more.

    Args:
        traces (`Sequence[ExitTrace]`): Traces with the policy's exit layers and annealing.
        policy ([`ExitPolicy`]): With `exit_layers`.
        num_layers (`int`): Depth of the target.
        costs ([`LayerCosts`]): What layers, heads and steps cost.
    """
    rounds = drafts = accepted = 0
    seconds = 0.0
    for trace in traces:
        leaves, right = _exits(trace, policy)
        at, length = 0, len(leaves)
        while at < length:
            width = hits = 0
            layers: list[int] = []
            while width < policy.max_width and at + width < length:
                depth = leaves[at + width]
                layers.append(depth or policy.exits_of(num_layers)[-1])
                seconds += costs.head * _asked(policy, depth)
                if depth == 0:
                    break
                width += 1
                if not right[at + width - 1]:
                    break
                hits += 1
            seconds += _round_seconds(layers, width, num_layers, costs)
            rounds, drafts, accepted = rounds + 1, drafts + width, accepted + hits
            at += hits + 1
    tokens = accepted + rounds
    return Replayed(
        policy, tokens / max(rounds, 1), accepted / max(drafts, 1), tokens * costs.step / max(seconds, 1e-12)
    )


def _round_seconds(layers: list[int], width: int, num_layers: int, costs: LayerCosts) -> float:
    """A token's layers below its exit run alone, and all the rest in one pass."""
    alone = costs.layer * sum(layers)
    together = costs.step - costs.layer * min(layers)
    return alone + together * (1.0 + costs.row * width)


def _asked(policy: ExitPolicy, depth: int) -> int:
    layers = policy.exit_layers or ()
    return layers.index(depth) + 1 if depth else len(layers)


def _exits(trace: ExitTrace, policy: ExitPolicy) -> tuple[list[int], list[bool]]:
    """By position, the layer after which a token leaves, 0 where it does not, and whether its draft is right."""
    layers = policy.exit_layers or ()
    length = len(trace.right[layers[0]])
    depths, right = torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.bool)
    for depth in reversed(layers):
        here = trace.confidence[depth, policy.annealing] >= policy.confidence_threshold
        depths = torch.where(here, depth, depths)
        right = torch.where(here, trace.right[depth], right)
    return depths.tolist(), right.tolist()


def best_policy(traces: Sequence[ExitTrace], exits: Sequence[int], num_layers: int, costs: LayerCosts) -> Replayed:
    """The policy with the largest predicted speed-up among one or two of the exits and the grids of this module.

    Raises:
        [`InvalidConfigError`]: If there are no traces.
    """
    if not traces:
        raise InvalidConfigError("there are no texts to replay")
    found = [replay(traces, policy, num_layers, costs) for policy in _policies(exits)]
    return max(found, key=lambda each: each.speed_up)


def _policies(exits: Sequence[int]) -> Iterator[ExitPolicy]:
    for layers in (*((depth,) for depth in exits), *combinations(exits, 2)):
        for annealing in ANNEALINGS:
            for threshold in THRESHOLDS:
                for width in WIDTHS:
                    yield ExitPolicy(
                        exit_layers=layers, annealing=annealing, confidence_threshold=threshold, max_width=width
                    )
