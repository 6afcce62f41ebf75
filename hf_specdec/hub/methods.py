"""What a drafter's config says of its method: the network, and the recipes that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


__all__ = ["Method", "method_of"]

_NETWORKS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"eagle3": ("eagle3", "arxiv:2503.01840"), "eagle": ("eagle", "arxiv:2401.15077")}
)
# RCSD's paper has no arXiv id that is known here.
_RECIPES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "hass": ("hass", "arxiv:2408.15766"),
        "eal": ("eal", "arxiv:2609.24150"),
        "wtv": ("wtv", "arxiv:2609.24150"),
        "vat": ("vat", "arxiv:2608.30135"),
        "lk": ("lk", "arxiv:2602.23881"),
        "rcsd-dpo": ("rcsd", "rcsd-dpo"),
        "rcsd-grpo": ("rcsd", "rcsd-grpo"),
        "grpo": ("rcsd", "rcsd-grpo"),
    }
)


@dataclass(frozen=True)
class Method:
    """How a drafter came to be.

    Args:
        network (`str`, *optional*): `"eagle"` or `"eagle3"`; None for a small model.
        recipes (`tuple[str, ...]`): Names of the recipes that trained it, one after another, where its config says them.
    """

    network: str | None
    recipes: tuple[str, ...] = ()

    @property
    def tags(self) -> list[str]:
        """The tags of a model card, papers as `arxiv:ID` among them."""
        found = [*_NETWORKS.get(self.network or "", ())]
        for recipe in self.recipes:
            found += _RECIPES.get(recipe, ())
        return list(dict.fromkeys(found))

    @property
    def title(self) -> str:
        """In words."""
        if self.network is None:
            return "a small model of the same vocabulary"
        return f"{self.network}, trained with {', then '.join(self.recipes)}" if self.recipes else self.network


def method_of(config: Mapping[str, Any]) -> Method:
    """The method that a drafter's config names, in any dialect.

    Args:
        config (`dict`): The contents of its `config.json`.
    """
    names = f"{config.get('architectures')} {config.get('model_type')} {config.get('speculators_model_type')}".lower()
    network = next((name for name in _NETWORKS if name in names), None)
    recipe = config.get("recipe")
    return Method(network, tuple(recipe.split("+")) if isinstance(recipe, str) and recipe else ())
