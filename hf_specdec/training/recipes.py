"""Recipes: which network, which loss, how many steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import (
    DPOLoss,
    Eagle3Loss,
    EALLoss,
    GRPOLoss,
    HassLoss,
    KLLoss,
    LKLoss,
    TrainingLoss,
    VATLoss,
    WTVLoss,
)
from hf_specdec.training.rcsd.options import RCSDTraining


__all__ = ["RECIPES", "STAGES", "Recipe", "followed_by", "stages_of"]


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
        rounds (`bool`): Whether the loss learns from recorded rounds.
        recorded_texts (`int`, *optional*): Most texts whose rounds are recorded.
        survival (`bool`): Whether a [`SurvivalHead`] is trained beside the drafter.
    """

    family: str
    loss: TrainingLoss
    num_steps: int
    detach: bool
    reference: bool = False
    rounds: bool = False
    recorded_texts: int | None = None
    survival: bool = False


RECIPES: MappingProxyType[str, Recipe] = MappingProxyType(
    {
        "hass": Recipe("eagle", HassLoss(), num_steps=3, detach=True),
        "eagle3": Recipe("eagle3", Eagle3Loss(), num_steps=7, detach=False),
        "kl": Recipe("eagle3", KLLoss(), num_steps=5, detach=False),
        "eal": Recipe("eagle3", EALLoss(), num_steps=5, detach=False),
        "wtv": Recipe("eagle3", WTVLoss(), num_steps=5, detach=False),
        "vat": Recipe("eagle3", VATLoss(), num_steps=7, detach=False, survival=True),
        "lk": Recipe("eagle3", LKLoss(), num_steps=5, detach=False),
        "rcsd-dpo": Recipe("eagle", DPOLoss(), num_steps=6, detach=False, reference=True, rounds=True),
        "rcsd-grpo": Recipe("eagle", GRPOLoss(), num_steps=6, detach=False, reference=True),
    }
)

# Recipes of several stages (named by arXiv 2609.24150), each of which starts where the one before ended.
STAGES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"eal+grpo": ("eal", "rcsd-grpo"), "wtv+grpo": ("wtv", "rcsd-grpo")}
)


def stages_of(name: str, options: RCSDTraining | None = None) -> list[Recipe]:
    """The recipes that a run of `name` follows one after another.

    Args:
        name (`str`): A name in [`RECIPES`] or [`STAGES`].
        options ([`RCSDTraining`], *optional*): How the RCSD stages are to be done.

    Raises:
        [`InvalidConfigError`]: If there is no such recipe.
    """
    if name not in RECIPES and name not in STAGES:
        raise InvalidConfigError(f"recipe must be one of {', '.join([*RECIPES, *STAGES])}, got {name!r}")
    options, found = options or RCSDTraining(), []
    for stage in STAGES.get(name, (name,)):
        recipe = RECIPES[stage]
        if stage == "rcsd-dpo":
            found += [replace(recipe, loss=options.dpo, recorded_texts=options.recorded_texts)] * options.refreshes
        elif stage == "rcsd-grpo":
            found.append(replace(recipe, loss=options.grpo))
        else:
            found.append(recipe)
    return found


def followed_by(before: str | None, name: str) -> str:
    """What a drafter's config says of its training after one more run, such as `"hass+rcsd-dpo"`.

    Args:
        before (`str`, *optional*): What it said.
        name (`str`): The run's recipe; one that goes on with the last one adds nothing.
    """
    if not before:
        return name
    return before if before == name or before.endswith(f"+{name}") else f"{before}+{name}"
