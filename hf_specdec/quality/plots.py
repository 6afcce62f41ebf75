"""The plot of a quality measurement: accuracy with its interval by arm, and differences from a reference."""

from __future__ import annotations

import io
from typing import Any


__all__ = ["plot"]


def plot(summary: dict[str, dict[str, Any]], title: str) -> bytes:
    """A PNG: on the left accuracies, on the right the paired differences from plain decoding, with their intervals.

    Args:
        summary (`dict`): By arm, the figures of [`hf_specdec.quality.summarize`].
        title (`str`): What was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(summary)
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _intervals(left, names, [summary[name]["accuracy"] for name in names])
    left.set(title="accuracy", xlabel="% of questions")
    reference = "plain"
    others = [name for name in names if reference in summary[name]["difference"]]
    _intervals(right, others, [summary[name]["difference"][reference] for name in others])
    right.axvline(0.0, color="black", linewidth=0.6)
    right.set(title=f"paired difference from {reference}", xlabel="points")
    left.invert_yaxis()
    figure.suptitle(f"{title}; bars: 95 % bootstrap intervals", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _intervals(axis: Any, names: list[str], estimates: list[dict[str, float]]) -> None:
    for name, each in zip(names, estimates, strict=True):
        low, mean, high = (100 * each[key] for key in ("low", "mean", "high"))
        color = "#8a8f98" if name in ("plain", "exact") else "#d1495b" if name.startswith("random") else "#3b6fb6"
        axis.errorbar([mean], [name], xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=4)
        axis.annotate(f"{mean:.1f}", (mean, name), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    axis.grid(axis="x", linewidth=0.3)
    axis.margins(y=0.12)
