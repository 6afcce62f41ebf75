"""Timed runs, plain and speculative in turn; nothing is drawn while they run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec import SpeculativeConfig

from .pair import Pair
from .traces import Trace, trace_plain, trace_speculative


@dataclass
class Timing:
    """The runs of one prompt, at least one of each kind."""

    plain: list[Trace] = field(default_factory=list)
    speculative: list[Trace] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.plain[0].tokens)

    @property
    def same_text(self) -> bool:
        """Whether all runs wrote the same tokens."""
        return all(trace.tokens == self.plain[0].tokens for trace in [*self.plain, *self.speculative])

    @property
    def plain_seconds(self) -> float:
        return statistics.median(trace.seconds for trace in self.plain)

    @property
    def speculative_seconds(self) -> float:
        return statistics.median(trace.seconds for trace in self.speculative)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.speculative_seconds


def time_prompts(
    pair: Pair,
    prompts: list[dict[str, Tensor]],
    max_new_tokens: int,
    config: SpeculativeConfig,
    repeats: int,
    budget_seconds: float,
) -> list[Timing]:
    """Runs every prompt both ways, in alternating order, after a short warm-up.

    Args:
        prompts (`list[dict]`): Inputs of `generate`, each of batch size 1.
        repeats (`int`): How often, at most.
        budget_seconds (`float`): After the first repeat, none begins that would end later than this.
    """
    trace_plain(pair, prompts[0], 4)
    trace_speculative(pair, pair.draft, prompts[0], 12, config)
    timings = [Timing() for _ in prompts]
    start = time.perf_counter()
    for repeat in range(repeats):
        elapsed = time.perf_counter() - start
        if repeat and elapsed + elapsed / repeat > budget_seconds:
            break
        for timing, inputs in zip(timings, prompts, strict=True):
            run_both(timing, pair, inputs, max_new_tokens, config, plain_first=repeat % 2 == 0)
    return timings


def run_both(
    timing: Timing,
    pair: Pair,
    inputs: dict[str, Tensor],
    max_new_tokens: int,
    config: SpeculativeConfig,
    plain_first: bool,
) -> None:
    """Adds one plain and one speculative run to `timing`."""
    runs: list[tuple[list[Trace], Callable[[], Trace]]] = [
        (timing.plain, lambda: trace_plain(pair, inputs, max_new_tokens)),
        (timing.speculative, lambda: trace_speculative(pair, pair.draft, inputs, max_new_tokens, config)),
    ]
    for traces, run in runs if plain_first else reversed(runs):
        traces.append(run())
