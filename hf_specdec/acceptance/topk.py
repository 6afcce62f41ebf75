"""Top-k acceptance, a common baseline."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.relaxed import SetRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["TopK", "ranks"]


def ranks(evidence: Evidence) -> Tensor:
    """`(batch, width)`, how many tokens that the processors left have a larger raw logit than the draft."""
    logits = evidence.target_logits.where(evidence.scores.isfinite(), float("-inf"))
    return (logits > logits.gather(-1, evidence.tokens[..., None])).sum(-1)


@final
@dataclass(frozen=True)
class TopK(SetRule):
    """Accepts a draft among the target's `k` most probable tokens.

    Published as a baseline (with `k` from 2 to 5). Ours: the rank is that of the raw logits among the tokens which the
    processors left, ties are in or out together, and the exact coin decides outside the set.

    Args:
        top_k (`int`): Size of the set; 0 is the exact rule.
    """

    top_k: int = 2

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise InvalidConfigError(f"top_k must be at least 0, got {self.top_k}")

    def members(self, evidence: Evidence) -> Tensor:
        return ranks(evidence) < self.top_k
