"""What the tests of self-drafting share: exits that leave and draft as they are told to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from hf_specdec import SelfDraftConfig
from hf_specdec.drafters.self_draft import SelfDrafter, _Exit
from hf_specdec.layer_gate import find_layers
from tests.toys import prompts


__all__ = [
    "CONFIG",
    "EXITS",
    "LAYERS",
    "PROMPT",
    "TOKENS",
    "Director",
    "decode",
    "directed",
    "layer_calls",
    "sometimes",
    "wanders",
]

LAYERS, PROMPT, TOKENS = 6, 7, 18
EXITS = (1, 2, 4)
CONFIG = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.0, length=4, on_drafter_error="raise")


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


def wanders(row, column, depth):
    return (row + column) % 5 < depth


def sometimes(row, column):
    return (row + column) % 3 != 0


def decode(model, batch_size=1, config=CONFIG, **options):
    return model.generate(
        **prompts(batch_size),
        do_sample=False,
        pad_token_id=0,
        **{"max_new_tokens": TOKENS, "return_dict_in_generate": True} | options,
        **({} if config is None else {"speculative_config": config}),
    )


def directed(model, batch_size=1, right=sometimes, leaves=wanders, **options):
    reference = decode(model, batch_size, None).sequences
    with Director(reference, right, leaves).directing():
        return decode(model, batch_size, **options)
