"""The plot of a benchmark: speed-up bars with the predicted mark, and acceptance by position."""

from __future__ import annotations

import io
from typing import Any


__all__ = ["plot"]


def plot(summary: dict[str, dict[str, dict[str, Any]]]) -> bytes:
    """A PNG with one row per data set.

    Args:
        summary (`dict`): By data set and arm, the figures of [`summarize`].
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(summary)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(summary), 2, squeeze=False)
    for (dataset, arms), (left, right) in zip(summary.items(), axes, strict=True):
        _bars(left, dataset, arms)
        _positions(right, arms)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _bars(axis: Any, dataset: str, arms: dict[str, dict[str, Any]]) -> None:
    names = list(arms)
    speedups = [arms[name]["speedup"] for name in names]
    bars = axis.barh(names, speedups, color=["#8a8f98" if name == "plain" else "#3b6fb6" for name in names])
    axis.bar_label(bars, [f"{speedup:.2f}x" for speedup in speedups], padding=4, fontsize=8)
    for row, name in enumerate(names):
        predicted = arms[name].get("predicted_speedup")
        if predicted:
            axis.plot([predicted, predicted], [row - 0.4, row + 0.4], color="#d1495b", linewidth=2)
    axis.axvline(1.0, color="black", linewidth=0.6)
    axis.set_title(f"{dataset}: speed-up over plain decoding (red: predicted)", wrap=True, fontsize="medium")
    axis.set(xlabel="median of per-prompt ratios")
    axis.set_xlim(0, max(speedups) * 1.15)
    axis.invert_yaxis()


def _positions(axis: Any, arms: dict[str, dict[str, Any]]) -> None:
    for name, figures in arms.items():
        shares = figures.get("accepted_at_position")
        if shares:
            axis.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=name)
    axis.set_title("rounds that accepted at least so many drafts", fontsize="medium")
    axis.set(xlabel="drafts", ylabel="share of rounds", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    if axis.lines:
        axis.legend(fontsize=8)
