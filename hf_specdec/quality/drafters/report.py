"""The files of a comparison: JSON, a table, a plot."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.files import write_at_once


__all__ = ["table", "write_report"]


def write_report(path: Path, found: Mapping[str, Any], *, model: str, dataset: str, about: Mapping[str, Any]) -> None:
    """Writes `path` with the endings `.json`, `.md` and `.png`.

    Args:
        path (`Path`): Where to, without an ending.
        found (`Mapping`): What [`compare`] gave.
        model (`str`): Name of the target.
        dataset (`str`): Name of the prompts.
        about (`Mapping`): How it was done: `seeds` and whatever else belongs into the file.
    """
    arms = found["arms"]
    summary = {model: {dataset: {name: {k: row["tau"] for k, row in rows.items()} for name, rows in arms.items()}}}
    content = {"summary": summary, **about, **found}
    write_at_once(path.with_name(path.name + ".json"), (json.dumps(content, indent=1) + "\n").encode())
    title = f"{model}, {dataset}, greedy, {found['num_prompts']} prompts, seeds {about['seeds']}"
    lines = [f"# Acceptance lengths of drafters\n\n{title}.\n", table(found), ""]
    lines += [f"{key}: {value}\n" for key, value in about.items() if isinstance(value, str)]
    lines += [f"Texts are {'the same' if found['same_text'] else 'NOT the same'} in every arm."]
    write_at_once(path.with_name(path.name + ".md"), ("\n".join(lines) + "\n").encode())
    write_at_once(path.with_name(path.name + ".png"), _plot(arms, title))


def table(found: Mapping[str, Any]) -> str:
    """A Markdown table: tau with the bonus token counted, tau - 1 in brackets, and the gain over the baseline."""
    arms = found["arms"]
    counts = list(next(iter(arms.values())))
    lines = [f"| drafter | {' | '.join(f'step {k}' for k in counts)} |", f"|---|{'---|' * len(counts)}"]
    for name, rows in arms.items():
        cells = [f"{row['tau']:.3f} ({row['tau'] - 1:.3f}, {row['gain']:+.1f} %)" for row in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plot(arms: Mapping[str, Any], title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, rows in arms.items():
        counts, means = [int(k) for k in rows], [row["tau"] for row in rows.values()]
        below = [row["tau"] - row["interval"]["low"] for row in rows.values()]
        above = [row["interval"]["high"] - row["tau"] for row in rows.values()]
        axis.errorbar(counts, means, yerr=[below, above], marker="o", capsize=3, label=name)
    axis.set(xlabel="drafts per round", ylabel="tokens per round (tau)", xticks=counts)
    axis.grid(linewidth=0.3)
    axis.legend()
    figure.suptitle(f"{title}\nbars: 95 % bootstrap intervals over prompts", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
