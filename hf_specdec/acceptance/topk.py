"""Top-k acceptance, a common baseline."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.relaxed import MaskRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["TopK", "best_tokens"]


def best_tokens(evidence: Evidence, top_k: int) -> Tensor:
    """`(batch, width, vocab)`, the `top_k` tokens with the largest raw logits among those that the processors left, and
    what ties with the last of them."""
    logits = evidence.target_logits.where(evidence.scores.isfinite(), float("-inf"))
    if top_k == 0:
        return torch.zeros_like(logits, dtype=torch.bool)
    return logits >= logits.topk(min(top_k, logits.shape[-1]), -1).values[..., -1:]


@final
@dataclass(frozen=True)
class TopK(MaskRule):
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

    def mask(self, evidence: Evidence) -> Tensor:
        return best_tokens(evidence, self.top_k)
