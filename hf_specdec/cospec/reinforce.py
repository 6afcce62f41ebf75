"""REINFORCE with group-normalised rewards (GRPO, arXiv 2402.03300) for a policy of yes-or-no decisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.acceptance import PolicyNetwork
from hf_specdec.errors import InvalidConfigError


__all__ = ["Episode", "ReinforceOptions", "ReinforceStep", "reinforce"]


@dataclass(frozen=True)
class Episode:
    """One text and the decisions that led to it.

    Args:
        features (`torch.FloatTensor` of shape `(decisions, len(FEATURES))`): What the policy saw at each.
        taken (`torch.BoolTensor` of shape `(decisions,)`): Where the draft was taken.
        reward (`float`): Of the whole text.
    """

    features: Tensor
    taken: Tensor
    reward: float


@dataclass(frozen=True)
class ReinforceOptions:
    """How to reinforce. The values are ours.

    Args:
        num_steps (`int`): Optimiser steps.
        groups_per_step (`int`): Prompts per step.
        group_size (`int`): Texts per prompt, whose rewards are compared with each other.
        learning_rate (`float`): Of Adam.
        entropy_weight (`float`): Weight of the decisions' entropy, in nats, which keeps the policy from settling too early.
        kl_weight (`float`): Weight of the divergence from the policy that training started from, in nats.
        seed (`int`): Decides the order of the prompts.
    """

    num_steps: int = 200
    groups_per_step: int = 4
    group_size: int = 8
    learning_rate: float = 3e-3
    entropy_weight: float = 0.0
    kl_weight: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 0), ("groups_per_step", 1), ("group_size", 2)):
            if getattr(self, name) < least:
                raise InvalidConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class ReinforceStep:
    """What one optimiser step saw: its number from 1, the mean reward, the share of drafts taken, and the decisions."""

    step: int
    reward: float
    taken: float
    num_decisions: int


def reinforce(
    policy: PolicyNetwork,
    rollouts: Callable[[int, int], Sequence[Episode]],
    num_prompts: int,
    options: ReinforceOptions,
) -> Iterator[ReinforceStep]:
    """Trains the policy in place, one optimiser step at each turn.

    The advantage of a text is its reward, less the mean of its group and divided by their spread; every decision of the text
    gets it. A group whose rewards are all equal teaches nothing.

    Args:
        policy ([`PolicyNetwork`]): The policy; its standardisation stays.
        rollouts (`Callable`): From the index of a prompt and a number to as many episodes under the policy as it is.
        num_prompts (`int`): How many prompts there are.
        options ([`ReinforceOptions`]): The options.

    Yields:
        A [`ReinforceStep`] for each step.
    """
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(1, options.num_steps + 1):
        prompts = torch.randint(num_prompts, (options.groups_per_step,), generator=generator).tolist()
        groups = [rollouts(prompt, options.group_size) for prompt in prompts]
        episodes = [episode for group in groups for episode in group]
        features = torch.cat([each.features for each in episodes])
        taken = torch.cat([each.taken for each in episodes])
        if len(taken):
            advantages = torch.cat([_advantages(group) for group in groups])
            lengths = torch.tensor([len(each.taken) for each in episodes])
            loss = _loss(policy, reference, features, taken, advantages.repeat_interleave(lengths), options)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rewards = torch.tensor([each.reward for each in episodes])
        share = float(taken.float().mean()) if len(taken) else 0.0
        yield ReinforceStep(step, float(rewards.mean()), share, len(taken))


def _advantages(group: Sequence[Episode]) -> Tensor:
    rewards = torch.tensor(
        [each.reward for each in group], dtype=torch.float64
    )  # a mean of equal rewards is equal to them
    return ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)).float()


def _loss(
    policy: PolicyNetwork,
    reference: PolicyNetwork,
    features: Tensor,
    taken: Tensor,
    advantages: Tensor,
    options: ReinforceOptions,
) -> Tensor:
    chosen = torch.distributions.Bernoulli(logits=policy.logits(features))
    loss = -(advantages * chosen.log_prob(taken.float())).mean()
    if options.entropy_weight:
        loss = loss - options.entropy_weight * chosen.entropy().mean()
    if options.kl_weight:
        with torch.no_grad():
            before = torch.distributions.Bernoulli(logits=reference.logits(features))
        loss = loss + options.kl_weight * torch.distributions.kl_divergence(chosen, before).mean()
    return loss
