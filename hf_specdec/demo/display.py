"""The panels: plain and speculative decoding side by side, replayed at the pace they were recorded at."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.containers import Lines
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .pair import Prompt
from .timing import Timing
from .traces import Trace, fold


FRAMES_PER_SECOND = 20
PANEL_WIDTH, PANEL_HEIGHT = 40, 6
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


def panel(title: str, trace: Trace, body: Text, seconds: float, height: int) -> Panel:
    """One side at a moment of the replay, with its speed so far."""
    now = min(seconds, trace.seconds)
    count = sum(len(step.tokens) for step in trace.steps if step.seconds <= now)
    speed = f"{count} tokens, {count / now:.0f} tokens/s" if now and count else "..."
    return Panel(body, title=title, subtitle=speed, height=height, title_align="left", subtitle_align="right")


def side_by_side(panels: Sequence[Panel], columns: int) -> Table:
    """Panels of equal width, so many in a row."""
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for first in range(0, len(panels), columns):
        grid.add_row(*panels[first : first + columns])
    return grid


def replay(console: Console, prompt: Prompt, runs: Mapping[str, Trace], decode: Decode) -> None:
    """Shows runs of a prompt growing, by title. Off a terminal, only their ends are printed."""
    columns = min(len(runs), max(2, console.width // PANEL_WIDTH))
    width = max(20, console.width // columns - 4)
    height = max(len(lines_of(console, prompt, trace, decode, width)) for trace in runs.values()) + 2
    num_rows = -(-len(runs) // columns)
    if console.is_terminal and num_rows > 1:
        height = min(height, max(PANEL_HEIGHT, (console.height - 1) // num_rows))

    def frame(seconds: float) -> Table:
        panels = []
        for title, trace in runs.items():
            lines = lines_of(console, prompt, trace, decode, width, seconds)
            panels.append(panel(title, trace, Text("\n").join(lines[2 - height :]), seconds, height))
        return side_by_side(panels, columns)

    end = max(trace.seconds for trace in runs.values())
    if not console.is_terminal:
        console.print(frame(end))
        return
    start = time.perf_counter()
    with Live(frame(0.0), console=console, auto_refresh=False) as live:
        while (now := time.perf_counter() - start) < end:
            live.update(frame(now), refresh=True)
            time.sleep(1 / FRAMES_PER_SECOND)
        live.update(frame(end), refresh=True)


def lines_of(
    console: Console, prompt: Prompt, trace: Trace, decode: Decode, width: int, seconds: float = math.inf
) -> Lines:
    """The lines of a panel so wide, after `seconds`."""
    return written(trace, prompt.text, decode, min(seconds, trace.seconds)).wrap(console, width)


def legend() -> Text:
    """What the colours mean."""
    text = Text("drafted and accepted", style=ACCEPTED_STYLE)
    text.append(", ", style="not bold default")
    text.append("written by the target itself", style="not bold default")
    return text


def methods_summary(result: Mapping[str, Any]) -> Table:
    """What [`compare_methods`] measured, a line for each method."""
    title = f"{_runs(result['num_runs'])} each, all in turn, the same linear layers, nothing drawn meanwhile"
    table = Table(title=title)
    for heading in ("method", "tokens/s", "speed-up", "tokens per round", "same text"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    table.add_row("plain", f"{result['plain_tokens_per_second']:.0f}", "", "", "")
    for name, found in result["methods"].items():
        table.add_row(
            name,
            f"{found['tokens_per_second']:.0f}",
            f"{found['speedup']:.2f}x",
            f"{found['tokens_per_round']:.2f}",
            "yes" if found["same_text"] else "NO",
        )
    return table


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"medians of {count} runs"


def summary(prompts: list[Prompt], timings: list[Timing]) -> Table:
    """The measured figures, a line per prompt."""
    runs = _runs(len(timings[0].plain))
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
