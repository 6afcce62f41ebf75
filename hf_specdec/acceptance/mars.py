"""MARS: margin-aware acceptance of the runner-up."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.relaxed import MaskRule, check_range
from hf_specdec.records import Evidence


__all__ = ["MARS"]


@final
@dataclass(frozen=True)
class MARS(MaskRule):
    """Accepts one of the target's two best tokens where their raw logits nearly tie: `z2 / z1 > theta`.

    Published (baseline in SecureSD's code, arXiv 2610.08678): the ratio of raw logits and `theta = 0.9`. Ours: `z1 > 0` is
    required, since the ratio means nothing otherwise, and the exact coin decides elsewhere. The ratio of logits is not
    invariant: a model whose logits are shifted by a constant behaves differently.

    Args:
        theta (`float`): In [0, 1]; 1 is the exact rule.
    """

    theta: float = 0.9

    def __post_init__(self) -> None:
        check_range("theta", self.theta, 0.0, 1.0)

    def mask(self, evidence: Evidence) -> Tensor:
        logits = evidence.target_logits.where(evidence.scores.isfinite(), float("-inf"))
        best, second = logits.topk(2, -1).values.unbind(-1)
        near = (best > 0) & (second > self.theta * best) & bool(self.theta < 1)
        return near[..., None] & (logits >= second[..., None])
