"""Mentored decoding: the closest law to the draft within a divergence from the target."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.relaxed import LawRule, check_range
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import divergence
from hf_specdec.records import Evidence


__all__ = ["Mentored"]


@final
@dataclass(frozen=True)
class Mentored(LawRule):
    """Emits the law `pi` that accepts most drafts subject to `KL(p || pi) <= max_divergence`, in nats.

    Published (its public code): acceptance `min(1, p / (alpha q))`, corrections from `(p / beta - q)+`, with
    `alpha <= 1 <= beta` found by bisection. So `pi = min(p / alpha, max(q, p / beta))`. Ours: `pi` is normalised after a
    bisection of finite length and then coupled exactly, and the smallest `alpha` whose `pi` was found to satisfy the bound
    is taken, so the bound holds. A sampling rule: with the one-hot law of greedy decoding it is exact. It passes over the
    vocabulary about `num_steps * (num_steps + 2)` times.

    Args:
        max_divergence (`float`): At least 0; 0 is the exact rule.
        num_steps (`int`): Bisection steps for `alpha`, and for `beta` in each of them.
    """

    max_divergence: float = 0.1
    num_steps: int = 10

    def __post_init__(self) -> None:
        check_range("max_divergence", self.max_divergence, 0.0, float("inf"))
        if self.num_steps < 1:
            raise InvalidConfigError(f"num_steps must be at least 1, got {self.num_steps}")

    def law(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        if self.max_divergence == 0 or not evidence.do_sample:
            return p
        law, low, high = p, torch.zeros_like(p[..., :1]), torch.ones_like(p[..., :1])
        for _ in range(self.num_steps):
            alpha = 0.5 * (low + high)
            candidate = self._balanced(p, q, alpha)
            fits = (divergence(p, candidate, "kl") <= self.max_divergence)[..., None]
            law = torch.where(fits, candidate, law)
            low, high = torch.where(fits, low, alpha), torch.where(fits, alpha, high)
        return law

    def _balanced(self, p: Tensor, q: Tensor, alpha: Tensor) -> Tensor:
        """The law of this `alpha`: what `min(q, p / alpha)` lacks is given to the tokens that `p / beta` lifts above `q`."""
        capped = torch.minimum(q, p / alpha)
        low, high = torch.zeros_like(alpha), torch.ones_like(alpha)  # of 1 / beta
        for _ in range(self.num_steps):
            share = 0.5 * (low + high)
            surplus = torch.maximum(capped, share * p).sum(-1, keepdim=True) > 1.0
            low, high = torch.where(surplus, low, share), torch.where(surplus, share, high)
        law = torch.maximum(capped, high * p)
        return law / law.sum(-1, keepdim=True)
