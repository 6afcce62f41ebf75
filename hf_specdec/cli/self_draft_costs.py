"""What the layers, exits and passes of a model cost on this machine, for the replay of self-drafting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from hf_specdec._compat import CACHE_KEY
from hf_specdec.bench.costs import measure_costs
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.placement import device_of
from hf_specdec.training.exit_heads import LayerCosts, Observer


__all__ = ["measure_layer_costs"]

_PAST, _WIDTH, _REPEATS = 64, 5, 9  # columns before what is timed, widest pass, calls whose median counts


@torch.no_grad()
def measure_layer_costs(target: Any, observer: Observer, heads: ExitHeads | None) -> LayerCosts:
    """Times plain steps, wider passes and every exit, an adapter with the keys and values of a text before it.

    Args:
        target (`PreTrainedModel`): The target.
        observer ([`Observer`]): Its exits, with the draft vocabulary that they score, if there is one.
        heads ([`ExitHeads`], *optional*): Fitted heads; raw exits without them.
    """
    passes = measure_costs(target, None, prefix_length=_PAST, widest=_WIDTH)
    step, whole = passes.target[1], Observer(target, observer.exits)
    # A readout costs what the model costs without its layers, and less where it scores a draft vocabulary only.
    state = _states(target, 1)
    readout = min(_median(lambda: whole.readout(state)), 0.9 * step)
    layer = (step - readout) / len(observer.layers)
    if observer.vocabulary is not None:
        readout = min(_median(lambda: observer.readout(state)), readout)
    fitted, catch_up = _heads(heads, observer.exits, target, between=lambda: whole.readout(state))
    exits = {depth: seconds + readout for depth, seconds in fitted.items()}
    return LayerCosts(layer, exits, step, max(0.0, passes.v(_WIDTH - 1) - 1) / (_WIDTH - 1), catch_up)


def _heads(
    heads: ExitHeads | None, exits: tuple[int, ...], target: Any, between: Callable[[], object]
) -> tuple[dict[int, float], dict[int, float]]:
    """By exit, seconds of its head for one column, and of an adapter's for each further one. `between` runs in between, as in
    decoding: a small head called again and again would never leave the processor's caches."""
    if heads is None:
        return dict.fromkeys(exits, 0.0), {}
    one: dict[int, list[float]] = {depth: [] for depth in exits}
    many: dict[int, list[float]] = {depth: [] for depth in exits}
    runs = {depth: _HeadRun(heads, depth, target) for depth in exits}
    for _ in range(_REPEATS):
        for depth, run in runs.items():
            for columns, seconds in ((1, one), (_WIDTH, many)):
                between()
                seconds[depth].append(run.seconds(columns))
    first = {depth: statistics.median(seconds) for depth, seconds in one.items()}
    if not heads.reads_context:
        return first, {}
    more = {depth: statistics.median(seconds) - first[depth] for depth, seconds in many.items()}
    return first, {depth: max(0.0, seconds) / (_WIDTH - 1) for depth, seconds in more.items()}


class _HeadRun:
    """One head, after a past if it reads one."""

    def __init__(self, heads: ExitHeads, depth: int, target: Any) -> None:
        self.head, self.target, self.cache = heads.head(depth), target, None
        if heads.reads_context:
            self.cache = DynamicCache(config=self.head.config)
            self._call(_states(target, _PAST))

    def seconds(self, columns: int) -> float:
        """Seconds until a call's result is there; what it left in the cache is cropped, outside the time."""
        states = _states(self.target, columns)
        seconds = _seconds(lambda: self._call(states))
        if self.cache is not None:
            self.cache.crop(-columns)
        return seconds

    def _call(self, states: torch.Tensor) -> Any:
        return self.head(states) if self.cache is None else self.head(states, **{CACHE_KEY: self.cache}).logits


def _states(target: Any, columns: int) -> torch.Tensor:
    """Hidden states `(1, columns, hidden_size)`; of which values makes no difference to the time."""
    size = target.config.get_text_config(decoder=True).hidden_size
    return torch.zeros(1, columns, size, device=device_of(target), dtype=target.dtype)


def _median(read: Callable[[], Any]) -> float:
    return statistics.median(_seconds(read) for _ in range(_REPEATS))


def _seconds(read: Callable[[], Any]) -> float:
    started = time.perf_counter()
    read().sum().item()  # waits for the device
    return time.perf_counter() - started
