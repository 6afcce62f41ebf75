"""Batches of prompts: what goes into one call of `generate`, and what of its outputs belongs to which row."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from hf_specdec.records import Round
from hf_specdec.sequences import end_tokens


__all__ = ["eos_token_ids", "recorded_round", "row_rounds", "until_end"]


def eos_token_ids(model: Any) -> set[int]:
    """The tokens that end a text by the model's own generation config."""
    return set(end_tokens(model.generation_config.eos_token_id))


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first EOS, which is kept: what follows it in a batch is padding."""
    end = next((place for place, token in enumerate(tokens, start=1) if token in ends), None)
    return tokens[:end]


def recorded_round(round_: Round) -> list[Any]:
    """`[drafted, emitted, source, parts]` as the whole batch pays for it: its rows share one target pass as wide as the
    longest draft, and as many draft steps as the row that took the most."""
    most = max(map(_parts, round_.kinds), key=_num_steps)
    return [int(round_.num_drafted.max()), sum(map(len, round_.emitted)), round_.source, most]


def row_rounds(rounds: Iterable[Round], row: int) -> list[list[Any]]:
    """`[drafted, emitted, source, parts]` of the rounds in which a row was unfinished."""
    return [
        [int(each.num_drafted[row]), len(each.emitted[row]), each.source, _parts(each.kinds[row])]
        for each in rounds
        if each.emitted[row]
    ]


def _parts(stretches: Iterable[tuple[str, int]]) -> list[list[Any]]:
    return [["ngram" if kind.startswith("ngram") else kind, length] for kind, length in stretches]


def _num_steps(parts: list[list[Any]]) -> int:
    return sum(length for source, length in parts if source != "ngram")
