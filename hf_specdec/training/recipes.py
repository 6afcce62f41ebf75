"""Recipes: which network, which loss, how many steps."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hf_specdec.training.losses import (
    DPOLoss,
    Eagle3Loss,
    EALLoss,
    GRPOLoss,
    HassLoss,
    KLLoss,
    LKLoss,
    TrainingLoss,
    WTVLoss,
)


__all__ = ["RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    Args:
        family (`str`): The network that a run from scratch makes, `"eagle"` or `"eagle3"`.
        loss ([`TrainingLoss`]): The loss.
        num_steps (`int`): Drafts per chain in training.
        detach (`bool`): Whether gradients stop between the steps of a chain.
        reference (`bool`): Whether the loss compares with a frozen copy of the drafter that the run starts from, which is then
            meant to be a trained one.
    """

    family: str
    loss: TrainingLoss
    num_steps: int
    detach: bool
    reference: bool = False


RECIPES: MappingProxyType[str, Recipe] = MappingProxyType(
    {
        "hass": Recipe("eagle", HassLoss(), num_steps=3, detach=True),
        "eagle3": Recipe("eagle3", Eagle3Loss(), num_steps=7, detach=False),
        "kl": Recipe("eagle3", KLLoss(), num_steps=5, detach=False),
        "eal": Recipe("eagle3", EALLoss(), num_steps=5, detach=False),
        "wtv": Recipe("eagle3", WTVLoss(), num_steps=5, detach=False),
        "lk": Recipe("eagle3", LKLoss(), num_steps=5, detach=False),
        "rcsd-dpo": Recipe("eagle", DPOLoss(), num_steps=6, detach=False, reference=True),
        "rcsd-grpo": Recipe("eagle", GRPOLoss(), num_steps=6, detach=False, reference=True),
    }
)
