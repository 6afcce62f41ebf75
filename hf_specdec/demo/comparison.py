"""What `specdec demo --method` runs: plain decoding and several methods on the bundled target, side by side."""

from collections.abc import Sequence

from rich.console import Console

from hf_specdec import pack_linears

from .display import legend, methods_summary, replay
from .methods import load_method
from .pair import Pair, Prompt, load_pair, load_prompts
from .run import REPEATS, figures, one_thread
from .timing import Timing, time_methods


SECONDS_PER_METHOD = 8.0
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
        budget = SECONDS_PER_METHOD * (1 + len(methods))
        timings = time_methods(pair, methods, inputs, max_new_tokens, REPEATS, budget)
    result = compared(chosen, timings)
    if not as_json:
        show(console, pair, chosen, timings, result)
    return result


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
    console.print(legend())
    for number, prompt in enumerate(prompts):
        plain = next(iter(timings.values()))[number].plain[0]
        drafted = {name: own[number].speculative[0] for name, own in timings.items()}
        replay(console, prompt, {f"plain: {prompt.name}": plain, **drafted}, pair.decode)
    console.print(methods_summary(result))
    console.print("Every text is the same, token for token." if result["same_text"] else "THE TEXTS DIFFER.")
