"""GSM8K (arXiv 2110.14168): questions, the prompt, and the number that a text answers with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.judging import Judgement


__all__ = [
    "EXAMPLES",
    "INSTRUCTION",
    "Question",
    "extract_answer",
    "is_correct",
    "judge_number",
    "prompt_for",
    "read_questions",
]

INSTRUCTION = (
    'Reason step by step. Then write the final answer, a single number, on a last line of its own after "####".'
)

EXAMPLES = (
    (
        "A box holds 4 rows of 6 pens. Ann keeps 5 pens and sells the rest for 2 dollars each. How many dollars does she "
        "get?",
        "The box holds 4 * 6 = 24 pens.\nAnn keeps 5, so she sells 24 - 5 = 19 pens.\n"
        "Each brings 2 dollars, so she gets 19 * 2 = 38 dollars.\n#### 38",
    ),
    (
        "Tom runs 3 miles on each of 5 days a week. Mia runs half as far as he does in a week. How many miles do the two "
        "run together in 4 weeks?",
        "In a week Tom runs 3 * 5 = 15 miles.\nMia runs half as far, which is 15 / 2 = 7.5 miles.\n"
        "Together they run 15 + 7.5 = 22.5 miles a week.\nIn 4 weeks that is 22.5 * 4 = 90 miles.\n#### 90",
    ),
)

# A minus sign counts only where nothing stands before it that it could subtract from.
_NUMBER = re.compile(
    r"[$\u20ac\u00a3]?(?P<sign>(?<![\w.)\]%])[-\u2212])?[$\u20ac\u00a3]?(?P<size>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
_MARKED = re.compile(r"####\s*([^\n]+)")
_PREFIX = re.compile(r"^.*\banswer\b(?:\s+is\b)?", re.IGNORECASE)
_DECORATION = re.compile(r"^[^\w.$\u20ac\u00a3\u2212-]*")  # such as the asterisks of bold type
_BOXED = re.compile(r"\\boxed\s*\{")
_LATEX = (("{,}", ","), ("\\!", ""), ("\\,", ""), ("\\$", "$"), ("\\%", "%"))


@dataclass(frozen=True)
class Question:
    """One line of the data set.

    Args:
        index (`int`): Its place in the file.
        text (`str`): The question.
        answer (`Decimal`): The number after `####` in the reference answer.
    """

    index: int
    text: str
    answer: Decimal


def read_questions(file: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a `.jsonl` file with the fields `question` and `answer`, as GSM8K is published.

    Raises:
        [`InvalidConfigError`]: If a line is not of that form; the message names it.
    """
    questions: list[Question] = []
    for index, line in enumerate(_lines(file)):
        if len(questions) == limit:
            break
        try:
            row = json.loads(line)
            text, reference = row["question"], row["answer"]
            answer = extract_answer("".join(reference.rpartition("####")[1:])) if "####" in reference else None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidConfigError(
                f"{file.name}, line {index + 1}: expected a JSON object with the texts question and answer: {error}"
            ) from error
        if answer is None:
            raise InvalidConfigError(f"{file.name}, line {index + 1}: the reference answer has no number after ####")
        questions.append(Question(index, text, answer))
    if not questions:
        raise InvalidConfigError(f"{file.name} holds no question")
    return questions


def prompt_for(question: Question, instructed: bool = True) -> str:
    """The user's message: the question, and how to answer it unless worked examples show that. The wording is ours."""
    return f"{question.text}\n\n{INSTRUCTION}" if instructed else question.text


def extract_answer(text: str) -> Decimal | None:
    r"""The number that a text answers with, or None if it holds none.

    In this order: the number that the last `####` announces (the result, where it announces an equation; a heading that
    starts with a word announces nothing), the content of the last `\boxed{}`, the last number of the text.
    """
    for before, after in _LATEX:
        text = text.replace(before, after)
    for line in reversed(_MARKED.findall(text)):
        if (number := _leading_number(line)) is not None:
            return number
    for box in reversed(list(_BOXED.finditer(text))):
        if numbers := _numbers(_in_braces(text, box.end()).rpartition("=")[2]):
            return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def is_correct(text: str, question: Question) -> bool:
    """Whether the text answers with the reference's number; `18`, `18.00` and `$18` are equal."""
    return extract_answer(text) == question.answer


def judge_number(question: Question, text: str) -> Judgement:
    """The number that a text answers with, and whether it is the reference's."""
    answer = extract_answer(text)
    return Judgement(None if answer is None else str(answer), answer == question.answer)


def _leading_number(line: str) -> Decimal | None:
    line = _DECORATION.sub("", _PREFIX.sub("", _BOXED.sub("", line)))
    if _NUMBER.match(line) is None:
        return None
    return next(iter(_numbers(line.rpartition("=")[2]) or _numbers(line)))


def _numbers(text: str) -> list[Decimal]:
    found = _NUMBER.finditer(text)
    return [Decimal(("-" if each["sign"] else "") + each["size"].replace(",", "")) for each in found]


def _in_braces(text: str, start: int) -> str:
    """The text up to the brace that closes the one before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return text[start:]


def _lines(file: Path) -> Iterable[str]:
    return (line for line in file.read_text(encoding="utf-8").split("\n") if line.strip())
