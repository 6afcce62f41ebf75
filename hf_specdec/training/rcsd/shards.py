"""Recordings on the disk: safetensors shards that appear whole, as many as fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.rcsd.recording import DraftedRound, Recording, TopLaws
from hf_specdec.training.texts import Text


__all__ = ["ShardWriter", "read_shards"]

_NAME = "rounds-{:08d}.safetensors"
_PATTERN = "rounds-*.safetensors"


@final
class ShardWriter:
    """Gathers recordings and writes them in shards.

    Args:
        folder (`Path`): Where to; numbering goes on after what is there.
        texts_per_shard (`int`): Texts in a shard.
        max_shards (`int`): Most shards in the folder; the oldest are deleted.
    """

    def __init__(self, folder: Path, texts_per_shard: int, max_shards: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.texts_per_shard, self.max_shards = folder, texts_per_shard, max_shards
        self._waiting: list[Recording] = []

    def add(self, recording: Recording) -> None:
        """Takes one more; a full shard is written at once."""
        self._waiting.append(recording)
        if len(self._waiting) >= self.texts_per_shard:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if not self._waiting:
            return
        shards = _shards(self.folder)
        number = int(shards[-1].stem.partition("-")[2]) + 1 if shards else 0
        file = self.folder / _NAME.format(number)
        unfinished = file.with_suffix(".unfinished")
        save_file(_to_tensors(self._waiting), unfinished)
        os.replace(unfinished, file)
        self._waiting = []
        for old in [*shards, file][: -self.max_shards]:
            old.unlink()


def read_shards(folder: str | Path) -> Iterator[Recording]:
    """Every recording of a folder, the oldest first.

    Raises:
        [`InvalidConfigError`]: If the folder holds none.
    """
    shards = _shards(Path(folder))
    if not shards:
        raise InvalidConfigError(f"{folder} holds no recorded rounds ({_PATTERN}): write some with a RoundRecorder")
    for shard in shards:
        yield from _from_tensors(load_file(shard))


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob(_PATTERN))


def _to_tensors(recordings: Sequence[Recording]) -> dict[str, Tensor]:
    rounds = [each for recording in recordings for each in recording.rounds]
    laws = [each.laws for each in rounds if each.laws is not None]
    numbers = {
        "tokens": [token for recording in recordings for token in recording.text.tokens],
        "text_lengths": [len(recording.text.tokens) for recording in recordings],
        "prompt_lengths": [recording.text.num_prompt_tokens for recording in recordings],
        "num_rounds": [len(recording.rounds) for recording in recordings],
        "anchors": [each.anchor for each in rounds],
        "accepted": [each.num_accepted for each in rounds],
        "draft_lengths": [len(each.drafts) for each in rounds],
        "drafts": [token for each in rounds for token in each.drafts],
        "choices": [token for each in rounds for token in each.choices],
    }
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in numbers.items()}
    if laws and len(laws) == len(rounds):
        tensors["law_tokens"] = torch.cat([law.tokens for law in laws])
        tensors["law_log_p"] = torch.cat([law.log_p for law in laws])
        tensors["law_tail"] = torch.cat([law.tail for law in laws])
    return tensors


def _from_tensors(tensors: dict[str, Tensor]) -> list[Recording]:
    texts = _split(tensors["tokens"], tensors["text_lengths"])
    lengths = tensors["draft_lengths"]
    laws: list[TopLaws | None] = [None] * len(lengths)
    if "law_tokens" in tensors:
        parts = [tensors[name].split(lengths.tolist()) for name in ("law_tokens", "law_log_p", "law_tail")]
        laws = [TopLaws(*law) for law in zip(*parts, strict=True)]
    drafts, choices = _split(tensors["drafts"], lengths), _split(tensors["choices"], lengths)
    anchors, accepted = tensors["anchors"].tolist(), tensors["accepted"].tolist()
    rounds = [DraftedRound(*row) for row in zip(anchors, drafts, choices, accepted, laws, strict=True)]
    found, first = [], 0
    prompts, counts = tensors["prompt_lengths"].tolist(), tensors["num_rounds"].tolist()
    for tokens, prompt, count in zip(texts, prompts, counts, strict=True):
        found.append(Recording(Text(tokens, prompt), tuple(rounds[first : first + count])))
        first += count
    return found


def _split(values: Tensor, lengths: Tensor) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in values.split(lengths.tolist())]
