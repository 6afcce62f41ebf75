"""The three outputs of a benchmark: raw rows with figures as JSON, a table as Markdown, a plot as PNG."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_specdec
from hf_specdec.bench.plots import plot
from hf_specdec.bench.runner import Row
from hf_specdec.files import write_at_once


__all__ = ["markdown", "report_paths", "table", "told", "versions", "write_report"]

_SUFFIXES = (".json", ".md", ".png")

_COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.2f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "predicted_speedup": ("predicted", "{:.2f}x"),
    "ceiling_speedup": ("ceiling", "{:.2f}x"),
    "oracle_speedup": ("oracle", "{:.2f}x"),
    "loop_efficiency": ("loop efficiency", "{:.2f}"),
    "tokens_per_round": ("tokens/round", "{:.2f}"),
    "acceptance_rate": ("acceptance", "{:.1%}"),
    "text_equal": ("text equal", "{:.0%}"),
    "peak_memory": ("peak memory", "{:.2f} GiB"),
}
_UNITS = {"peak_memory": 2**30}  # of what is not shown as it is kept

_LONG = 480  # characters of a list item


def versions() -> dict[str, str]:
    """What figures were measured with, for their reports."""
    return {
        "hf_specdec": hf_specdec.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def write_report(
    prefix: Path, summary: dict[str, dict[str, dict[str, Any]]], rows: dict[str, list[Row]], environment: dict[str, Any]
) -> list[Path]:
    """Writes `PREFIX.json`, `PREFIX.md` and `PREFIX.png`, each at once or not at all.

    Args:
        prefix (`Path`): Path without suffix.
        summary (`dict`): By data set and arm, the figures of [`summarize`].
        rows (`dict`): By data set, the rows.
        environment (`dict`): What the figures were measured with.
    """
    content = {
        "summary": summary,
        "environment": environment,
        "rows": [{"dataset": dataset, **asdict(row)} for dataset, each in rows.items() for row in each],
    }
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = report_paths(prefix)
    write_at_once(paths[0], (json.dumps(content, indent=1) + "\n").encode())
    write_at_once(paths[1], markdown(summary, environment).encode())
    write_at_once(paths[2], plot(summary))
    return paths


def report_paths(prefix: Path) -> list[Path]:
    """`PREFIX.json`, `PREFIX.md` and `PREFIX.png`. A prefix that is written with one of these suffixes loses it; any other dot,
    as in `qwen1.5`, is part of its name."""
    stem = prefix.with_suffix("") if prefix.suffix in _SUFFIXES else prefix
    return [stem.with_name(stem.name + suffix) for suffix in _SUFFIXES]


def markdown(summary: dict[str, dict[str, dict[str, Any]]], environment: dict[str, Any]) -> str:
    """The tables of all data sets, and below them what they were measured with."""
    parts = []
    for dataset, arms in summary.items():
        parts += [f"## {dataset}", "", table(arms), ""]
        if positions := _positions(arms):
            parts += ["Share of rounds that accepted at least so many drafts:", "", positions, ""]
        for name, figures in arms.items():
            if best := figures.get("best_constant"):
                parts += [f"`{name}`: best constant length in hindsight {best['length']} ({best['speedup']:.2f}x)", ""]
        for name, figures in arms.items():
            if "theoretical_limit" in figures:
                most, formula = (f"{figures[key]:.2f}x" for key in ("theoretical_limit", "leviathan_limit"))
                parts += [f"`{name}`: {most} at most, {formula} by Leviathan's formula", ""]
        for name, figures in arms.items():
            if parted := figures.get("divergences"):
                parts += [f"`{name}`: texts that part from plain decoding's: {'; '.join(map(_parting, parted))}", ""]
        for name, figures in arms.items():
            if counts := figures.get("events"):
                parts += [f"`{name}`: {', '.join(f'{key} {value}' for key, value in counts.items())}", ""]
    parts += ["## Measured with", "", *told(environment)]
    return "\n".join(parts) + "\n"


def told(environment: dict[str, Any]) -> list[str]:
    """The entries of an environment as list items; what a long one holds stands in items of its own."""
    lines = []
    for key, value in environment.items():
        text = f"- {key}: {_plain(value)}"
        if isinstance(value, dict) and len(text) > _LONG:
            lines += [f"- {key}:", *(f"  - {name}: {_plain(each)}" for name, each in value.items())]
        else:
            lines.append(text)
    return lines


def table(arms: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of the arms' figures, without the columns that nobody has a figure for."""
    columns = [key for key in _COLUMNS if any(figures.get(key) is not None for figures in arms.values())]
    lines = ["| arm | " + " | ".join(_COLUMNS[key][0] for key in columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {name} | " + " | ".join(_cell(figures.get(key), key) for key in columns) + " |"
        for name, figures in arms.items()
    ]
    return "\n".join(lines)


def _cell(figure: float | None, key: str) -> str:
    return "" if figure is None else _COLUMNS[key][1].format(figure / _UNITS.get(key, 1))


def _parting(divergence: dict[str, Any]) -> str:
    gap = divergence["gap"]
    reason = "one text ends" if gap is None else f"top-2 gap {gap:.3g}"
    return f"prompt {divergence['prompt']} at new token {divergence['position']}, {divergence['kind']} ({reason})"


def _positions(arms: dict[str, dict[str, Any]]) -> str:
    shares = {
        name: figures["accepted_at_position"] for name, figures in arms.items() if "accepted_at_position" in figures
    }
    width = max(map(len, shares.values()), default=0)
    if width == 0:
        return ""
    lines = ["| arm | " + " | ".join(str(i + 1) for i in range(width)) + " |", "|---|" + "---:|" * width]
    for name, each in shares.items():
        lines.append(f"| {name} | " + " | ".join(f"{share:.1%}" for share in each) + " |" * (1 + width - len(each)))
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """A value of an environment as text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
