"""Printing: JSON, progress on standard error, and when to colour."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


__all__ = ["note", "print_json", "progress_bar", "spinner", "wants_color"]


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on standard output; numbers that JSON cannot express become null."""
    typer.echo(json.dumps(_finite(values), indent=2, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """A remark beside the result: on standard error, dimmed."""
    typer.secho(text, dim=True, err=True)


def wants_color(asked: bool | None) -> bool:
    """Whether text is coloured: as asked, else on a terminal that shows colours."""
    if asked is not None:
        return asked
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def spinner(message: str) -> Iterator[None]:
    """Shows on standard error that something takes a while; nothing where that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error, as a function of what is done, of all there is and, if wanted, of a text beside it; nothing
    without a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    beside = TextColumn("{task.fields[about]}", markup=False)
    with Progress(
        *columns,
        beside,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        speed_estimate_period=3600.0,  # a step may take minutes, and the time left is estimated from several
    ) as bar:
        task = bar.add_task(label, total=None, about="")

        def show(done: int, total: int, about: str = "") -> None:
            bar.update(task, completed=done, total=total, about=about)

        yield show


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
