"""Self-drafting settings by replaying what exits said along texts (trace replay, ours)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.drafters import ExitPolicy
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["ExitTrace", "LayerCosts", "Replayed", "best_of", "best_policy", "replay", "trace_exits"]

ANNEALINGS = (0.0, 0.5, 1.0)
THRESHOLDS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
WIDTHS = (1, 2, 3, 4, 6)


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
        heads (`dict[int, float]`): By exit layer, asking it for one token: its fitted head if there is one, norm and LM head.
        step (`float`): A whole plain step.
        row (`float`): What each further token adds to a pass, as a share of the step.
        catch_up (`dict[int, float]`): By exit layer, what an adapter takes for each column that it reads beside the newest one;
            nothing for heads that read no context.

    Raises:
        [`InvalidConfigError`]: If there is no exit, or a number is out of range.
    """

    layer: float
    heads: Mapping[int, float]
    step: float
    row: float
    catch_up: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.heads or min(self.layer, self.step, *self.heads.values()) <= 0:
            raise InvalidConfigError(f"there must be exits, and seconds of layers, exits and steps above 0, got {self}")
        if min(self.row, *self.catch_up.values(), 0.0) < 0:
            raise InvalidConfigError(f"row and catch_up must be at least 0, got {self}")

    def of_exits(self, exits: Sequence[int], layers: int) -> tuple[float, float]:
        """Seconds of asking those of `exits` that a token comes to in `layers` layers, and of what those above them then lack.

        Raises:
            [`InvalidConfigError`]: If an exit was not measured.
        """
        if unknown := [each for each in exits if each not in self.heads]:
            raise InvalidConfigError(f"there are no costs of the exits {unknown}, only of {sorted(self.heads)}")
        asked = sum(self.heads[each] for each in exits if each <= layers)
        return asked, sum(self.catch_up.get(each, 0.0) for each in exits if each > layers)


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
    """Reads a text once. On an accepted prefix a draft sees what this pass sees, so rounds can be replayed from it. Of a draft
    vocabulary, exits score its ids and the prompt's."""
    observer = observer.beside(text.tokens[: text.num_prompt_tokens])
    seen = observer.observe(text, whole=True)
    best = seen.logits.argmax(-1)[0]
    right, confidence = {}, {}
    for depth in observer.exits:
        states = seen.states[depth]
        states = states if heads is None else heads(states.to(heads.device, heads.dtype), layer=depth)
        logits = observer.readout(states[:, seen.first :])[0]
        right[depth] = observer.ids_of(logits.argmax(-1)) == best
        for annealing in annealings:
            policy = ExitPolicy(annealing=annealing)
            confidence[depth, annealing] = policy.confidence(logits, depth, num_layers).cpu()
    return ExitTrace({depth: each.cpu() for depth, each in right.items()}, confidence)


def replay(traces: Sequence[ExitTrace], policy: ExitPolicy, num_layers: int, costs: LayerCosts) -> Replayed:
    """Runs the rounds of a policy along the traces. Exact for what is accepted; what a round drafts after a wrong token is
    taken to be as sure as what the text says there, and costs as much. An adapter reads the columns of the text that left
    below its exit later, many at a time.

    Args:
        traces (`Sequence[ExitTrace]`): Traces with the policy's exit layers and annealing.
        policy ([`ExitPolicy`]): With `exit_layers`.
        num_layers (`int`): Depth of the target.
        costs ([`LayerCosts`]): What layers, heads and steps cost.
    """
    exits = policy.exits_of(num_layers)
    prices = {layers: costs.of_exits(exits, layers) for layers in (0, *exits, num_layers)}
    rounds = verified = accepted = 0
    seconds = 0.0
    for trace in traces:
        leaves, right = _exits(trace, policy, exits)
        at = 0
        while at < len(leaves):
            drafted = leaves[at : at + policy.max_width]
            is_hard = 0 in drafted
            drafted = drafted[: drafted.index(0)] if is_hard else drafted
            hits = right[at : at + len(drafted)]
            hits = hits[: hits.index(False)] if False in hits else hits
            asked = [*drafted, *[num_layers] * is_hard]
            seconds += sum(prices[layers][0] for layers in asked) + _layer_seconds(drafted, costs)
            seconds += sum(prices[layers][1] for layers in [*asked, 0][: len(hits) + 1])
            rounds, accepted = rounds + 1, accepted + len(hits)
            verified += min(len(hits) + 1, len(drafted))
            at += len(hits) + 1
    tokens = accepted + rounds
    return Replayed(
        policy, tokens / max(rounds, 1), accepted / max(verified, 1), tokens * costs.step / max(seconds, 1e-12)
    )


def _layer_seconds(drafted: list[int], costs: LayerCosts) -> float:
    """What the drafts took below their exits, and a pass for the newest token, which a hard one has begun already; above the
    exits it takes the others along."""
    taken_along = costs.row * len(drafted) * (costs.step - costs.layer * min(drafted, default=0))
    return costs.layer * sum(drafted) + costs.step + taken_along


def _exits(trace: ExitTrace, policy: ExitPolicy, layers: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """By position, the layer after which a token leaves, 0 where it does not, and whether its draft is right."""
    length = len(trace.right[layers[0]])
    depths, right = torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.bool)
    for depth in reversed(layers):
        here = trace.confidence[depth, policy.annealing] >= policy.confidence_threshold
        depths = torch.where(here, depth, depths)
        right = torch.where(here, trace.right[depth], right)
    return depths.tolist(), right.tolist()


def best_policy(traces: Sequence[ExitTrace], exits: Sequence[int], num_layers: int, costs: LayerCosts) -> Replayed:
    """The policy with the largest predicted speed-up: of one or two of the exits, or of all down to a `max_depth`, over the
    grids of this module.

    Raises:
        [`InvalidConfigError`]: If there are no traces.
    """
    if not traces:
        raise InvalidConfigError("there are no texts to replay")
    return best_of(traces, _policies(exits), num_layers, costs)


def best_of(
    traces: Sequence[ExitTrace], policies: Iterable[ExitPolicy], num_layers: int, costs: LayerCosts
) -> Replayed:
    """The one of these policies with the largest predicted speed-up."""
    return max((replay(traces, policy, num_layers, costs) for policy in policies), key=lambda each: each.speed_up)


def _policies(exits: Sequence[int]) -> Iterator[ExitPolicy]:
    some = [ExitPolicy(exit_layers=layers) for size in (1, 2) for layers in combinations(exits, size)]
    down_to = [ExitPolicy(exit_layers=tuple(exits), max_depth=depth) for depth in exits[2:]]
    for policy, annealing, threshold, width in product((*some, *down_to), ANNEALINGS, THRESHOLDS, WIDTHS):
        yield replace(policy, annealing=annealing, confidence_threshold=threshold, max_width=width)
