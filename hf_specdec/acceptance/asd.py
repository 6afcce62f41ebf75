"""Bounded greedy relaxation: mismatches within a budget of regret."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import mismatched
from hf_specdec.acceptance.relaxed import MaskRule, check_range, whole_draft
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["ASD"]


@final
@dataclass(frozen=True)
class ASD(MaskRule):
    """Accepts mismatches as long as what they cost in raw logits, summed over the draft, stays within a budget.

    Published (transformers issue 48636): the regret `r = max z - z(x)`; the cumulative regret of the draft is at most the
    budget, `r / (K - i)` at most a limit (`K` drafts, position `i`), and so many exceptions per draft at most. Ours: the
    maximum is over the tokens that the processors left, and under sampling mismatches which the coin accepts count as well.

    Args:
        budget (`float`): Most regret of one draft, in logits; 0 is the exact rule.
        step_limit (`float`): Most regret per remaining position.
        max_exceptions (`int`, *optional*): Most mismatches of one draft.
    """

    budget: float = 0.0
    step_limit: float = float("inf")
    max_exceptions: int | None = None

    def __post_init__(self) -> None:
        check_range("budget", self.budget, 0.0, float("inf"))
        check_range("step_limit", self.step_limit, 0.0, float("inf"))
        if self.max_exceptions is not None and self.max_exceptions < 0:
            raise InvalidConfigError(f"max_exceptions must be at least 0, got {self.max_exceptions}")

    def mask(self, evidence: Evidence) -> Tensor:
        whole, columns = whole_draft(evidence)
        logits = whole.target_logits.where(whole.scores.isfinite(), float("-inf"))
        regret = logits.amax(-1, keepdim=True) - logits
        spent = _before(regret.gather(-1, whole.tokens[..., None])[..., 0])[..., None]
        left = whole.valid.flip(-1).long().cumsum(-1).flip(-1).clamp(min=1)[..., None]
        fits = (spent + regret <= self.budget) & (regret / left <= self.step_limit) & bool(self.budget > 0)
        if self.max_exceptions is not None:
            others = torch.arange(logits.shape[-1], device=logits.device) != whole.target_tokens[..., None]
            fits = fits & (_before(mismatched(whole).long())[..., None] + others <= self.max_exceptions)
        return fits[:, columns]


def _before(values: Tensor) -> Tensor:
    """`(batch, width)`, the sum over the positions before each."""
    return torch.nn.functional.pad(values, (1, 0))[:, :-1].cumsum(-1)
