"""The target's hidden states, captured while it decodes and kept until a drafter network has consumed them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import DrafterError, UnsupportedModelError
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.readback import sent


__all__ = ["FeatureStore", "FeatureTap", "TargetFeatures"]


class FeatureTap:
    """Captures chosen entries of the `hidden_states` tuple of a causal LM without asking it for all of them.

    Hooks stand on the tapped modules only while [`~FeatureTap.capture`] is open, and see only the passes of the thread that
    opened it.

    Args:
        model (`PreTrainedModel`): A causal LM, possibly wrapped by PEFT.
        indices (`tuple[int, ...]`): Indices into `hidden_states`: 0 for the embeddings, `i` for the input of layer `i`,
            `num_hidden_layers` for the states after the final norm.

    Raises:
        [`UnsupportedModelError`]: If the layers cannot be found, or an index does not exist.
    """

    def __init__(self, model: Any, indices: tuple[int, ...]) -> None:
        inner = undecorated_model(model)
        self.name = type(inner).__name__
        self.decoder: nn.Module = inner.get_decoder()
        num_layers = inner.config.get_text_config(decoder=True).num_hidden_layers
        self.layers = _layers(self.decoder, num_layers, self.name)
        if outside := [index for index in indices if not 0 <= index <= num_layers]:
            raise UnsupportedModelError(
                f"{self.name} has hidden states 0 to {num_layers}, but the drafter reads {outside}. Was it trained for "
                "another target?"
            )
        self.indices = indices

    @contextmanager
    def capture(self) -> Iterator[_Captured]:
        """Captures until the block is left, by whatever way; several passes follow one another along the columns."""
        captured = _Captured(self.indices, self.name)
        handles = []
        try:
            # No hook that asks for keywords: torch keeps that wish apart from the hook, and a thread in the middle of a call
            # would find the one without the other when the hook is taken away.
            for index in set(self.indices):
                if index == 0:
                    handles.append(self.layers[0].register_forward_pre_hook(captured.reads_input))
                else:
                    source = self.decoder if index == len(self.layers) else self.layers[index - 1]
                    handles.append(source.register_forward_hook(captured.reads_output(index)))
            yield captured
        finally:
            for handle in handles:
                handle.remove()


class _Captured:
    """What one thread's forward passes left at the tapped places."""

    def __init__(self, indices: tuple[int, ...], name: str) -> None:
        self._indices, self._name = indices, name
        self._states: dict[int, list[Tensor]] = {index: [] for index in indices}
        self._thread = threading.get_ident()

    def reads_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before the first layer."""
        if not args:
            raise UnsupportedModelError(
                f"{self._name} names the embeddings when it calls its first layer: tap a later layer"
            )
        self._add(0, args[0])

    def reads_output(self, index: int) -> Callable[..., None]:
        """Hook after what computes entry `index`."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._add(index, output if isinstance(output, Tensor) else output[0])

        return hook

    def _add(self, index: int, states: Tensor) -> None:
        if threading.get_ident() != self._thread:
            return
        if states.ndim != 3:
            raise UnsupportedModelError(
                f"{self._name} carries hidden states of shape {tuple(states.shape)} between its layers; a drafter network "
                "needs (batch, columns, hidden_size)"
            )
        self._states[index].append(states.detach())

    @property
    def features(self) -> Tensor:
        """`(batch, columns, len(indices) * hidden_size)`, the captured states of each column side by side."""
        passes = [self._states[index] for index in self._indices]
        taps = [states[0] if len(states) == 1 else torch.cat(states, 1) for states in passes]
        return torch.cat([tap.to(taps[-1].device) for tap in taps], -1)


