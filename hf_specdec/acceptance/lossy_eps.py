"""Lossy speculative decoding: the exact coin with a constant added."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.exact import exact_acceptance
from hf_specdec.acceptance.gates import allowed
from hf_specdec.acceptance.relaxed import CoinRule, check_range
from hf_specdec.records import Evidence


__all__ = ["LossyEps"]


@final
@dataclass(frozen=True)
class LossyEps(CoinRule):
    """Accepts with probability `min(1, p / q + eps)` and corrects from `(p - q)+`.

    Published (code of SecureSD, arXiv 2610.08678, as a baseline): the coin, also with the one-hot `p` of greedy decoding,
    where a mismatch passes with probability `eps`. Ours: a token that a processor banned never passes.

    Args:
        eps (`float`): In [0, 1]; 0 is the exact rule, 1 accepts every draft that the processors allow.
    """

    throws_dice: ClassVar[bool] = True

    eps: float = 0.0

    def __post_init__(self) -> None:
        check_range("eps", self.eps, 0.0, 1.0)

    def acceptance(self, evidence: Evidence) -> Tensor:
        return (exact_acceptance(evidence) + self.eps).clamp(max=1.0).where(allowed(evidence), 0.0)

    def kept(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        return torch.minimum(q, p + self.eps * q).where(evidence.scores.isfinite(), 0.0)
