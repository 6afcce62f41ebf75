"""What a measurement asks of a data set: questions with a place and a text, and a verdict on answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


__all__ = ["Item", "Judge", "Judgement"]


class Item(Protocol):
    """A question: its place in the file, its text, and what decides whether an answer is right."""

    @property
    def index(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def answer(self) -> Any: ...


@dataclass(frozen=True)
class Judgement:
    """A verdict: what was found in the text, None for nothing, and whether it is right."""

    answer: str | None
    correct: bool


Judge = Callable[[Any, str], Judgement]
