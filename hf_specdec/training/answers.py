"""Training texts: prompts, with answers that the target itself writes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import mended_lines
from hf_specdec.placement import device_of
from hf_specdec.training.texts import Text


__all__ = ["answer_prompts", "is_held_out"]


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is for evaluation only; a hash of its text decides, so it never moves between the two sides.

    Args:
        prompt (`str`): The prompt, before any template.
        share (`float`): Share of all prompts that is held out.
    """
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    return number < share * 2**64


def answer_prompts(
    target: Any,
    prompts: Sequence[Sequence[int]],
    file: Path,
    *,
    max_new_tokens: int,
    on_answer: Callable[[int, int], None] | None = None,
) -> list[Text]:
    """Greedy answers of the target, one prompt at a time, each written to `file` at once; what is there is not done again.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Token ids, through the target's own chat template where it has one.
        file (`Path`): A `.jsonl` file of prompts and texts as token ids.
        max_new_tokens (`int`): Length of an answer.
        on_answer (`Callable[[int, int], None]`, *optional*): Called with the number of answers so far and of all.

    Raises:
        [`InvalidConfigError`]: If the file holds answers of another length.
    """
    known = _known(file, max_new_tokens)
    texts = []
    with file.open("a", encoding="utf-8") as lines:
        for index, prompt in enumerate(prompts):
            key = tuple(prompt)
            if key not in known:
                known[key] = _answer(target, list(prompt), max_new_tokens)
                row = {"prompt": prompt, "text": known[key], "max_new_tokens": max_new_tokens}
                lines.write(json.dumps(row) + "\n")
                lines.flush()
            if len(known[key]) >= 3:
                texts.append(Text(tuple(known[key]), len(prompt)))
            if on_answer is not None:
                on_answer(index + 1, len(prompts))
        os.fsync(lines.fileno())
    return texts


def _known(file: Path, max_new_tokens: int) -> dict[tuple[int, ...], list[int]]:
    rows = [json.loads(line) for line in mended_lines(file)]
    if other := {row["max_new_tokens"] for row in rows} - {max_new_tokens}:
        raise InvalidConfigError(
            f"{file} holds answers of up to {max(other)} tokens, not {max_new_tokens}: pass the same length, or write to "
            "another folder"
        )
    return {tuple(row["prompt"]): row["text"] for row in rows}


def _answer(target: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=device_of(target))
    output = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    tokens: list[int] = output[0].tolist()
    return tokens
