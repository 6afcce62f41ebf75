"""On-policy rounds: the real loop decodes the training prompts with the drafter as it is now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.networks import DraftNetwork
from hf_specdec.placement import device_of
from hf_specdec.training.rcsd.recorder import RoundRecorder
from hf_specdec.training.rcsd.recording import Recording
from hf_specdec.training.texts import Text


__all__ = ["roll_out"]


def roll_out(
    target: Any,
    network: DraftNetwork,
    texts: Sequence[Text],
    *,
    steps: int,
    batch_size: int = 64,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[Recording]:
    """Decodes the prompt of each text greedily to the text's own length, and records the rounds. Greedy texts do not depend
    on the drafter, so texts that the target wrote greedily come out as they are.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The drafter.
        texts (`Sequence[Text]`): The texts.
        steps (`int`): Tokens drafted per round.
        batch_size (`int`): Texts decoded at once; only texts and prompts of one length share a batch.
        on_batch (`Callable[[int, int], None]`, *optional*): Called with the number of texts so far and of all.
    """
    recorder, done = RoundRecorder(), 0
    config = SpeculativeConfig(acceptance=recorder, drafting="model", length=steps, on_drafter_error="raise")
    for (_, num_new), same in groupby(sorted(texts, key=_lengths), key=_lengths):
        alike = list(same)
        for start in range(0, len(alike), batch_size):
            part = alike[start : start + batch_size]
            ids = torch.tensor([text.tokens[: text.num_prompt_tokens] for text in part], device=device_of(target))
            target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=network,
                speculative_config=config,
                round_callback=recorder,
                do_sample=False,
                max_new_tokens=num_new,
            )
            done += len(part)
            if on_batch is not None:
                on_batch(done, len(texts))
    recorder.close()
    return recorder.recordings


def _lengths(text: Text) -> tuple[int, int]:
    return text.num_prompt_tokens, len(text.tokens) - text.num_prompt_tokens