class FeatureStore:
    """Features of each row by column, from the first one that nobody has consumed."""

    def __init__(self) -> None:
        self.first_column = 0
        self._states: Tensor | None = None
        self._known: Tensor = torch.zeros(0, dtype=torch.long)

    def begin(self, first_column: int, features: Tensor) -> None:
        """Starts with the features of all columns from `first_column` on. They are not copied: prompts are long."""
        self.first_column, self._states = first_column, features
        self._known = torch.full((len(features),), first_column + features.shape[1])

    def put(self, columns: Tensor, features: Tensor) -> None:
        """Keeps features, also where they replace those of rejected tokens.

        Args:
            columns (`torch.LongTensor` of shape `(batch, width)`): Their columns; -1 for those of filler.
            features (`torch.FloatTensor` of shape `(batch, width, features)`): The features.
        """
        places = columns - self.first_column
        wanted = places >= 0
        self._reserve(len(columns), int(places.max()) + 1, features)
        assert self._states is not None
        first, width = int(places[0, 0]), places.shape[1]
        if bool((places == torch.arange(first, first + width)).all()) and first >= 0:
            self._states[:, first : first + width] = features[:, :width]
        else:
            rows, slots = wanted.nonzero(as_tuple=True)
            index = (sent(each, features.device) for each in (rows, places[wanted], slots))
            row, place, slot = index
            self._states[row, place] = features[row, slot]
        # What stands behind a gap is not known: in the gap there is anything.
        joins = torch.where(columns >= 0, columns, self._known[:, None]).min(-1).values <= self._known
        self._known = torch.where(joins, torch.maximum(self._known, columns.max(-1).values + 1), self._known)

    def take(self, columns: Tensor) -> Tensor:
        """`(batch, width, features)` at `columns` (`(batch, width)`); anything finite where a column is -1.

        Raises:
            [`DrafterError`]: If a column's features were never put, or have been dropped.
        """
        missing = (columns >= self._known[:, None]) | ((columns >= 0) & (columns < self.first_column))
        if self._states is None or bool(missing.any()):
            raise DrafterError(
                f"features of columns {columns[missing].tolist()} are not known (known from {self.first_column} up to "
                f"{self._known.tolist()}): the drafter must see every forward pass of its target"
            )
        places = (columns - self.first_column).clamp(min=0)
        first, width = int(places[0, 0]), places.shape[1]
        if bool((places == torch.arange(first, first + width)).all()):
            return self._states[:, first : first + width]
        places = sent(places, self._states.device)
        return self._states.gather(1, places[..., None].expand(-1, -1, self._states.shape[-1]))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies the features of `source` columns to `target` columns, both `(batch, width)` with -1 for none."""
        assert self._states is not None
        row, step = (target >= 0).nonzero(as_tuple=True)
        device = self._states.device
        places = [sent((each[row, step] - self.first_column), device) for each in (source, target)]
        row = sent(row, device)
        self._states[row, places[1]] = self._states[row, places[0]]

    def keep_rows(self, kept: Tensor) -> None:
        """Forgets all rows but those at the places `kept` (`(kept,)`)."""
        if self._states is not None:
            kept_there = sent(kept, self._states.device)
            self._states, self._known = self._states[kept_there], self._known[kept]

    def clear(self) -> None:
        """Forgets everything."""
        self._states, self._known = None, torch.zeros_like(self._known)

    def drop_before(self, column: int) -> None:
        """Forgets the features of all columns before `column`."""
        if self._states is not None and column > self.first_column:
            self._states = self._states[:, column - self.first_column :].clone()
            self.first_column = column

    def _reserve(self, batch_size: int, width: int, features: Tensor) -> None:
        if self._states is None:
            self._states = features.new_zeros(batch_size, width, features.shape[-1])
            self._known = torch.zeros(batch_size, dtype=torch.long)
        elif width > self._states.shape[1]:
            room = max(width - self._states.shape[1], 64)
            self._states = nn.functional.pad(self._states, (0, 0, 0, room))


class TargetFeatures:
    """Follows a target through one `generate` call and stores its features.

    Args:
        model (`PreTrainedModel`): The target.
        indices (`tuple[int, ...]`): What to tap; see [`FeatureTap`].
    """

    def __init__(self, model: Any, indices: tuple[int, ...]) -> None:
        self.tap = FeatureTap(model, indices)
        self.store = FeatureStore()
        self.start = 0
        self._target: PrefixLM | None = None
        self._stopped = False

    @contextmanager
    def of_prompt(self, prompt_columns: int) -> Iterator[None]:
        """Stores what the prompt's forward pass shows: its last columns only, where a cache held the first ones already."""
        with self.tap.capture() as captured:
            yield
        features = captured.features
        self.start = max(0, prompt_columns - features.shape[1])
        self.store.begin(self.start, features[:, features.shape[1] + self.start - prompt_columns :])

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The target's forward call, with its features stored."""

        def watched(**inputs: Any) -> Any:
            if self._stopped:
                return forward(**inputs)
            with self.tap.capture() as captured:
                outputs = forward(**inputs)
            if self._target is None:
                raise RuntimeError("follow() names the target whose passes these are")
            self.store.put(self._target.fed_columns, captured.features)
            return outputs

        return watched

    def follow(self, target: PrefixLM) -> None:
        """Says whose forward call [`~TargetFeatures.around`] wraps; it knows the columns that were fed."""
        self._target = target

    def stop(self) -> None:
        """Stores nothing more: the drafter that read it is gone."""
        self._stopped = True
        self.store.clear()


def _layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(
        f"{name} has no list of its {num_layers} layers, so a drafter network cannot read its hidden states"
    )
