"""What the tests of self-drafting share: exits that leave and draft as they are told to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from hf_specdec.drafters.self_draft import SelfDrafter, _Exit
from hf_specdec.layer_gate import find_layers


__all__ = ["Director", "layer_calls"]


class Director:
    """Runs the real exits and replaces what they say.

    Args:
        reference: `(batch, length)`, plain decoding's texts.
        right: Whether the draft at a column is plain decoding's token, of `(row, column)`.
        leaves: Whether the token leaves at an exit, of `(row, column, depth)`.
    """

    def __init__(
        self,
        reference: Tensor,
        right: Callable[[int, int], bool] = lambda row, column: True,
        leaves: Callable[[int, int, int], bool] = lambda row, column, depth: True,
    ) -> None:
        self.reference, self.right, self.leaves = reference, right, leaves

    def exit(self, row: int, column: int, depth: int, vocab_size: int) -> tuple[bool, int]:
        """Whether the row leaves, and the token it drafts for `column`."""
        text = self.reference[row].tolist()
        token = text[column] if column < len(text) else 1
        return self.leaves(row, column, depth), token if self.right(row, column) else (token + 1) % vocab_size

    @contextmanager
    def directing(self) -> Iterator[None]:
        original = SelfDrafter._exit_after

        def exit_after(drafter: SelfDrafter, depth: int, growing, going: Tensor) -> _Exit:
            real = original(drafter, depth, growing, going)
            said = [
                self.exit(row, int(length), depth, real.logits.shape[-1]) for row, length in enumerate(growing.lengths)
            ]
            logits = torch.full_like(real.logits, -5.0)
            logits[torch.arange(len(said)), torch.tensor([token for _, token in said])] = 5.0
            leaves = torch.tensor([leaves for leaves, _ in said])
            return _Exit(torch.where(leaves, depth, 0), torch.ones(len(said)), logits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SelfDrafter, "_exit_after", exit_after)
            yield


@contextmanager
def layer_calls(model) -> Iterator[list[tuple[int, int]]]:
    """Notes `(layer, tokens)` of every call that really reaches a decoder layer."""
    calls: list[tuple[int, int]] = []
    layers = find_layers(model)
    kind = type(layers[0])
    number = {id(layer): index for index, layer in enumerate(layers)}
    original = kind.forward

    def forward(layer, hidden_states, *args, **kwargs):
        if id(layer) in number:
            calls.append((number[id(layer)], hidden_states.shape[1]))
        return original(layer, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        yield calls
