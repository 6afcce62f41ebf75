"""Recorded runs of `generate`: how long the call took, which token came when, and what drafted it."""

import time
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpeculativeStats
from hf_specdec.configs import BaseConfig
from hf_specdec.records import Round

from .pair import Pair


@dataclass(frozen=True)
class Step:
    """Tokens that appeared together.

    Args:
        seconds (`float`): When, from the start of the run.
        tokens (`list[int]`): Their ids.
        num_accepted (`int`): How many of the first ones are accepted drafts; the rest are the target's own.
    """

    seconds: float
    tokens: list[int]
    num_accepted: int = 0


@dataclass
class Trace:
    """One run, as steps.

    Args:
        seconds (`float`): Time of the whole call of `generate`.
        rounds (`list[Round]`): The rounds of a speculative run.
    """

    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


class _StepStreamer(BaseStreamer):
    """Notes each token that plain decoding puts; the first `put` is the prompt."""

    def __init__(self, trace: Trace, start: float):
        self.trace, self.start, self.seen_prompt = trace, start, False

    def put(self, value: Tensor) -> None:
        if self.seen_prompt:
            self.trace.steps.append(Step(time.perf_counter() - self.start, value.reshape(-1).tolist()))
        self.seen_prompt = True

    def end(self) -> None:
        pass


def trace_plain(pair: Pair, inputs: dict[str, Tensor], max_new_tokens: int) -> Trace:
    """Greedy decoding by transformers alone. Only the clock is read while it runs."""
    trace, start = Trace(), time.perf_counter()
    streamer = _StepStreamer(trace, start)
    pair.target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    trace.seconds = time.perf_counter() - start
    return trace


def trace_speculative(
    pair: Pair, drafter: PreTrainedModel | None, inputs: dict[str, Tensor], max_new_tokens: int, config: BaseConfig
) -> Trace:
    """The same call with a drafter, or with what the config says. Only the clock is read while it runs."""
    trace, start = Trace(), time.perf_counter()

    def note(round_: Round) -> None:
        seconds = time.perf_counter() - start
        trace.steps.append(Step(seconds, list(round_.emitted[0]), int(round_.num_accepted[0])))
        trace.rounds.append(round_)

    pair.target.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        assistant_model=drafter,
        tokenizer=pair.tokenizer,
        assistant_tokenizer=pair.tokenizer,
        speculative_config=config,
        round_callback=note,
    )
    trace.seconds = time.perf_counter() - start
    return trace


def fold(traces: list[Trace]) -> SpeculativeStats:
    """The statistics of several speculative runs together."""
    stats = SpeculativeStats.fold(round_ for trace in traces for round_ in trace.rounds)
    stats.total_seconds = sum(trace.seconds for trace in traces)
    stats.num_target_forwards = sum(len(trace.rounds) for trace in traces)
    stats.prefill_seconds = sum(trace.steps[0].seconds for trace in traces)
    return stats
