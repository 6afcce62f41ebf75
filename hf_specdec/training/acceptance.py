"""The acceptance length of a drafter, as the real inference loop measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec import RCSDConfig
from hf_specdec.networks import DraftNetwork
from hf_specdec.placement import device_of
from hf_specdec.warping import whole_law


__all__ = ["Measured", "acceptance_lengths", "measure"]


@dataclass(frozen=True)
class Measured:
    """What became of one prompt.

    Args:
        tau (`float`): Tokens per round, the bonus token counted; 0.0 if there was no round.
        text (`tuple[int, ...]`): The answer.
    """

    tau: float
    text: tuple[int, ...]


def acceptance_lengths(
    target: Any, network: DraftNetwork, prompts: Sequence[Sequence[int]], *, steps: int, max_new_tokens: int
) -> list[float]:
    """Tokens per round (tau, the bonus token counted) of each prompt, greedy, one prompt at a time.

    A prompt whose answer ends with the prefill's own token has no round and is left out.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The drafter.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        steps (`int`): Tokens drafted per round.
        max_new_tokens (`int`): Length of the answers.
    """
    found = measure(target, network, prompts, steps=steps, max_new_tokens=max_new_tokens)
    return [each.tau for each in found if each.tau]


def measure(
    target: Any,
    network: DraftNetwork,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    max_new_tokens: int,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Measured]:
    """Decodes prompts, several of one length at a time, each row at its own pace and with its own dice.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The drafter.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        steps (`int`): Tokens drafted per round.
        max_new_tokens (`int`): Length of the answers.
        batch_size (`int`): Prompts decoded at once.
        temperature (`float`): 0 decodes greedily; above it, the target's whole law is sampled at this temperature.
        seed (`int`): Of the dice. Neither the drafter nor the batch changes what a prompt's dice show.
    """
    config = RCSDConfig(steps=steps, on_drafter_error="raise")
    found: dict[int, Measured] = {}
    for indices in _batches([len(prompt) for prompt in prompts], batch_size):
        ids = torch.tensor([list(prompts[index]) for index in indices], device=device_of(target))
        output = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=network,
            speculative_config=config,
            row_seeds=[seed * 1_000_003 + index for index in indices],
            **whole_law(temperature),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
        rows, answers = output.speculative_stats.rows, output.sequences[:, ids.shape[1] :].tolist()
        for index, row, answer in zip(indices, rows, answers, strict=True):
            found[index] = Measured(row.tokens_per_round, tuple(answer[: row.num_new_tokens]))
    return [found[index] for index in range(len(prompts))]


def _batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of equal lengths, in batches."""
    alike: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        alike.setdefault(length, []).append(index)
    return [group[start : start + batch_size] for group in alike.values() for start in range(0, len(group), batch_size)]
