"""BiLD's rollback policy (arXiv 2302.07863)."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.relaxed import MaskRule, check_range
from hf_specdec.records import Evidence


__all__ = ["BiLD"]


@final
@dataclass(frozen=True)
class BiLD(MaskRule):
    """Accepts a draft unless the target finds it too surprising: `-log p(x) <= rollback_threshold`, untempered, in nats, or
    the target would have chosen it.

    Published (arXiv 2302.07863 and its code): the threshold, 5.0 by default, the exemption of the target's argmax, and that
    the small model hands over where its largest probability falls below 0.6: that half is a draft length,
    `length=ConfidenceLength(0.6, longest=10)`. Ours: the exact coin where the surprise is larger.

    Args:
        rollback_threshold (`float`): At least 0; 0 is the exact rule.
    """

    rollback_threshold: float = 5.0

    def __post_init__(self) -> None:
        check_range("rollback_threshold", self.rollback_threshold, 0.0, float("inf"))

    def mask(self, evidence: Evidence) -> Tensor:
        logits = evidence.target_logits
        trusted = (-logits.log_softmax(-1) <= self.rollback_threshold) | (logits == logits.amax(-1, keepdim=True))
        return trusted & bool(self.rollback_threshold > 0)
