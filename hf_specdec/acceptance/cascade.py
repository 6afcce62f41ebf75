"""What speculative cascades share (arXiv 2405.19261): the draft's law is kept unless a deferral rule asks the target."""

import math
from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import by_model, draft_gate, target_gate
from hf_specdec.acceptance.relaxed import LawRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["CascadeRule", "check_alpha"]


def check_alpha(alpha: float) -> None:
    """Raises unless `alpha` is at most 1; `-inf` defers always."""
    if not alpha <= 1.0:
        raise InvalidConfigError(f"alpha must be at most 1 (-inf is the exact rule), got {alpha}")


class CascadeRule(LawRule):
    """Emits `pi = (1 - d) q + d p`, where the deferral `d` is 0 or 1 for a whole position.

    Published (arXiv 2405.19261): the law, its coupling, and the three deferrals. Ours: deferral looks at the untempered laws,
    since at temperature 0 every largest probability is 1; the bonus comes from `p`; rows that an n-gram match serves are
    judged exactly.
    """

    needs_draft_logits: ClassVar[bool] = True
    alpha: float

    @abstractmethod
    def trusts(self, p: Tensor, q: Tensor) -> Tensor:
        """`(batch, width)`, positions whose draft law is kept; `p` and `q` are untempered."""

    @final
    def law(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        if self.alpha == -math.inf:
            return p
        kept = self.trusts(target_gate(evidence), draft_gate(evidence)) & by_model(evidence)
        return torch.where(kept[..., None], q, p)
