"""Typical acceptance (Medusa, arXiv 2401.10774)."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.gates import target_gate
from hf_specdec.acceptance.relaxed import MaskRule, check_entropy, check_range
from hf_specdec.laws import EntropyKind, entropy
from hf_specdec.records import Evidence


__all__ = ["Typical"]


@final
@dataclass(frozen=True)
class Typical(MaskRule):
    """Accepts a draft whose untempered probability exceeds `min(epsilon, delta * exp(-H))`, H in nats.

    Published (arXiv 2401.10774 and its code): the threshold, both defaults, and the entropy of the whole law. Ours: the
    untempered law, and the exact coin outside the set, where the code draws from the target.

    Args:
        epsilon (`float`): Hard threshold, in [0, 1].
        delta (`float`): Factor of the entropy-dependent threshold. `epsilon=1.0, delta=math.inf` is the exact rule.
        entropy_kind, entropy_top_k: See [`hf_specdec.laws.entropy`].
    """

    epsilon: float = 0.09
    delta: float = 0.3
    entropy_kind: EntropyKind = "full"
    entropy_top_k: int = 3

    def __post_init__(self) -> None:
        check_range("epsilon", self.epsilon, 0.0, 1.0)
        check_range("delta", self.delta, 0.0, float("inf"))
        check_entropy(self.entropy_kind, self.entropy_top_k)

    def mask(self, evidence: Evidence) -> Tensor:
        doubt = entropy(evidence.target_logits, self.entropy_kind, self.entropy_top_k)
        threshold = (self.delta * (-doubt).exp()).clamp(max=self.epsilon)
        return target_gate(evidence) > threshold[..., None]
