"""The rows of a measurement, and the file that keeps them: one line per finished batch, so that a batch is there or not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import whole_lines, write_at_once


__all__ = ["Batch", "Row", "RowsFile"]


@dataclass(frozen=True)
class Row:
    """One question answered by one arm with one seed.

    Args:
        question (`int`): The question's place in the data.
        tokens (`list[int]`): The new tokens, up to and including the EOS token.
        text (`str`): Their text.
        answer (`str`, *optional*): What was found in it: a number, or how the run of its tests ended.
        correct (`bool`): Whether that is the reference's.
        ended (`bool`): Whether an EOS token came before `max_new_tokens`.
        counts (`dict[str, float]`): `num_rounds`, `num_verified_tokens`, `num_accepted_tokens` and the rule's events, for arms
            of this package.
    """

    question: int
    tokens: list[int]
    text: str
    answer: str | None
    correct: bool
    ended: bool
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Questions that one arm answered together.

    Args:
        arm, seed, number (`str`, `int`, `int`): Which arm, seed and batch.
        rows (`list[Row]`): The answers.
        seconds (`float`): Time of the `generate` call.
        decode_seconds (`float`): The same without the prompts' forward passes.
        rate (`float`, *optional*): Rate of a control.
    """

    arm: str
    seed: int
    number: int
    rows: list[Row]
    seconds: float
    decode_seconds: float
    rate: float | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm, self.seed, self.number


@dataclass
class RowsFile:
    """Finished batches on disk. The first line says what was measured, each further one holds a batch.

    Args:
        path (`Path`): The file.
        settings (`dict`): What the rows depend on.
        environment (`dict`): What they were measured with.
        batches (`dict`): The finished batches by their key.
    """

    path: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    batches: dict[tuple[str, int, int], Batch] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RowsFile:
        """What a file holds, also while a run writes it; a last line that is not whole yet is left out.

        Raises:
            [`InvalidConfigError`]: If the file is no file of rows.
        """
        lines = whole_lines(path)
        try:
            header, batches = json.loads(lines[0]), [_batch(json.loads(line)) for line in lines[1:]]
            return cls(path, header["settings"], header["environment"], {batch.key: batch for batch in batches})
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidConfigError(f"{path.name} is no file of rows ({error}): choose another --out") from error

    @classmethod
    def start(cls, path: Path, settings: dict[str, Any], environment: dict[str, Any], *, resume: bool) -> RowsFile:
        """A file to add batches to: a new one, or with `resume` the one that is there, cleared of a line that was cut off.

        Raises:
            [`InvalidConfigError`]: If the file is there and `resume` is not given, or its rows belong to other settings.
        """
        kept = cls.read(path) if path.exists() else None
        if kept is None or not kept.batches:
            file = cls(path, settings, environment)
        elif resume:
            kept.check(settings)
            file = kept
        else:
            raise InvalidConfigError(
                f"{path.name} holds rows already: go on with --resume, or delete it, or choose another --out"
            )
        header = {"settings": file.settings, "environment": file.environment}
        lines = [header, *(asdict(batch) for batch in file.batches.values())]
        write_at_once(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return file

    def check(self, settings: dict[str, Any]) -> None:
        """Raises an [`InvalidConfigError`] that names the differences if the rows belong to other settings."""
        names = [name for name in {**self.settings, **settings} if self.settings.get(name) != settings.get(name)]
        if names:
            differences = "; ".join(
                f"{name}: {self.settings.get(name)!r}, now {settings.get(name)!r}" for name in names
            )
            raise InvalidConfigError(
                f"{self.path.name} belongs to other settings ({differences}): repeat the first command, or choose another --out"
            )

    def add(self, batch: Batch) -> None:
        """Keeps a finished batch, at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(batch)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.batches[batch.key] = batch


def _batch(values: dict[str, Any]) -> Batch:
    return Batch(**{**values, "rows": [Row(**row) for row in values["rows"]]})
