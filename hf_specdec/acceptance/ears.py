"""EARS: acceptance that grows with the target's uncertainty (arXiv 2512.13194)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.exact import exact_acceptance
from hf_specdec.acceptance.gates import allowed, target_gate
from hf_specdec.acceptance.relaxed import CoinRule, check_range
from hf_specdec.records import Evidence


__all__ = ["EARS"]


@final
@dataclass(frozen=True)
class EARS(CoinRule):
    """Accepts with probability `min(1, p / q + a (1 - max p))` and corrects from `(p - q)+`.

    Published (arXiv 2512.13194, known here from a summary): the coin; `a` is tuned. Ours: `max p` is that of the untempered
    law, so that the rule also acts under greedy decoding, where it then throws dice.

    Args:
        tolerance (`float`): `a`, in [0, 1]; 0 is the exact rule.
    """

    throws_dice: ClassVar[bool] = True

    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_range("tolerance", self.tolerance, 0.0, 1.0)

    def acceptance(self, evidence: Evidence) -> Tensor:
        raised = exact_acceptance(evidence) + self._addition(evidence)
        return raised.clamp(max=1.0).where(allowed(evidence), 0.0)

    def kept(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        raised = p + self._addition(evidence)[..., None] * q
        return torch.minimum(q, raised).where(evidence.scores.isfinite(), 0.0)

    def _addition(self, evidence: Evidence) -> Tensor:
        return self.tolerance * (1.0 - target_gate(evidence).amax(-1))
