"""The acceptance length of a drafter, as the real inference loop measures it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec import RCSDConfig
from hf_specdec.networks import DraftNetwork


__all__ = ["acceptance_lengths"]


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
    config, lengths = RCSDConfig(steps=steps, on_drafter_error="raise"), []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        output = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=network,
            speculative_config=config,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
        if output.speculative_stats.num_rounds:
            lengths.append(output.speculative_stats.tokens_per_round)
    return lengths
