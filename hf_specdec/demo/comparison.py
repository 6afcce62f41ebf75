"""What `specdec demo --method` runs: plain decoding and several methods on the bundled target, side by side."""

import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from torch import Tensor

from hf_specdec import pack_linears

from .display import legend, methods_summary, replay
from .methods import Method, load_method
from .pair import Pair, Prompt, load_pair, load_prompts
from .run import REPEATS, figures, one_thread
from .timing import Timing
from .traces import Trace, trace_plain, trace_speculative


SECONDS_PER_METHOD = 8.0
Inputs = dict[str, Tensor]
Timings = dict[str, list[Timing]]


def compare_methods(
    console: Console,
    names: Sequence[str],
    *,
    max_new_tokens: int = 96,
    prompts: list[str] | None = None,
    as_json: bool = False,
) -> dict:
    """Decodes each prompt plainly and with every method, in alternating order, measures all, and shows them side by side.

    Plain decoding runs on the same linear layers, packed where that pays ([`pack_linears`]). Nothing is drawn while a run is
    timed, and all runs use one thread.

    Args:
        console (`rich.console.Console`): Where to draw.
        names (`Sequence[str]`): Names of methods, see [`chosen_names`].
        max_new_tokens (`int`): New tokens per prompt.
        prompts (`list[str]`, *optional*): Texts to continue, in place of the bundled ones.
        as_json (`bool`): Draw nothing.

    Returns:
        `dict`: `same_text`, `num_runs` (of each method and prompt), `plain_tokens_per_second`, and `methods`: by name
        `tokens_per_second`, `speedup` (median over the prompts of plain time / its time), `tokens_per_round`,
        `acceptance_rate`, `same_text`, `stats` and `prompts` (the figures of each).
    """
    chosen = load_prompts() if prompts is None else [Prompt(repr(text), text) for text in prompts]
    pair = load_pair()
    for model in (pair.target, pair.draft):
        pack_linears(model)
    inputs = [dict(pair.tokenizer(prompt.text, return_tensors="pt")) for prompt in chosen]
    methods = [load_method(name, pair) for name in names]
    with one_thread():
        timings = time_methods(pair, methods, inputs, max_new_tokens)
    result = compared(chosen, timings)
    if not as_json:
        show(console, pair, chosen, timings, result)
    return result


def time_methods(pair: Pair, methods: Sequence[Method], prompts: list[Inputs], max_new_tokens: int) -> Timings:
    """The runs of each method and prompt, after a short warm-up; all timings of a prompt share its plain runs."""
    plain: list[list[Trace]] = [[] for _ in prompts]
    timings = {method.name: [Timing(plain=runs) for runs in plain] for method in methods}
    trace_plain(pair, prompts[0], 4)
    for method in methods:
        trace_speculative(pair, method.drafter, prompts[0], 12, method.config)
    start = time.perf_counter()
    for repeat in range(REPEATS):
        elapsed = time.perf_counter() - start
        if repeat and elapsed + elapsed / repeat > SECONDS_PER_METHOD * (1 + len(methods)):
            break
        for number, inputs in enumerate(prompts):
            runs = [(plain[number], partial(trace_plain, pair, inputs, max_new_tokens))]
            for method in methods:
                drafted = partial(trace_speculative, pair, method.drafter, inputs, max_new_tokens, method.config)
                runs.append((timings[method.name][number].speculative, drafted))
            for traces, run in runs if repeat % 2 == 0 else reversed(runs):
                traces.append(run())
    return timings


def compared(prompts: list[Prompt], timings: Timings) -> dict:
    """Everything that was measured, as plain Python values."""
    found = {name: figures(prompts, own) for name, own in timings.items()}
    first = next(iter(found))
    return {
        "same_text": all(each["same_text"] for each in found.values()),
        "num_runs": len(timings[first][0].plain),
        "plain_tokens_per_second": found[first]["plain_tokens_per_second"],
        "methods": {
            name: {
                "tokens_per_second": each["speculative_tokens_per_second"],
                "tokens_per_round": each["stats"]["tokens_per_round"],
                "acceptance_rate": each["stats"]["acceptance_rate"],
                **{key: each[key] for key in ("speedup", "same_text", "stats", "prompts")},
            }
            for name, each in found.items()
        },
    }


def show(console: Console, pair: Pair, prompts: list[Prompt], timings: Timings, result: dict) -> None:
    """Replays every prompt, then prints the figures."""

    def decode(ids: list[int]) -> str:
        return pair.tokenizer.decode(ids, skip_special_tokens=True)

    console.print(legend())
    for number, prompt in enumerate(prompts):
        plain = next(iter(timings.values()))[number].plain[0]
        drafted = {name: own[number].speculative[0] for name, own in timings.items()}
        replay(console, prompt, {f"plain: {prompt.name}": plain, **drafted}, decode)
    console.print(methods_summary(result))
    console.print("Every text is the same, token for token." if result["same_text"] else "THE TEXTS DIFFER.")
