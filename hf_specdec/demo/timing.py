"""Timed runs, plain decoding and methods in turn; nothing is drawn while they run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from .methods import Method
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


def time_methods(
    pair: Pair,
    methods: Sequence[Method],
    prompts: list[dict[str, Tensor]],
    max_new_tokens: int,
    repeats: int,
    budget_seconds: float,
) -> dict[str, list[Timing]]:
    """Runs every prompt plainly and by each method, in alternating order, after a short warm-up.

    Args:
        methods (`Sequence[Method]`): The methods.
        prompts (`list[dict]`): Inputs of `generate`, each of batch size 1.
        repeats (`int`): How often, at most.
        budget_seconds (`float`): After the first repeat, none begins that would end later than this.

    Returns:
        `dict[str, list[Timing]]`: By method, the timing of each prompt; all of a prompt share its plain runs.
    """
    plain: list[list[Trace]] = [[] for _ in prompts]
    timings = {method.name: [Timing(plain=runs) for runs in plain] for method in methods}
    trace_plain(pair, prompts[0], 4)
    for method in methods:
        trace_speculative(pair, method.drafter, prompts[0], 12, method.config)
    start = time.perf_counter()
    for repeat in range(repeats):
        elapsed = time.perf_counter() - start
        if repeat and elapsed + elapsed / repeat > budget_seconds:
            break
        for number, inputs in enumerate(prompts):
            runs = [(plain[number], partial(trace_plain, pair, inputs, max_new_tokens))]
            for method in methods:
                drafted = partial(trace_speculative, pair, method.drafter, inputs, max_new_tokens, method.config)
                runs.append((timings[method.name][number].speculative, drafted))
            for traces, run in runs if repeat % 2 == 0 else reversed(runs):
                traces.append(run())
    return timings
