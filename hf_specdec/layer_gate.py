"""Running a model's layers at different times: each token passes each layer once, whenever it is wanted there.

A round works on a *window* of new columns. Column `j` never runs deeper than column `j - 1`, so the columns that a layer
still has to run are always the last ones of those that the layer below has run. They run together, in one call of the
layer, over the keys and values that it already holds. Published: drafts exit early and a single pass takes them through
the remaining layers (SpecBound, arXiv 2604.12247); that columns deferred at a layer run together with the newest one is
AdaDecode's (2025). Ours: gating the unchanged layers of any family instead of a forward pass of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_specdec._compat import undecorated_model
from hf_specdec.cache_view import CacheView, check_layers, cut_layer
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.prepared_layers import Cut, Cuts, PreparedLayers


__all__ = ["LayerGate", "Transform", "Window", "find_layers"]

Transform = Callable[[Tensor], Tensor]

_installation = threading.Lock()


def find_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers of a causal LM, from the bottom.

    Raises:
        [`UnsupportedModelError`]: If the model does not hold them in exactly one list.
    """
    bare = undecorated_model(model)
    wanted = bare.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        each
        for part in (bare.get_decoder(), bare)  # what some classes call their decoder is the LM head
        for each in part.modules()
        if isinstance(each, torch.nn.ModuleList) and len(each) == wanted
    ]
    if not found or len({id(layer) for layer in found[0]}) != wanted:
        raise UnsupportedModelError(
            f"{type(bare).__name__} cannot draft for itself: its {wanted} decoder layers were not found in one list. Pass "
            'assistant_model=..., or use drafting="ngram".'
        )
    return list(found[0])


@dataclass
class Window:
    """The columns of one round, and how far each has come.

    Args:
        cache (`Cache`): The target's cache.
        columns (`int`): Entries that every layer held when the round began.
        tokens (`torch.LongTensor` of shape `(batch, width)`): Ids that were fed, -1 for fillers.
        hidden (`list[torch.FloatTensor]`): By layer, the hidden states after it, `(batch, columns so far, hidden_size)`;
            their number of columns says how far the layer has come.
        view ([`CacheView`]): The cache as the model must see it.
        prepared ([`PreparedLayers`], *optional*): What layers are given for columns of this round, once that is known.
        offset (`int`): Columns of `prepared` before the first one of this round.
        read_out (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`, *optional*): What a pass that ended below the
            last layer gave to the model's final norm.
    """

    cache: Cache
    columns: int
    tokens: Tensor
    hidden: list[Tensor | None]
    view: CacheView
    returns_tuple: bool = False
    prepared: PreparedLayers | None = None
    offset: int = 0
    read_out: Tensor | None = None

    def width_at(self, layer: int) -> int:
        """Columns that have run a layer."""
        hidden = self.hidden[layer]
        return 0 if hidden is None else hidden.shape[1]

    def cut(self, width: int) -> None:
        """Forgets the columns from `width` on, in every layer."""
        self.tokens = self.tokens[:, :width]
        self.hidden = [None if each is None else each[:, :width] for each in self.hidden]
        for layer in self.cache.layers:
            cut_layer(layer, self.columns + width)


