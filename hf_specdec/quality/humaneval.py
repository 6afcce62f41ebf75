"""HumanEval (arXiv 2107.03374): problems, the prompt, the code in an answer, and whether it passes the tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.judging import Judgement
from hf_specdec.quality.sandbox import run_program


__all__ = ["CODE_INSTRUCTION", "Problem", "code_prompt", "judge_code", "program_of", "read_problems"]

CODE_INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function in one code block, and nothing else."
)

_FIELDS = ("prompt", "test", "entry_point")
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
# Where a completed function ends; the published evaluation stops at these.
_END = re.compile(r"\n(?=class |def |#|if |print|@|assert |```)")


@dataclass(frozen=True)
class Problem:
    """One line of the data set.

    Args:
        index (`int`): Its place in the file.
        text (`str`): Signature and docstring.
        tests (`str`): Code that defines `check(candidate)`.
        entry_point (`str`): Name of the function.
    """

    index: int
    text: str
    tests: str
    entry_point: str

    @property
    def answer(self) -> str:
        """What decides whether an answer is right."""
        return f"{self.entry_point} {self.tests}"


def read_problems(file: Path, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of a `.jsonl` file with the fields `prompt`, `test` and `entry_point`, as published.

    Raises:
        [`InvalidConfigError`]: If a line is not of that form; the message names it.
    """
    problems: list[Problem] = []
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    for index, line in enumerate(lines[:limit]):
        try:
            row = json.loads(line)
            texts = [row[name] for name in _FIELDS]
            if not all(isinstance(each, str) for each in texts):
                raise TypeError("a field is no text")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidConfigError(
                f"{file.name}, line {index + 1}: expected a JSON object with the texts {', '.join(_FIELDS)}: {error}"
            ) from error
        problems.append(Problem(index, *texts))
    if not problems:
        raise InvalidConfigError(f"{file.name} holds no problem")
    return problems


def code_prompt(problem: Problem, instructed: bool = True) -> str:
    """The user's message; without an instruction the function's beginning, to be completed as it is. The wording is ours."""
    return f"{CODE_INSTRUCTION}\n\n```python\n{problem.text}```" if instructed else problem.text


def program_of(text: str, problem: Problem) -> str:
    """The program that decides: the function, its tests, and the call that runs them.

    The function is the last code block that defines it, or the problem's text with the answer up to where the function ends.
    """
    defines = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(problem.entry_point)}\b", re.MULTILINE)
    blocks = [block for block in _BLOCK.findall(text) if defines.search(block)]
    if blocks:
        preamble = problem.text[: match.start()] if (match := defines.search(problem.text)) else ""
        code = preamble + "\n" + blocks[-1]
    else:
        code = problem.text + _END.split(text)[0]
    return f"{code}\n\n{problem.tests}\n\ncheck({problem.entry_point})\n"


def judge_code(problem: Problem, text: str, *, max_seconds: int = 10, max_megabytes: int = 1024) -> Judgement:
    """Runs the tests in a sandbox; accuracy is then pass@1. The answer is the outcome of the run."""
    outcome = run_program(program_of(text, problem), max_seconds=max_seconds, max_megabytes=max_megabytes)
    return Judgement(outcome, outcome == "passed")
