"""The two tasks of a quality measurement, as what the command needs of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_specdec.quality.gsm8k import EXAMPLES, INSTRUCTION, judge_number, prompt_for, read_questions
from hf_specdec.quality.humaneval import CODE_INSTRUCTION, code_prompt, judge_code, read_problems
from hf_specdec.quality.judging import Item, Judge


__all__ = ["Task", "gsm8k", "humaneval"]


@dataclass(frozen=True)
class Task:
    """How questions are read, put and judged.

    Args:
        read (`Callable[[Path, int | None], Sequence[Item]]`): The first questions of a file.
        prompt (`Callable`): The user's message for a question, with or without an instruction (`instructed=`).
        judge (`Callable[[Item, str], Judgement]`): The verdict on an answer.
        instruction (`str`): The instruction.
        examples (`tuple[tuple[str, str], ...]`): Worked examples.
    """

    read: Callable[[Path, int | None], Sequence[Item]]
    prompt: Callable[..., str]
    judge: Judge
    instruction: str
    examples: tuple[tuple[str, str], ...] = ()


def gsm8k() -> Task:
    """Numbers."""
    return Task(read_questions, prompt_for, judge_number, INSTRUCTION, EXAMPLES)


def humaneval(**limits: Any) -> Task:
    """Programs; `limits` are those of [`judge_code`]."""
    return Task(read_problems, code_prompt, partial(judge_code, **limits), CODE_INSTRUCTION)
