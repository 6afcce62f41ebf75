"""The exact rule: the emitted law is the target's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.laws import one_hot, residual
from hf_specdec.records import Evidence, Outcome


__all__ = ["Exact", "exact_acceptance", "exact_replacement"]


def exact_acceptance(evidence: Evidence) -> Tensor:
    """`min(1, p(x) / q(x))` of shape `(batch, width)` (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1).

    A token with `p(x) = 0` is never accepted, whatever its `q(x)`.
    """
    return (evidence.p_token / evidence.q_token).clamp(max=1.0).where(evidence.p_token > 0, 0.0)


def exact_replacement(evidence: Evidence) -> Tensor:
    """`(p - q)+`, normalised, of shape `(batch, vocab)`, for evidence of width 1."""
    p = evidence.p[:, 0]
    q = one_hot(evidence.tokens[:, 0], p.shape[-1], p.dtype) if evidence.q is None else evidence.q[:, 0]
    return residual(p, q)


@final
@dataclass(frozen=True)
class Exact:
    """Accepts a draft with probability `min(1, p/q)` and corrects it from `(p - q)+`: the target's law, exactly."""

    @property
    def lossless(self) -> bool:
        """True."""
        return True

    @property
    def needs_draft_logits(self) -> bool:
        """False."""
        return False

    @property
    def throws_dice(self) -> bool:
        """False: greedy decoding accepts a draft exactly where it is the target's argmax."""
        return False

    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence)

    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted: the target's."""
        return evidence.p

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        return {}
