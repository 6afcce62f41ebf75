"""RCSD's GRPO stage: windows that the drafter samples, rewarded by how far the target accepts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import LossValue, Unrolled
from hf_specdec.training.losses.kl import KLLoss
from hf_specdec.training.losses.windows import sample_windows


__all__ = ["GRPOLoss"]

_LEAST_SPREAD = 1e-4


@final
@dataclass(frozen=True)
class GRPOLoss:
    """Policy optimisation on windows that the drafter samples, with the acceptance rate as reward (GRPO and the reward are
    named by RCSD's abstract; all formulas *ours*).

    `G` windows of K drafts are sampled from the drafter. A draft is accepted where it is the target's best token and all
    before it were accepted, as greedy decoding judges; `R = accepted / K`. The loss of a window is the sum over its accepted
    drafts and its first rejected one of

    `-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) + kl_weight * (q_ref / q - 1 - ln(q_ref / q))`

    and the mean over windows is divided by the number of trained anchors. Windows are sampled anew at each step, so `ratio` is
    1 and its gradient that of `ln q`. On texts that the target wrote greedily every accepted window is the text itself, so
    no pass of the target is needed, and the windows are on-policy exactly. On other texts a chain ends with its first token
    that is not the target's choice, since nothing is known of what follows the choice itself; the part `judged` is the share
    of a chain that is left.

    Args:
        group_size (`int`): G, at least 2 for `credit="window"`.
        group (`"window"` or `"response"`): Windows of every anchor, or rollouts of a whole text, each a row of rounds that
            starts where the one before ended, and only the windows at which those rounds stand.
        credit (`"position"` or `"window"`): `"position"` gives each draft what it changes itself: with `a_i` the drafter's
            probability of the target's choice and `V_i = a_i (1 + V_{i+1})` the drafts that are to be expected from `i` on,
            `A_i = (1 + V_{i+1} - V_i) / K` where draft `i` is accepted and `-V_i / K` where it is rejected. The mean over all
            windows is then the gradient of the expected accepted length, that of [`EALLoss`] at `temperature`. `"window"`, the
            group-relative reading, gives all drafts of a window, the rejected one too, `A = (R - mean) / (std + 1e-4)` in the
            group, where the reward of a rollout is the mean of its rounds'.
        temperature (`float`): Temperature at which windows are sampled and scored; low, it stands for the argmax that greedy
            decoding takes (ours).
        masked (`bool`): Whether a draft that is the target's own choice is never penalised (published); with credit by position
            none ever is.
        clip (`float`): Distance of the ratio from 1 at which it is clipped.
        kl_weight (`float`): Weight of the distance to the frozen reference, by the estimator `k3` on the sampled drafts.
        anchor_weight (`float`): Weight of [`KLLoss`] to the target, which keeps supervision alive.

    Raises:
        [`InvalidConfigError`]: If a number is out of range.
    """

    group_size: int = 8
    group: Literal["window", "response"] = "window"
    credit: Literal["position", "window"] = "position"
    temperature: float = 0.3
    masked: bool = True
    clip: float = 0.2
    kl_weight: float = 0.02
    anchor_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.group not in ("window", "response"):
            raise InvalidConfigError(f'group must be "window" or "response", got {self.group!r}')
        if self.credit not in ("position", "window"):
            raise InvalidConfigError(f'credit must be "position" or "window", got {self.credit!r}')
        least = 2 if self.credit == "window" else 1  # one window has nothing to be compared with
        if self.group_size < least or self.temperature <= 0 or not 0 < self.clip < 1:
            raise InvalidConfigError(
                f"group_size must be at least {least} with credit={self.credit!r}, temperature above 0 and clip between 0 and "
                f"1, got {self.group_size}, {self.temperature} and {self.clip}"
            )

    def __call__(self, unrolled: Unrolled) -> LossValue:
        windows = sample_windows(unrolled, self.group_size, self.temperature)
        rewards, visited = windows.rewards, windows.trained[0]
        if self.group == "response":
            rewards, visited = windows.rewards_of_responses()
        advantages = windows.advantages if self.credit == "position" else relative_advantages(rewards)
        counted = windows.reached & visited
        if self.masked:
            counted = counted & ~((advantages < 0) & windows.matches)
        log_q = windows.log_probabilities(unrolled.student_logits, self.temperature)
        ratio = (log_q - log_q.detach()).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        anchors = windows.trained[0].sum().clamp(min=1) * self.group_size
        policy = -(surrogate * counted).sum() / anchors
        judged = windows.trained.sum(0) / torch.stack(list(unrolled.masks)).sum(0).clamp(min=1)
        figures = {"reward": windows.rewards, "judged": judged[None]}
        parts = {name: _mean(each, windows.trained[0]) for name, each in figures.items()}
        total, parts = policy, {"policy": float(policy.detach()), **parts}
        if self.kl_weight:
            gap = windows.log_probabilities(unrolled.reference_logits, self.temperature) - log_q
            distance = ((gap.exp() - 1 - gap) * (windows.reached & visited)).sum() / anchors
            total, parts["reference"] = total + self.kl_weight * distance, float(distance.detach())
        if self.anchor_weight:
            anchor = KLLoss()(unrolled).total
            total, parts["kl"] = total + self.anchor_weight * anchor, float(anchor.detach())
        return LossValue(total, parts)


def relative_advantages(rewards: Tensor) -> Tensor:
    """`(R - mean) / (std + 1e-4)` over the group, the first dimension; 0 in a group that is all alike."""
    spread = rewards.std(0, unbiased=False)
    return (rewards - rewards.mean(0)) / (spread + _LEAST_SPREAD)


def _mean(rewards: Tensor, trained: Tensor) -> float:
    return float((rewards * trained).sum() / (trained.sum().clamp(min=1) * len(rewards)))
