"""The learning curve of a run: one line of JSON for each evaluation, however often the run is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hf_specdec.files import whole_lines, write_at_once


if TYPE_CHECKING:
    from hf_specdec.training.trainer import StepLog


__all__ = ["CURVE", "DrafterCurve", "add_to_curve", "read_curve"]

CURVE = "curve.jsonl"  # in the folder of a run


def read_curve(file: Path) -> list[dict[str, Any]]:
    """What the evaluations of a run found, in their order; empty if there is no such file."""
    return [json.loads(line) for line in whole_lines(file)]


def add_to_curve(file: Path, figures: Mapping[str, Any], place: Callable[[Mapping[str, Any]], Any]) -> None:
    """Adds what an evaluation found, in place of what stands at its place or later: what is done again stands there once.

    Args:
        file (`Path`): The file, which is written at once.
        figures (`Mapping`): What was found.
        place (`Callable[[Mapping[str, Any]], Any]`): Where figures stand in the run, by something that grows with it.
    """
    earlier = [each for each in read_curve(file) if place(each) < place(figures)]
    write_at_once(file, "".join(json.dumps(each) + "\n" for each in [*earlier, figures]).encode())


@final
class DrafterCurve:
    """The curve of a drafter: `step`, `num_tokens` (text tokens read so far; null where a run that is gone on with did not
    count them), `loss` and `acceptance` of that step, see [`StepLog`], and what the evaluation found.

    Args:
        folder (`Path`): Folder of the run.
        stage_ends (`Sequence[int]`): The last step of each stage, counted through all of them; there each has an evaluation.
        resume (`bool`): Whether to go on with the curve that is there.
    """

    def __init__(self, folder: Path, stage_ends: Sequence[int], *, resume: bool) -> None:
        self.file, self.stage_ends = folder / CURVE, tuple(stage_ends)
        if not resume:
            self.file.unlink(missing_ok=True)

    def add(self, log: StepLog) -> None:
        """Adds a step, numbered through all stages, that an evaluation followed; others are left out."""
        if not log.evaluation:
            return
        before = self._tokens_before(log.step)
        num_tokens = None if before is None else before + log.num_tokens
        figures = {"step": log.step, "num_tokens": num_tokens, "loss": log.loss, "acceptance": list(log.acceptance)}
        add_to_curve(self.file, {**figures, **log.evaluation}, lambda each: each["step"])

    def _tokens_before(self, step: int) -> int | None:
        """Tokens of the stages before that of a step."""
        ended = max((end for end in self.stage_ends if end < step), default=0)
        if ended == 0:
            return 0
        known: list[int | None] = [each["num_tokens"] for each in read_curve(self.file) if each["step"] == ended]
        return known[0] if known else None
