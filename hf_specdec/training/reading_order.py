"""Which texts a step reads: an endless row of permutations that depends on nothing but the seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.texts import Text


__all__ = ["first_place", "texts_of_step", "tokens_until"]


def first_place(num_texts: int, options: TrainingOptions, steps_before: int, *, own_texts: bool) -> int:
    """Where a stage begins to read. A later one reads the texts that come next; one whose texts are its own, as recorded ones
    are, reads them from the beginning of another permutation.

    Args:
        num_texts (`int`): Texts of the stage.
        options ([`TrainingOptions`]): Seed and batch size.
        steps_before (`int`): Steps of earlier stages.
        own_texts (`bool`): Whether no earlier stage has read from these texts.
    """
    read = steps_before * options.batch_size
    return -(-read // num_texts) * num_texts if own_texts else read


def texts_of_step(num_texts: int, options: TrainingOptions, step: int, first: int) -> list[int]:
    """The indices of the texts that a step reads.

    Args:
        num_texts (`int`): Texts of the stage.
        options ([`TrainingOptions`]): Seed and batch size.
        step (`int`): Number of the step in its stage, from 1.
        first (`int`): The [`first_place`] of the stage.
    """
    start = first + (step - 1) * options.batch_size
    places = range(start, start + options.batch_size)
    orders = {
        epoch: _permutation(num_texts, options, epoch)
        for epoch in range(start // num_texts, places[-1] // num_texts + 1)
    }
    return [int(orders[place // num_texts][place % num_texts]) for place in places]


def tokens_until(texts: Sequence[Text], options: TrainingOptions, place: int) -> int:
    """Tokens of the texts before a place (`int`) in the row of permutations."""
    epochs, rest = divmod(place, len(texts))
    lengths = [len(text.tokens) for text in texts]
    begun = _permutation(len(texts), options, epochs)[:rest]
    return epochs * sum(lengths) + sum(lengths[index] for index in begun.tolist())


def _permutation(num_texts: int, options: TrainingOptions, epoch: int) -> Tensor:
    return torch.randperm(num_texts, generator=torch.Generator().manual_seed(options.seed * 1_000_003 + epoch))
