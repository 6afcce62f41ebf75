"""What `specdec demo` runs: the bundled pair, plain and speculative, side by side."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.text import Text

from hf_specdec import SpeculativeConfig

from .display import legend, replay, summary
from .methods import Method
from .pair import Pair, Prompt, load_pair, load_prompts
from .timing import Timing, time_methods
from .traces import fold


CONFIG = SpeculativeConfig(drafting="hybrid", length=4)
REPEATS = 3
TIMING_SECONDS = 16.0


def run_demo(
    console: Console,
    *,
    max_new_tokens: int = 96,
    prompts: list[str] | None = None,
    as_json: bool = False,
    config: SpeculativeConfig = CONFIG,
) -> dict:
    """Decodes each prompt plainly and speculatively, measures both, and shows them side by side.

    Nothing is drawn while a run is timed: what is shown is a replay of the recorded runs, each at its
    own pace. All runs use one thread.

    Args:
        console (`rich.console.Console`): Where to draw.
        max_new_tokens (`int`): New tokens per prompt.
        prompts (`list[str]`, *optional*): Texts to continue, in place of the bundled ones.
        as_json (`bool`): Draw nothing.
        config ([`SpeculativeConfig`]): How to draft.

    Returns:
        `dict`: `same_text`, `speedup` (median over the prompts of plain time / speculative time),
        `plain_tokens_per_second`, `speculative_tokens_per_second`, `stats` (of the first speculative
        run of each prompt, together) and `prompts` (the figures of each).
    """
    chosen = load_prompts() if prompts is None else [Prompt(repr(text), text) for text in prompts]
    pair = load_pair()
    inputs = [dict(pair.tokenizer(prompt.text, return_tensors="pt")) for prompt in chosen]
    with one_thread():
        method = Method("speculative", config, pair.draft)
        timings = time_methods(pair, [method], inputs, max_new_tokens, REPEATS, TIMING_SECONDS)[method.name]
    result = figures(chosen, timings)
    if not as_json:
        show(console, pair, chosen, timings, result)
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Both ways of decoding run on one thread: models this small only lose time to a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def figures(prompts: list[Prompt], timings: list[Timing]) -> dict:
    """Everything that was measured, as plain Python values."""
    tokens = sum(timing.num_tokens for timing in timings)
    return {
        "same_text": all(timing.same_text for timing in timings),
        "speedup": statistics.median(timing.speedup for timing in timings),
        "plain_tokens_per_second": tokens / sum(timing.plain_seconds for timing in timings),
        "speculative_tokens_per_second": tokens / sum(timing.speculative_seconds for timing in timings),
        "stats": fold([timing.speculative[0] for timing in timings]).to_dict(),
        "prompts": [
            {
                "name": prompt.name,
                "same_text": timing.same_text,
                "speedup": timing.speedup,
                "acceptance_rate": fold(timing.speculative[:1]).acceptance_rate,
                "plain_seconds": [trace.seconds for trace in timing.plain],
                "speculative_seconds": [trace.seconds for trace in timing.speculative],
                "num_tokens": timing.num_tokens,
            }
            for prompt, timing in zip(prompts, timings, strict=True)
        ],
    }


def show(console: Console, pair: Pair, prompts: list[Prompt], timings: list[Timing], result: dict) -> None:
    """Replays every prompt, then prints the figures."""
    console.print(legend())
    for prompt, timing in zip(prompts, timings, strict=True):
        runs = {f"plain: {prompt.name}": timing.plain[0], "speculative": timing.speculative[0]}
        replay(console, prompt, runs, pair.decode)
    console.print(summary(prompts, timings))
    same = "The text is the same, token for token." if result["same_text"] else "THE TEXTS DIFFER."
    per_round = result["stats"]["tokens_per_round"]
    console.print(Text(f"{same} {result['speedup']:.2f}x, {per_round:.2f} tokens per pass of the target."))
