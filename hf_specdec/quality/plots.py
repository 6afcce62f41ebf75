"""The plot of a quality measurement: accuracy with its interval by arm, and differences from a reference."""

from __future__ import annotations

import io
from typing import Any

from hf_specdec.quality.rule_arms import procedure_arm
from hf_specdec.quality.summary import pareto_front


__all__ = ["draw_speed", "plot"]


def plot(summary: dict[str, dict[str, Any]], title: str) -> bytes:
    """A PNG: on the left accuracies, on the right the paired differences from plain decoding, with their intervals; below
    accuracy against speed, with the arms that no other beats in both joined by a line.

    Args:
        summary (`dict`): By arm, the figures of [`hf_specdec.quality.summarize`].
        title (`str`): What was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(summary)
    figure = Figure(figsize=(11, 6.0 + 0.42 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(0.42 * len(names), 4.0))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharey=left)
    draw_speed(figure.add_subplot(grid[1, :]), summary)
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


def draw_speed(axis: Any, summary: dict[str, dict[str, Any]]) -> None:
    """Accuracy against speed, with the arms that no other beats in both joined by a line."""
    front = pareto_front(summary)
    points = {name: (each["tokens_per_second"], 100 * each["accuracy"]["mean"]) for name, each in summary.items()}
    axis.plot(*zip(*(points[name] for name in front), strict=True), color="#2a9d8f", linewidth=1, zorder=0)
    for name, (speed, accuracy) in points.items():
        best, alone = name in front, procedure_arm(name) is not None  # whose speed is that of single questions
        marker = "D" if best else "x" if alone else "o"
        axis.scatter([speed], [accuracy], color="#2a9d8f" if best else "#8a8f98", marker=marker, s=28)
        # Slanted, for many rules are right equally often.
        axis.annotate(name, (speed, accuracy), xytext=(2, 4), textcoords="offset points", fontsize=7, rotation=40)
    axis.margins(x=0.08, y=0.12)
    axis.set(title="accuracy and speed; diamonds: the Pareto front", xlabel="tokens/s", ylabel="% of questions")


def _intervals(axis: Any, names: list[str], estimates: list[dict[str, float]]) -> None:
    for name, each in zip(names, estimates, strict=True):
        low, mean, high = (100 * each[key] for key in ("low", "mean", "high"))
        color = "#8a8f98" if name in ("plain", "exact") else "#d1495b" if name.startswith("random") else "#3b6fb6"
        axis.errorbar([mean], [name], xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=4)
        axis.annotate(f"{mean:.1f}", (mean, name), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    axis.grid(axis="x", linewidth=0.3)
    axis.margins(y=0.12)
