"""The plots of a comparison of drafters."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any


__all__ = ["plot"]


def plot(sections: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A PNG with a row for each section: tau by the number of drafts, and where they were measured, KL against acceptance over
    checkpoints (RCSD's Figure 1) and acceptance by decile of the entropy of the target's law.

    Args:
        sections (`Mapping`): By title, what [`compare`] gave, perhaps with `checkpoints` and `entropy`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, Callable[..., None]]] = [
        ("arms", _taus),
        ("checkpoints", _checkpoints),
        ("entropy", _deciles),
    ]
    shown = [(key, draw) for key, draw in panels if any(found.get(key) for found in sections.values())]
    figure = Figure(figsize=(6.4 * len(shown), 0.4 + 4 * len(sections)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(sections), len(shown), squeeze=False)
    for (title, found), axes in zip(sections.items(), rows, strict=True):
        colors = {name: f"C{number}" for number, name in enumerate(found["arms"])}
        axes[0].set_title(f"{title}, {found['num_prompts']} prompts, seeds {found['seeds']}", fontsize=9)
        for (key, draw), axis in zip(shown, axes, strict=True):
            if found.get(key):
                draw(axis, found[key], colors)
                axis.grid(linewidth=0.3)
                axis.legend(fontsize=7)
            else:
                axis.set_axis_off()
    figure.suptitle("bars: 95 % bootstrap intervals", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _taus(axis: Any, arms: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    for name, rows in arms.items():
        counts, means = [int(k) for k in rows], [row["tau"] for row in rows.values()]
        below = [row["tau"] - row["interval"]["low"] for row in rows.values()]
        above = [row["interval"]["high"] - row["tau"] for row in rows.values()]
        axis.errorbar(
            counts, means, yerr=[below, above], marker="o", markersize=4, capsize=3, color=colors[name], label=name
        )
    axis.set(xlabel="drafts per round", ylabel="tokens per round (tau)", xticks=counts)


def _checkpoints(axis: Any, points: list[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    for name, color in colors.items():
        own = [point for point in points if point["arm"] == name]
        places = [point["kl"] for point in own], [point["acceptance"] for point in own]
        axis.scatter(*places, s=14, color=color, label=name)
    axis.set(xlabel="KL(target || drafter) of first drafts, nats", ylabel="share of drafts accepted", xscale="log")


def _deciles(axis: Any, entropy: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    for name, each in entropy["arms"].items():
        rates = [float("nan") if rate is None else rate for rate in each["acceptance"]]
        axis.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, color=colors[name], label=name)
    upper = [f"{number}\n{edge:.2g}" for number, edge in enumerate(entropy["edges"][1:], start=1)]
    axis.set_xticks(range(1, len(upper) + 1), upper, fontsize=7)
    axis.set(xlabel="decile of the target's entropy, and its upper edge in nats", ylabel="verified drafts accepted")
