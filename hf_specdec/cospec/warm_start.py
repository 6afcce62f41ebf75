"""Fitting a policy to labels of mismatches."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.acceptance import PolicyNetwork
from hf_specdec.errors import InvalidConfigError


__all__ = ["agreement", "warm_start"]


def warm_start(
    policy: PolicyNetwork, features: Tensor, labels: Tensor, *, num_steps: int = 500, learning_rate: float = 1e-2
) -> float:
    """Fits the probability of taking the draft to labels, by cross-entropy over all of them at once.

    Args:
        policy ([`PolicyNetwork`]): Changed in place; its standardisation is set from the features first.
        features (`torch.FloatTensor` of shape `(samples, len(FEATURES))`): What the policy sees.
        labels (`torch.BoolTensor` of shape `(samples,)`): Whether the draft may be taken.
        num_steps (`int`): Steps of Adam.
        learning_rate (`float`): Its rate.

    Returns:
        The last loss.

    Raises:
        [`InvalidConfigError`]: If there is no sample.
    """
    if not len(labels):
        raise InvalidConfigError(
            "there is no labelled mismatch: pass more prompts, or a drafter that is wrong sometimes"
        )
    policy.standardise(features)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    loss = torch.tensor(float("nan"))
    for _ in range(num_steps):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(policy.logits(features), labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def agreement(policy: PolicyNetwork, features: Tensor, labels: Tensor, threshold: float = 0.5) -> float:
    """Share of mismatches where the policy decides as the label says."""
    return float(((policy(features) > threshold) == labels).double().mean())
