"""Token-specific speculative cascades V1, V2 and V3 (arXiv 2405.19261)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from hf_specdec.acceptance.cascade import check_alpha
from hf_specdec.acceptance.gates import by_model, draft_gate, target_gate
from hf_specdec.acceptance.relaxed import LawRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["CascadeToken"]


@final
@dataclass(frozen=True)
class CascadeToken(LawRule):
    """Emits `pi(v) = q(v) (1 - r(v)) + p(v) eta` with `eta = sum r q`: each token is deferred on its own.

    Published (arXiv 2405.19261): the law, and the deferrals `r(v)`: V1 `q(v) < max p - alpha`, V2 `p(v) < max p - alpha`, V3
    `p(v) < (1 - alpha) max p`. Ours: the default `alpha`, and that `r` looks at the untempered laws. Rows that an n-gram
    match serves are judged exactly.

    Args:
        alpha (`float`): At most 1; larger values defer less, `-math.inf` is the exact rule.
        version (`str`): `"v1"`, `"v2"` or `"v3"`.
    """

    needs_draft_logits: ClassVar[bool] = True

    alpha: float = 0.75
    version: Literal["v1", "v2", "v3"] = "v3"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        if self.version not in ("v1", "v2", "v3"):
            raise InvalidConfigError(f'version must be "v1", "v2" or "v3", got {self.version!r}')

    def law(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        if self.alpha == -math.inf:
            return p
        kept = q.where(~self.defers(target_gate(evidence), draft_gate(evidence)), 0.0)
        mixed = kept + p * (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0.0)
        return torch.where(by_model(evidence)[..., None], mixed, p)

    def defers(self, p: Tensor, q: Tensor) -> Tensor:
        """`(..., vocab)`, tokens that are left to the target; `p` and `q` are untempered."""
        best = p.amax(-1, keepdim=True)
        if self.version == "v1":
            return q < best - self.alpha
        return p < (best - self.alpha if self.version == "v2" else (1.0 - self.alpha) * best)
