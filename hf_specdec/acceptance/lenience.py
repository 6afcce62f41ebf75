"""Lenience: the exact coin with a discounted draft (arXiv 2211.17192, appendix A.5)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.relaxed import CoinRule, check_range
from hf_specdec.records import Evidence


__all__ = ["Lenience"]


@final
@dataclass(frozen=True)
class Lenience(CoinRule):
    """Accepts with probability `min(1, p / (l q))` and corrects from `(p - q)+`.

    Published: the coin. Under greedy decoding `p` is one-hot and the rule is exact. No token is emitted with more than `1 / l`
    times the target's probability by acceptance (**ours**).

    Args:
        lenience (`float`): `l`, in (0, 1]; 1 is the exact rule.
    """

    lenience: float = 1.0

    def __post_init__(self) -> None:
        check_range("lenience", self.lenience, 0.0, 1.0, above=True)

    def acceptance(self, evidence: Evidence) -> Tensor:
        ratio = evidence.p_token / (self.lenience * evidence.q_token)
        return ratio.clamp(max=1.0).where(evidence.p_token > 0, 0.0)

    def kept(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        return torch.minimum(q, p / self.lenience)
