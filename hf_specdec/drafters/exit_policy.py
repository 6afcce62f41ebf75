"""When a token leaves the model early: the options of self-drafting, and the law that decides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_specdec.errors import InvalidConfigError


__all__ = ["ExitPolicy"]


@dataclass(frozen=True, kw_only=True)
class ExitPolicy:
    """SpecBound's exit rule (arXiv 2604.12247). Published: annealed temperatures, the confidence threshold and the two
    bounds. The paper's numbers are not known to us; every default, the cumulative bound and `draft_sampling` are ours.

    Args:
        exit_layers (`tuple[int, ...]`, *optional*): Numbers of layers, from the bottom, after which a token may leave;
            those of the exit heads where heads are given, else one at three quarters of the depth.
        confidence_threshold (`float`): tau: least largest probability to leave with, at the layer's temperature.
        annealing (`float`): alpha of `T_l = 1 + alpha (1 - l / L)`: how much less sure shallow layers are taken to be.
        max_depth (`int`, *optional*): Layers after which a token that did not leave ends the draft; its pass is not lost,
            verification goes on from there. The last exit layer by default.
        max_width (`int`): Most tokens that a row drafts in one round.
        min_cumulative_confidence (`float`): A row stops after the token that brings the product of its confidences below
            this; 0 never stops.
        draft_sampling (`bool`): Draw drafts from the exit's law `q` when sampling. By default a draft is the exit's
            argmax, a point mass; both are exact.
    """

    exit_layers: tuple[int, ...] | None = None
    confidence_threshold: float = 0.75
    annealing: float = 0.5
    max_depth: int | None = None
    max_width: int = 6
    min_cumulative_confidence: float = 0.0
    draft_sampling: bool = False

    def __post_init__(self) -> None:
        if self.exit_layers is not None:
            object.__setattr__(self, "exit_layers", tuple(self.exit_layers))
        layers = self.exit_layers
        if layers is not None and (
            not layers or list(layers) != sorted(set(layers)) or not all(map(_is_depth, layers))
        ):
            raise InvalidConfigError(f"exit_layers must be different layers of at least 1 by depth, got {layers}")
        for name in ("confidence_threshold", "min_cumulative_confidence"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidConfigError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if not 0.0 <= self.annealing < float("inf"):
            raise InvalidConfigError(f"annealing must be finite and at least 0, got {self.annealing}")
        if not _is_depth(self.max_width):
            raise InvalidConfigError(f"max_width must be an integer of at least 1, got {self.max_width!r}")
        if self.max_depth is not None and not _is_depth(self.max_depth):
            raise InvalidConfigError(f"max_depth must be an integer of at least 1, got {self.max_depth!r}")

    def exits_of(self, num_layers: int, with_heads: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The layers after which tokens of a model with `num_layers` layers may leave.

        Args:
            num_layers (`int`): Depth of the target.
            with_heads (`tuple[int, ...]`, *optional*): Layers that have an exit head; any where it is None.

        Raises:
            [`InvalidConfigError`]: If a layer is not one of the model's, has no head, or no exit lies above `max_depth`.
        """
        layers = self.exit_layers or with_heads or (max(1, min(num_layers - 1, round(0.75 * num_layers))),)
        if layers[-1] >= num_layers:
            raise InvalidConfigError(
                f"exit_layers must lie below the model's last layer, in 1..{num_layers - 1}, got {list(layers)}"
            )
        if with_heads is not None and not set(layers) <= set(with_heads):
            raise InvalidConfigError(
                f"exit_layers {list(layers)} need heads, and there are heads at {list(with_heads)}"
            )
        if self.max_depth is None:
            return layers
        if not layers[0] <= self.max_depth < num_layers:
            raise InvalidConfigError(
                f"max_depth must lie between the first exit layer and the last but one layer, {layers[0]}.."
                f"{num_layers - 1}, got {self.max_depth}"
            )
        return tuple(layer for layer in layers if layer <= self.max_depth)

    def temperature(self, layer: int, num_layers: int) -> float:
        """`T_l = 1 + alpha (1 - l / L)`, with `l` the number of layers run."""
        return 1.0 + self.annealing * (1.0 - layer / num_layers)

    def confidence(self, logits: Tensor, layer: int, num_layers: int) -> Tensor:
        """`max softmax(z / T_l)`, `(batch,)`, of `logits` `(batch, vocab)`. It depends on the law and on no drawn token."""
        scaled = logits / self.temperature(layer, num_layers)
        return (scaled.max(-1).values - scaled.logsumexp(-1)).exp()


def _is_depth(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
