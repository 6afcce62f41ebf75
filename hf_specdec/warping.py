"""Applying logits processors to the positions of a draft, each with the prefix it would see in plain decoding."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec._compat import POSITION_FREE_PROCESSORS, ROW_INDEPENDENT_CRITERIA, ROW_INDEPENDENT_PROCESSORS
from hf_specdec.readback import sent


__all__ = ["are_row_independent", "needs_prefix", "only_row_independent", "warp", "whole_law"]


def whole_law(temperature: float | None) -> dict[str, Any]:
    """Options of `generate` that sample the model's law at a temperature, without top-k and top-p; for 0 or None those of
    greedy decoding."""
    return (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )


def only_row_independent(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors a drafter may apply: those known to keep no state."""
    return LogitsProcessorList([each for each in processors if type(each) in ROW_INDEPENDENT_PROCESSORS])


def are_row_independent(processors: LogitsProcessorList, criteria: list) -> bool:
    """Whether every part is known to judge each row by its own prefix without keeping state.

    The exact type is asked for: a subclass of a known class may do anything.
    """
    return all(type(each) in ROW_INDEPENDENT_PROCESSORS for each in processors) and all(
        type(each) in ROW_INDEPENDENT_CRITERIA for each in criteria
    )


def needs_prefix(processors: LogitsProcessorList) -> bool:
    """Whether some processor looks at more than the scores."""
    return not all(type(each) in POSITION_FREE_PROCESSORS for each in processors)


def warp(processors: LogitsProcessorList, tokens: Tensor, lengths: Tensor, logits: Tensor) -> Tensor:
    """Processed copies of the logits at the last positions of each row.

    Args:
        processors (`LogitsProcessorList`): Row-independent processors.
        tokens (`torch.LongTensor` of shape `(batch, columns)`): Prefixes.
        lengths (`torch.LongTensor` of shape `(batch,)`): The prefix length that column 0 of `logits` follows.
        logits (`torch.FloatTensor` of shape `(batch, width, vocab)`): Raw logits; column `i` follows the first
            `lengths[b] + i` tokens. Never changed in place.

    Returns:
        Scores of the same shape.
    """
    if not processors:
        return logits
    batch_size, width, vocab_size = logits.shape
    if not needs_prefix(processors):
        unused = torch.zeros(batch_size * width, 1, dtype=torch.long, device=logits.device)
        return processors(unused, logits.reshape(-1, vocab_size).clone()).view(batch_size, width, vocab_size)
    tokens = sent(tokens, logits.device)
    ends = lengths.tolist()
    rows = []
    for row in range(batch_size):
        own = processors if batch_size == 1 else LogitsProcessorList([_of_row(each, row) for each in processors])
        steps = [own(tokens[row : row + 1, : ends[row] + i], logits[row, i : i + 1].clone()) for i in range(width)]
        rows.append(torch.cat(steps))
    return torch.stack(rows)


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """The processor as one row needs it: a repetition penalty holds the padding of every row of the batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[row : row + 1]
    return own