@dataclass(frozen=True)
class _Pass:
    """A forward pass in which the layers from `depth` on hand through what `transform` makes of the newest column.

    With `prepared` the model is called with more columns than there are, of which `columns` count; or it has been, and the
    layers are called without it, `columns` being 0.
    """

    window: Window
    depth: int
    transform: Transform | None = None
    prepared: PreparedLayers | None = None
    columns: int = 0
    cuts: Cuts = field(default_factory=Cuts)

    def run(self, index: int, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            given, args = args[0], args[1:]
        else:
            kwargs = dict(kwargs)
            given = kwargs.pop("hidden_states")
        window = self.window
        if self.prepared is not None and self.columns:
            keys, _ = window.view.get_mask_sizes(self.prepared.width, index)
            self.prepared.keep(index, given, args, kwargs, keys)
        if index >= self.depth:
            return (given,) if window.returns_tuple else given
        # Not what the layer below has stored: hooks of the user's may have changed it since.
        below = given[:, : self.columns] if self.columns else given
        done = window.width_at(index)
        if below.shape[1] > done:
            self._advance(index, inner, below[:, done:], args, kwargs)
        return self._hand_on(index, given.shape[1])

    def _advance(
        self, index: int, layer: Callable[..., Any], pending: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Takes the columns that a layer has not run yet through it."""
        window, done, count = self.window, self.window.width_at(index), pending.shape[1]
        visible = count + self._num_shown(index, done)
        if self.prepared is None:
            keys, _ = window.view.get_mask_sizes(done + count, index)
            cut = Cut(done + count, done + count, count, visible, keys)
        else:
            cut = Cut(self.prepared.width, window.offset + done + count, count, visible, self.prepared.keys[index])
        args, kwargs = self.cuts.of_call(args, kwargs, cut)
        output = layer(pending, *args, **kwargs)
        window.returns_tuple = isinstance(output, tuple)
        new = output[0] if isinstance(output, tuple) else output
        before = window.hidden[index]
        window.hidden[index] = new if before is None else torch.cat([before, new], 1)

    def _hand_on(self, index: int, width: int) -> Any:
        hidden = self.window.hidden[index]
        if self.transform is not None and index == self.depth - 1 and hidden is not None:
            hidden = torch.cat([hidden[:, :-1], self.transform(hidden[:, -1:])], 1)
        if hidden is not None and hidden.shape[1] < width:  # the model may count on the shape that it began with
            hidden = torch.cat([hidden, hidden[:, -1:].expand(-1, width - hidden.shape[1], -1)], 1)
        if index == self.depth - 1:
            self.window.read_out = hidden
        return (hidden,) if self.window.returns_tuple else hidden

    def _num_shown(self, index: int, done: int) -> int:
        """Keys that the layer holds and shows, `done` of them this round's."""
        layer = self.window.cache.layers[index]
        held = int(layer.get_seq_length())
        if held != self.window.columns + done:
            raise RuntimeError(
                f"layer {index} holds {held} entries, expected {self.window.columns} and {done} new ones"
            )
        return min(held, layer.sliding_window - 1) if layer.is_sliding else held


@final
class _GatedForward:
    """What stands in place of a layer's `forward`: outside of any hook that accelerate put there."""

    def __init__(self, gate: LayerGate, index: int, inner: Callable[..., Any]) -> None:
        self.gate, self.index, self.inner = gate, index, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self.gate.current
        if current is None or threading.get_ident() != self.gate.thread:
            return self.inner(*args, **kwargs)
        handed = current.run(self.index, self.inner, args, kwargs)
        return _copied(handed) if self.gate.is_watched(self.index) else handed


def _copied(output: Any) -> Any:
    return (output[0].clone(),) if isinstance(output, tuple) else output.clone()


@final
@dataclass
class LayerGate:
    """The gate before each layer of a model. Closed to everyone but the thread that made it, and only during its passes.

    Args:
        model (`PreTrainedModel`): The target.
        window ([`Window`], *optional*): The round under way.
    """

    model: Any
    layers: list[torch.nn.Module] = field(init=False)
    thread: int = field(init=False, default_factory=threading.get_ident)
    window: Window | None = field(init=False, default=None)
    current: _Pass | None = field(init=False, default=None)
    _before: list[Any] = field(init=False, default_factory=list)
    _view: CacheView | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.layers = find_layers(self.model)

    def install(self, cache: Cache) -> None:
        """Puts the gate before the layers of a model whose prompt is in `cache`.

        Raises:
            [`UnsupportedModelError`]: If the layers cannot run at different times, or already draft for another call.
        """
        check_layers(cache, len(self.layers), self.model)
        with _installation:
            before = [vars(layer).get("forward") for layer in self.layers]
            if any(isinstance(each, _GatedForward) for each in before):
                raise UnsupportedModelError(
                    f"this {type(undecorated_model(self.model)).__name__} already drafts for itself in another call. Wait for "
                    "it to end, or give each thread a model of its own."
                )
            self._before = before
            try:
                for index, layer in enumerate(self.layers):
                    vars(layer)["forward"] = _GatedForward(self, index, layer.forward)
            except BaseException:  # an interruption
                self.remove()
                raise

    def remove(self) -> None:
        """Takes the gate away again; a second call does nothing."""
        for layer, forward in zip(self.layers, self._before, strict=False):
            if forward is None:
                vars(layer).pop("forward", None)  # an interrupted installation may not have come to it
            else:
                vars(layer)["forward"] = forward
        self._before = []

    def is_watched(self, index: int) -> bool:
        """Whether a hook is shown what a layer hands on, and might write to it."""
        layers = self.layers
        return bool(layers[index]._forward_hooks) or any(
            each._forward_pre_hooks for each in layers[index + 1 : index + 2]
        )

    def open(self, cache: Cache, columns: int, batch_size: int) -> Window:
        """Begins a round over a cache whose layers all hold `columns` entries.

        All rounds of a cache have the same view of it: it is among what is prepared for layers.
        """
        if self._view is None or self._view.layers is not cache.layers:
            self._view = CacheView(cache, columns)
        self._view.columns = columns
        nothing = torch.zeros(batch_size, 0, dtype=torch.long)
        self.window = Window(cache, columns, nothing, [None] * len(self.layers), self._view)
        return self.window

    def close(self) -> None:
        """Ends a round: what its layers hold is the cache's now."""
        self.window = None

    def view(self, cache: Cache) -> Cache:
        """The cache to give to the model: a view while a round is under way, else the cache itself."""
        return cache if self.window is None else self.window.view

    def rise(self, embedded: Tensor, depth: int, prepared: PreparedLayers) -> Tensor:
        """Takes the window's columns up to `depth` layers without the model, and returns all their hidden states there.

        Args:
            embedded (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): What the first layer is given.
            depth (`int`): Layers to run, from the bottom.
            prepared ([`PreparedLayers`]): What else the layers are given.
        """
        if self.window is None:
            raise RuntimeError("no round is under way")
        below = embedded
        with self.passing(depth, prepared=prepared):
            for layer, index in zip(self.layers, range(depth), strict=False):
                args, kwargs = prepared.arguments[index]
                output = layer(below, *args, **kwargs)
                below = output[0] if isinstance(output, tuple) else output
        return below

    @contextmanager
    def passing(
        self,
        depth: int | None = None,
        transform: Transform | None = None,
        prepared: PreparedLayers | None = None,
        columns: int = 0,
    ) -> Iterator[None]:
        """A forward pass that ends at `depth` layers; all of them where it is None.

        With `prepared` and `columns`, only the first `columns` of the columns that the model is called with count, and what
        it gives its layers is kept there; without `columns`, layers are given what was kept.
        """
        if self.window is None:
            raise RuntimeError("no round is under way")
        depth = len(self.layers) if depth is None else depth
        self.current = _Pass(self.window, depth, transform, prepared, columns)
        try:
            yield
        finally:
            self.current = None
