"""What may go on from HASS in RCSD's table: its two methods, their other readings, and controls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.drafters.cross_entropy import ChoiceLoss
from hf_specdec.training.losses import KLLoss, TrainingLoss
from hf_specdec.training.rcsd import RCSDTraining
from hf_specdec.training.recipes import RECIPES, Recipe, stages_of


__all__ = ["CONTROL", "VARIANTS", "Variant", "variant_of"]

CONTROL = "control"
_CONTROLS: dict[str, TrainingLoss] = {"kl": KLLoss(), "ce": ChoiceLoss()}
_OPTIONS = tuple(each.name for each in fields(RCSDTraining))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to go on.

    Args:
        recipe (`str`): `"rcsd-dpo"`, `"rcsd-grpo"`, or one of the controls `"kl"` (the divergence) and `"ce"`
            ([`ChoiceLoss`]).
        changes (`Mapping[str, Any]`): Fields of [`RCSDTraining`] that are not those of the other variants.
        rate (`float`, *optional*): Highest learning rate, where it is not that of the others.

    Raises:
        [`InvalidConfigError`]: If there is no such recipe or option.
    """

    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.recipe not in (known := ("rcsd-dpo", "rcsd-grpo", *_CONTROLS)):
            raise InvalidConfigError(f"a variant's recipe must be one of {', '.join(known)}, got {self.recipe!r}")
        if unknown := [name for name in self.changes if name not in _OPTIONS]:
            raise InvalidConfigError(f"a variant changes rate, {', '.join(_OPTIONS)}; got {', '.join(unknown)}")

    def stages(self, options: RCSDTraining) -> list[Recipe]:
        """The recipes that it follows, on the network and with the drafts per chain of RCSD's stages.

        Args:
            options ([`RCSDTraining`]): What all variants share.
        """
        if self.recipe in _CONTROLS:
            return [Recipe("eagle", _CONTROLS[self.recipe], num_steps=RECIPES["rcsd-grpo"].num_steps, detach=False)]
        return stages_of(self.recipe, replace(options, **self.changes))

    def to_dict(self) -> dict[str, Any]:
        """What tells it from another variant."""
        return asdict(self) | {"changes": dict(self.changes)}


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "rcsd-dpo": Variant(recipe="rcsd-dpo", changes={"pairs": "continuation", "masked": True}),
        "rcsd-grpo": Variant(recipe="rcsd-grpo", changes={"masked": True}),
        CONTROL: Variant(recipe="kl"),
        "control-ce": Variant(recipe="ce"),
        "rcsd-dpo-unmasked": Variant(recipe="rcsd-dpo", changes={"pairs": "continuation", "masked": False}),
        "rcsd-dpo-literal": Variant(recipe="rcsd-dpo", changes={"pairs": "literal", "masked": True}),
        "rcsd-dpo-literal-unmasked": Variant(recipe="rcsd-dpo", changes={"pairs": "literal", "masked": False}),
        "rcsd-grpo-unmasked": Variant(recipe="rcsd-grpo", changes={"masked": False}),
    }
)


def variant_of(text: str) -> tuple[str, Variant]:
    """Reads `NAME=RECIPE` or `NAME=RECIPE,OPTION=VALUE,...`, with the options of [`RCSDTraining`] and `rate`.

    Where RECIPE is the name of one of [`VARIANTS`], what that changes is changed too.

    Args:
        text (`str`): Such as `"rcsd-grpo-16=rcsd-grpo,group_size=16"`.

    Raises:
        [`InvalidConfigError`]: If it does not read so, or asks for what there is not.
    """
    name, equals, rest = text.partition("=")
    recipe, *options = rest.split(",")
    pairs = [option.partition("=")[::2] for option in options]
    if not (name and equals and recipe) or not all(key and value for key, value in pairs):
        raise InvalidConfigError(
            f"a variant reads NAME=RECIPE,OPTION=VALUE,..., as in rcsd-grpo-16=rcsd-grpo,group_size=16; got {text!r}"
        )
    known = VARIANTS.get(recipe) or Variant(recipe=recipe)
    changes = {key: _value(value) for key, value in pairs}
    rate = changes.pop("rate", known.rate)
    return name, Variant(recipe=known.recipe, changes={**known.changes, **changes}, rate=rate)


def _value(text: str) -> Any:
    """Numbers, `true`, `false` and `null` as JSON has them; all else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
