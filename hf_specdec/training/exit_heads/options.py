"""What the fitting of exit heads can be told, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from hf_specdec.errors import InvalidConfigError


__all__ = ["FITS", "FitLog", "FitOptions"]

FITS = ("linear", "linear+kl", "adapter")


@final
@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Length and pace of a fit. All defaults are ours.

    Args:
        kind (`str`): `"linear"`: ridge regression, in closed form. `"linear+kl"`: AdamW on KL(p || q) from there.
            `"adapter"`: ridge regression for the matrix of each adapter, then the same.
        max_tokens (`int`): Tokens that are fitted to; of texts that are read again each time counts.
        ridge_tokens (`int`): Tokens of the ridge regression where KL follows.
        ridge (`float`): Penalty on the matrix, as a share of the mean square of the inputs.
        tokens_per_step (`int`): Least tokens of an optimiser step, which takes whole texts.
        learning_rate (`float`): The highest one; it rises for the first 5 % of the steps and falls as a cosine.
        clip (`float`): Largest norm of a gradient.
        save_every (`int`): Optimiser steps between checkpoints.
        seed (`int`): Decides the order of the texts.

    Raises:
        [`InvalidConfigError`]: If the kind is unknown or a number is not above 0.
    """

    kind: str
    max_tokens: int
    ridge_tokens: int = 20_000
    ridge: float = 0.01
    tokens_per_step: int = 1024
    learning_rate: float = 3e-4
    clip: float = 1.0
    save_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FITS:
            raise InvalidConfigError(f"kind must be one of {', '.join(FITS)}, got {self.kind!r}")
        for name in ("max_tokens", "ridge_tokens", "ridge", "tokens_per_step", "learning_rate", "clip", "save_every"):
            if getattr(self, name) <= 0:
                raise InvalidConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def distils(self) -> bool:
        """Whether KL follows the ridge regression."""
        return self.kind != "linear"


@dataclass(frozen=True)
class FitLog:
    """What one optimiser step did.

    Args:
        step (`int`): Number of the step, from 1.
        num_tokens (`int`): Tokens fitted to so far.
        losses (`dict[int, float]`): Mean KL(p || q) of the step's tokens by exit layer, in nats.
        evaluation (`dict`): What the evaluation after this step found; empty if there was none.
    """

    step: int
    num_tokens: int
    losses: dict[int, float]
    evaluation: dict[str, object] = field(default_factory=dict)
