"""What a model gives its layers, taken from one of its own calls, for columns whose tokens are not known yet (ours).

Masks, positions and rotary embeddings of a column depend on the columns before it and not on their tokens. So one pass over
as many columns as some rounds may have says what every layer must be given for each of them, and the columns that follow go
through the layers without the model's own preparation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor


__all__ = ["Cut", "Cuts", "PreparedLayers"]

# Names under which layers are given what depends on places alone. Any other tensor may depend on the tokens.
_PLACES = frozenset({"attention_mask", "position_ids", "position_embeddings", "cache_position"})


@dataclass(frozen=True)
class Cut:
    """What a layer is given for the last `pending` of the first `columns` of `width` columns.

    The model's masks are for a pass over all `width` columns, `keys` wide; the layer shows its queries the last `visible` of
    those that there are at `columns` columns.
    """

    width: int
    columns: int
    pending: int
    visible: int
    keys: int

    def __call__(self, value: Any) -> Any:
        rows = self._rows(value)
        if not isinstance(value, Tensor):  # tuples are rotary embeddings, which may be as wide as there are keys
            return rows
        known = self.keys - (self.width - self.columns)
        if value.ndim == 4 and value.shape[-2:] == (self.width, self.keys):
            return rows[..., known - self.visible : known]
        if self.columns < self.width and value.ndim == 3 and value.shape[-2:] == (1, self.keys):
            return value[..., :known]  # ALiBi: a bias for each key
        return rows

    def _rows(self, value: Any) -> Any:
        """What of a value is about the pending columns."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._rows, value))
        if not isinstance(value, Tensor):
            return value
        here = slice(self.columns - self.pending, self.columns)
        if value.ndim == 4 and value.shape[-2] == self.width:
            return value[..., here, :]
        if not value.is_floating_point() and not value.is_complex():
            return value[..., here] if value.shape[-1:] == (self.width,) else value
        return value[:, here] if value.ndim == 3 and value.shape[1] == self.width else value


@final
class Cuts:
    """Cuts that were made in one pass, each once for all layers that were given the same objects."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Cut], tuple[Any, Any]] = {}
        self._calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut) -> tuple[Any, Any]:
        """The arguments of a layer's call, each cut."""
        key = (cut, *map(id, args), *kwargs, *map(id, kwargs.values()))
        made = self._calls.get(key)
        if made is None:  # the objects are kept with it, so that none leaves its id to another
            cut_args = tuple(self.of(value, cut) for value in args)
            made = (
                cut_args,
                {name: self.of(value, cut) for name, value in kwargs.items()},
                args,
                tuple(kwargs.values()),
            )
            self._calls[key] = made
        return made[0], made[1]

    def of(self, value: Any, cut: Cut) -> Any:
        """`cut(value)`; no mask where a single query sees every key, which is how models ask for the faster call."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        made = self._made.get((id(value), cut))
        if made is None or made[0] is not value:  # an object that is gone may have left its id to another
            found = cut(value)
            is_mask = isinstance(found, Tensor) and found.ndim == 4 and found.dtype == torch.bool
            made = (value, None if is_mask and cut.pending == 1 and bool(found.all()) else found)
            self._made[id(value), cut] = made
        return made[1]


@final
@dataclass
class PreparedLayers:
    """The arguments of each layer's call, but for its hidden states.

    Args:
        width (`int`): Columns that they are for.
        keys (`dict[int, int]`): By layer, how many keys its masks are wide.
        embedded (`torch.FloatTensor` of shape `(batch, width, hidden_size)`, *optional*): What the first layer was given.
    """

    width: int
    keys: dict[int, int] = field(default_factory=dict)
    embedded: Tensor | None = None
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def keep(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], keys: int) -> None:
        """Keeps what layer `index` was called with, its masks being `keys` wide."""
        if index == 0:
            self.embedded = hidden
        self.arguments[index] = (args, kwargs)
        self.keys[index] = keys

    def serves(self, num_layers: int) -> bool:
        """Whether they tell everything that layers will have to be given for other tokens."""
        return len(self.arguments) == num_layers and all(
            isinstance(kwargs.get("attention_mask"), Tensor)
            and not any(map(_has_tensor, args))
            and all(name in _PLACES or not _has_tensor(value) for name, value in kwargs.items())
            for args, kwargs in self.arguments.values()
        )

    @property
    def outlasts_rounds(self) -> bool:
        """Whether nothing in them counts the columns before them, which are more in the next round."""
        return not any(
            isinstance(value, int | float) and not isinstance(value, bool)
            for args, kwargs in self.arguments.values()
            for value in (*args, *kwargs.values())
        )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensor, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor)
