"""The two panels: plain and speculative decoding side by side, replayed at the pace they were recorded at."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .pair import Prompt
from .timing import Timing
from .traces import Trace, fold


FRAMES_PER_SECOND = 20
PROMPT_STYLE, OWN_STYLE, ACCEPTED_STYLE = "dim", "", "bold green"
Decode = Callable[[list[int]], str]


def written(trace: Trace, prompt: str, decode: Decode, seconds: float) -> Text:
    """The prompt and what `trace` had written after `seconds`; accepted drafts are coloured."""
    text, ids, shown = Text(prompt, style=PROMPT_STYLE), [], ""
    for step in trace.steps:
        if step.seconds > seconds:
            break
        for position, token in enumerate(step.tokens):
            ids.append(token)
            whole = decode(ids)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                style = ACCEPTED_STYLE if position < step.num_accepted else OWN_STYLE
                text.append(whole[len(shown) :], style=style)
                shown = whole
    return text


def panel(title: str, trace: Trace, prompt: Prompt, decode: Decode, seconds: float, height: int) -> Panel:
    """One side at a moment of the replay, with its speed so far."""
    now = min(seconds, trace.seconds)
    count = sum(len(step.tokens) for step in trace.steps if step.seconds <= now)
    speed = f"{count} tokens, {count / now:.0f} tokens/s" if now and count else "..."
    body = written(trace, prompt.text, decode, now)
    return Panel(body, title=title, subtitle=speed, height=height, title_align="left", subtitle_align="right")


def side_by_side(left: Panel, right: Panel) -> Table:
    """Two panels of equal width."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def replay(console: Console, prompt: Prompt, plain: Trace, speculative: Trace, decode: Decode) -> None:
    """Shows both runs growing. Off a terminal, only their ends are printed."""
    height = panel_height(console, prompt, plain, decode)

    def frame(seconds: float) -> Table:
        left = panel(f"plain: {prompt.name}", plain, prompt, decode, seconds, height)
        right = panel("speculative", speculative, prompt, decode, seconds, height)
        return side_by_side(left, right)

    end = max(plain.seconds, speculative.seconds)
    if not console.is_terminal:
        console.print(frame(end))
        return
    start = time.perf_counter()
    with Live(frame(0.0), console=console, auto_refresh=False) as live:
        while (now := time.perf_counter() - start) < end:
            live.update(frame(now), refresh=True)
            time.sleep(1 / FRAMES_PER_SECOND)
        live.update(frame(end), refresh=True)


def panel_height(console: Console, prompt: Prompt, trace: Trace, decode: Decode) -> int:
    """Lines that the whole text needs in half of the console, borders included, so that nothing jumps."""
    width = max(20, console.width // 2 - 4)
    return len(written(trace, prompt.text, decode, trace.seconds).wrap(console, width)) + 2


def legend() -> Text:
    """What the colours mean."""
    text = Text("drafted and accepted", style=ACCEPTED_STYLE)
    text.append(", ", style="not bold default")
    text.append("written by the target itself", style="not bold default")
    return text


def summary(prompts: list[Prompt], timings: list[Timing]) -> Table:
    """The measured figures, a line per prompt."""
    count = len(timings[0].plain)
    runs = "one run" if count == 1 else f"medians of {count} runs"
    table = Table(title=f"{runs} each, plain and speculative in turn, nothing drawn meanwhile")
    for heading in ("prompt", "plain tokens/s", "speculative tokens/s", "speed-up", "acceptance", "same text"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for prompt, timing in zip(prompts, timings, strict=True):
        table.add_row(
            prompt.name,
            f"{timing.num_tokens / timing.plain_seconds:.0f}",
            f"{timing.num_tokens / timing.speculative_seconds:.0f}",
            f"{timing.speedup:.2f}x",
            f"{fold(timing.speculative[:1]).acceptance_rate:.0%}",
            "yes" if timing.same_text else "NO",
        )
    return table
