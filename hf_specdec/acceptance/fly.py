"""FLy: a mismatch passes where the target is unsure and agrees with what follows."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import mismatched
from hf_specdec.acceptance.relaxed import SetRule, check_entropy, check_range, whole_draft
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import EntropyKind, entropy
from hf_specdec.records import Evidence


__all__ = ["FLy"]


@final
@dataclass(frozen=True)
class FLy(SetRule):
    """Accepts a mismatch if the target's entropy is high and it would have drafted the next `window - 1` tokens itself.

    Published (its code): entropy of the top 3 probabilities in nats, at least 0.3; a window of 6, the mismatch included;
    drafts of 15. A mismatch with fewer drafts after it is rejected, so a draft shorter than the window is judged exactly: set
    `length=15`. Ours: the exact coin elsewhere.

    Args:
        window (`int`): Drafts that must follow without a mismatch, plus one; at least 1.
        entropy_threshold (`float`): Least entropy; inf is the exact rule.
        entropy_kind, entropy_top_k: See [`hf_specdec.laws.entropy`].
    """

    window: int = 6
    entropy_threshold: float = 0.3
    entropy_kind: EntropyKind = "topk"
    entropy_top_k: int = 3

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidConfigError(f"window must be at least 1, got {self.window}")
        check_range("entropy_threshold", self.entropy_threshold, 0.0, float("inf"))
        check_entropy(self.entropy_kind, self.entropy_top_k)

    def members(self, evidence: Evidence) -> Tensor:
        whole, columns = whole_draft(evidence)
        strict = ~mismatched(whole) & whole.valid
        following = torch.nn.functional.pad(strict, (0, self.window - 1))[:, 1:] if self.window > 1 else strict
        agreed = torch.ones_like(strict)
        for step in range(self.window - 1):
            agreed = agreed & following[:, step : step + strict.shape[1]]
        unsure = entropy(whole.target_logits, self.entropy_kind, self.entropy_top_k) >= self.entropy_threshold
        return (~strict & unsure & agreed)[:, columns]
