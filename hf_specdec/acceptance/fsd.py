"""FSD: fuzzy speculative decoding, acceptance where the two laws are close."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from hf_specdec.acceptance.gates import by_model, draft_gate, target_gate
from hf_specdec.acceptance.relaxed import MaskRule, check_range
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import DivergenceKind, divergence
from hf_specdec.records import Evidence


__all__ = ["FSD"]


@final
@dataclass(frozen=True)
class FSD(MaskRule):
    """Accepts every draft at positions where target and draft diverge by at most a threshold.

    Published (code of SecureSD, arXiv 2610.08678, as a baseline): the divergence of the untempered laws, Jensen-Shannon,
    Kullback-Leibler or total variation. Ours: the default threshold, nats, and the exact coin elsewhere, where the code
    draws from the target. Rows that an n-gram match serves are judged exactly.

    Args:
        threshold (`float`): At least 0, in nats for the first two kinds; 0 is the exact rule.
        divergence_kind (`str`): `"js"`, `"kl"` (of the draft from the target) or `"tv"`.
    """

    needs_draft_logits: ClassVar[bool] = True

    threshold: float = 0.1
    divergence_kind: DivergenceKind = "js"

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0.0, float("inf"))
        if self.divergence_kind not in ("js", "kl", "tv"):
            raise InvalidConfigError(f'divergence_kind must be "js", "kl" or "tv", got {self.divergence_kind!r}')

    def mask(self, evidence: Evidence) -> Tensor:
        apart = divergence(target_gate(evidence), draft_gate(evidence), self.divergence_kind)
        close = (apart <= self.threshold) & by_model(evidence) & bool(self.threshold > 0)
        return close[..., None].expand_as(evidence.scores)
