"""The plot of a drafter's learning curve."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any


__all__ = ["plot_curve"]


def plot_curve(points: Sequence[Mapping[str, Any]], steps: int) -> bytes:
    """A PNG: loss, and tokens per round as decoding found them, over the text tokens read so far (over optimiser steps where
    they are not known).

    Args:
        points (`Sequence[Mapping]`): What [`read_curve`] gives of a [`DrafterCurve`].
        steps (`int`): Drafts per round in evaluations.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.grid(linewidth=0.3)
    over = "step" if any(point["num_tokens"] is None for point in points) else "num_tokens"
    places = [point[over] for point in points]
    axis.plot(places, [point["loss"] for point in points], "--", color="gray", label="loss")
    axis.set(xlabel={"step": "optimiser steps", "num_tokens": "text tokens read"}[over], ylabel="loss")
    lengths = axis.twinx()
    lengths.set_ylabel(f"tokens per round (tau), {steps} drafts")
    for name in (name for name in points[-1] if name.startswith("tau")):
        lengths.plot(places, [point[name] for point in points], marker="o", markersize=4, label=name)
    figure.legend(loc="outside upper center", ncols=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
