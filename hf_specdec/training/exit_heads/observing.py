"""What the frozen target shows along a text, and what it says of other states in place of its last layer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from hf_specdec.layer_gate import find_layers
from hf_specdec.placement import device_of
from hf_specdec.reduced_head import reduce_head
from hf_specdec.training.texts import Text


__all__ = ["Observation", "Observer", "num_positions"]


def num_positions(text: Text) -> int:
    """Columns of a text that are fitted to: those that predict its answer, but never its very first one."""
    return len(text.tokens) - _first_position(text)


def _first_position(text: Text) -> int:
    return max(text.num_prompt_tokens - 1, 1)


@dataclass(frozen=True)
class Observation:
    """One pass of the target.

    Args:
        states (`dict[int, torch.FloatTensor]`): By number of layers, the hidden states `(1, columns, hidden_size)`.
        final (`torch.FloatTensor` of shape `(1, positions, hidden_size)`): What the final norm sees.
        logits (`torch.FloatTensor` of shape `(1, positions, vocab)`): The target's, of the positions that count.
        first (`int`): The first of these columns; they are the last ones.
    """

    states: dict[int, Tensor]
    final: Tensor
    logits: Tensor
    first: int

    @property
    def num_positions(self) -> int:
        """How many columns count."""
        return int(self.final.shape[1])


@final
class Observer:
    """Reads texts with a target, of which nothing is changed.

    Args:
        target (`PreTrainedModel`): A causal LM in evaluation mode.
        exits (`Sequence[int]`): Numbers of layers whose hidden states are wanted.
        vocabulary (`Sequence[int]`, *optional*): Ids that logits are computed for; all by default.
        more (`Sequence[int]`): Further ids beside those of the vocabulary.
    """

    def __init__(
        self, target: Any, exits: Sequence[int], vocabulary: Sequence[int] | None = None, more: Sequence[int] = ()
    ) -> None:
        self.layers = find_layers(target)
        self.exits = tuple(exits)
        self.target = target
        self.vocabulary = None if vocabulary is None else torch.tensor((*vocabulary, *more))
        self.reader = target if vocabulary is None else reduce_head(target, tuple(vocabulary), tuple(more))
        self._kept = None if vocabulary is None else tuple(vocabulary)
        self._returns_tuple: bool | None = None  # unknown until a text was read

    def beside(self, tokens: Iterable[int]) -> Observer:
        """An observer whose logits are also those of `tokens`, as a run adds the ids of its prompt to a draft vocabulary."""
        if self._kept is None:
            return self
        return Observer(self.target, self.exits, self._kept, sorted(set(tokens).difference(self._kept)))

    def ids_of(self, places: Tensor) -> Tensor:
        """The token ids that places in the logits stand for."""
        return places if self.vocabulary is None else self.vocabulary.to(places.device)[places]

    @torch.no_grad()
    def observe(self, text: Text, *, whole: bool = False) -> Observation:
        """The target's states and logits along a text; with `whole`, logits of all ids whatever the vocabulary."""
        ids = torch.tensor([text.tokens], device=device_of(self.target))
        first, states = _first_position(text), dict[int, Tensor]()
        reader = self.target if whole else self.reader
        with self._capturing(states):
            logits = reader(input_ids=ids, use_cache=False).logits[:, first:]
        final = states[len(self.layers)][:, first:]
        return Observation({depth: states[depth] for depth in self.exits}, final, logits.float(), first)

    def readout(self, states: Tensor) -> Tensor:
        """The logits of states that stand for the last layer's, through the model's own norm, head, soft cap and scale.

        Args:
            states (`torch.FloatTensor` of shape `(1, columns, hidden_size)`): The states; gradients flow to them.
        """
        if self._returns_tuple is None:
            self.observe(Text((0, 0, 0), 0))
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=device_of(self.target))
        states = states.to(ids.device, self.target.dtype)
        result = (states,) if self._returns_tuple else states
        with _replaced(self.layers, result):
            logits: Tensor = self.reader(input_ids=ids, use_cache=False).logits.float()
        return logits

    @contextmanager
    def _capturing(self, states: dict[int, Tensor]) -> Iterator[None]:
        handles = []
        try:
            for depth in {*self.exits, len(self.layers)}:
                handles.append(self.layers[depth - 1].register_forward_hook(self._keeps(states, depth)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keeps(self, states: dict[int, Tensor], depth: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._returns_tuple = not isinstance(output, Tensor)
            states[depth] = (output[0] if self._returns_tuple else output).detach().float()

        return hook


@contextmanager
def _replaced(layers: list[nn.Module], result: Any) -> Iterator[None]:
    """Within it, every layer returns `result`."""
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = lambda *args, **kwargs: result
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward
