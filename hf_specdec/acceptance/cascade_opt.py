"""Speculative cascade with the optimal deferral (arXiv 2405.19261)."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.cascade import CascadeRule, check_alpha
from hf_specdec.laws import total_variation


__all__ = ["CascadeOpt"]


@final
@dataclass(frozen=True)
class CascadeOpt(CascadeRule):
    """Defers to the target where `max q < max p - alpha * TV(p, q)`; see [`CascadeRule`] for what is published.

    Args:
        alpha (`float`): At most 1, published grid around 0.2; larger values defer less, `-math.inf` is the exact rule.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def trusts(self, p: Tensor, q: Tensor) -> Tensor:
        return q.amax(-1) >= p.amax(-1) - self.alpha * total_variation(p, q)
