"""What CSD learns: how often each pair of drafted and wanted token was met."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, final

import torch
from safetensors.torch import save_file

from hf_specdec.acceptance.tagged_file import read_tagged
from hf_specdec.errors import InvalidConfigError


__all__ = ["MEMORY_NAME", "CorrectionMemory", "check_pair", "pair_fingerprint"]

MEMORY_NAME = "memory.safetensors"  # in a folder

_FORMAT = "hf_specdec.correction_memory.v1"
# What differs between copies of one checkpoint.
_VOLATILE = ("_name_or_path", "torch_dtype", "dtype", "transformers_version", "_attn_implementation")


@final
class CorrectionMemory:
    """Counts of `(draft token, target token)` pairs, bounded; several runs may share one (updates are locked).

    Published (arXiv 2604.13634, as summarised): a table from such pairs to counts, filled offline and updated online. Ours:
    the bound, which drops the rarest pairs first and of equally rare ones those not met for longest, and the fingerprint.

    Args:
        max_entries (`int`): Most pairs to keep. A full memory is cut by a tenth.
        fingerprint (`str`): Which pair of models the counts are about, see [`pair_fingerprint`]; empty for unknown.
    """

    def __init__(self, max_entries: int = 200_000, fingerprint: str = "") -> None:
        if max_entries < 1:
            raise InvalidConfigError(f"max_entries must be at least 1, got {max_entries}")
        self.max_entries = max_entries
        self.fingerprint = fingerprint
        self._counts: dict[tuple[int, int], int] = {}  # the least recently updated pair first
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CorrectionMemory):
            return NotImplemented
        return (self._counts, self.max_entries, self.fingerprint) == (
            other._counts,
            other.max_entries,
            other.fingerprint,
        )

    __hash__ = None  # type: ignore[assignment] # it changes

    def __repr__(self) -> str:
        return f"CorrectionMemory({len(self)} of {self.max_entries} pairs, fingerprint={self.fingerprint!r})"

    def count(self, draft_token: int, target_token: int) -> int:
        """How often the pair was met; 0 for one that was never met or was dropped."""
        with self._lock:
            return self._counts.get((draft_token, target_token), 0)

    def items(self) -> list[tuple[tuple[int, int], int]]:
        """All `(draft token, target token)` pairs with their counts."""
        with self._lock:
            return list(self._counts.items())

    def familiar(self, target_tokens: Iterable[int], threshold: float) -> dict[int, list[int]]:
        """By target token, the draft tokens that were met with it more than `threshold` times; passes over the memory."""
        found: dict[int, list[int]] = {token: [] for token in target_tokens}
        with self._lock:
            for (draft, target), count in self._counts.items():
                if count > threshold and target in found:
                    found[target].append(draft)
        return found

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Counts each `(draft token, target token)` pair once more."""
        with self._lock:
            for pair in pairs:
                self._counts[pair] = self._counts.pop(pair, 0) + 1
            self._shrink()

    def merge(self, other: CorrectionMemory) -> None:
        """Adds the counts of another memory to this one. An empty one without a fingerprint takes the other's.

        Raises:
            [`InvalidConfigError`]: If the two are about different pairs of models, or only one of them says which its counts
                are about.
        """
        _check_fingerprints(self.fingerprint, other.fingerprint)
        counts = other.items()
        for known, unknown, number in ((self, other, len(counts)), (other, self, len(self))):
            if known.fingerprint and not unknown.fingerprint and number:
                raise InvalidConfigError(
                    f"a memory of {number} pairs without a fingerprint does not go together with one of the pair of models "
                    f"{known.fingerprint}: set its fingerprint first, if it is about the same pair"
                )
        with self._lock:
            self.fingerprint = self.fingerprint or other.fingerprint
            for pair, count in counts:
                self._counts[pair] = self._counts.pop(pair, 0) + count
            self._shrink()

    def claim(self, target_config: Any, draft_config: Any) -> None:
        """Takes the fingerprint of the pair of models that begins to fill it; one with counts, or a fingerprint, keeps what it
        has."""
        if not self._counts and not self.fingerprint:
            self.fingerprint = pair_fingerprint(target_config, draft_config)

    def copy(self) -> CorrectionMemory:
        """A memory of its own with the same counts."""
        twin = CorrectionMemory(self.max_entries, self.fingerprint)
        with self._lock:
            twin._counts = dict(self._counts)
        return twin

    def save(self, path: str | Path) -> None:
        """Writes the memory to a `.safetensors` file."""
        with self._lock:
            counts = dict(self._counts)
        pairs = torch.tensor(list(counts), dtype=torch.int64).view(-1, 2)
        tensors = {"pairs": pairs, "counts": torch.tensor(list(counts.values()), dtype=torch.int64)}
        about = {"format": _FORMAT, "fingerprint": self.fingerprint, "max_entries": str(self.max_entries)}
        save_file(tensors, Path(path), metadata=about)

    @classmethod
    def load(cls, path: str | Path, fingerprint: str = "") -> CorrectionMemory:
        """Reads a saved memory.

        Args:
            path (`str` or `Path`): The file, or a folder that `specdec calibrate csd` wrote.
            fingerprint (`str`): The pair of models that is going to use it; empty to take it as it is.

        Raises:
            [`InvalidConfigError`]: If the file is missing, damaged, none of ours, or about another pair of models.
        """
        path = Path(path) / MEMORY_NAME if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise InvalidConfigError(f"there is no correction memory at {path}: write one with CorrectionMemory.save")
        about, tensors = read_tagged(path, _FORMAT)
        try:
            max_entries, learnt_from = int(about["max_entries"]), about["fingerprint"]
            pairs, counts = tensors["pairs"].tolist(), tensors["counts"].tolist()
            known = {(draft, target): count for (draft, target), count in zip(pairs, counts, strict=True)}
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidConfigError(
                f"{path} lacks parts of a correction memory ({error}): make one with `specdec calibrate csd`"
            ) from error
        _check_fingerprints(fingerprint, learnt_from)
        memory = cls(max_entries, learnt_from)
        memory._counts = known
        return memory

    def _shrink(self) -> None:
        if len(self._counts) <= self.max_entries:
            return
        surplus = len(self._counts) - max(1, self.max_entries - self.max_entries // 10)
        # `nsmallest` is stable: of equal counts the pair that stands first, the least recently updated one, goes first.
        for pair, _ in heapq.nsmallest(surplus, self._counts.items(), key=lambda item: item[1]):
            del self._counts[pair]


def pair_fingerprint(target_config: Any, draft_config: Any) -> str:
    """A digest of the two models' configurations (`PreTrainedConfig`), revisions included where they are known."""
    described = [
        {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
        | {"revision": getattr(config, "_commit_hash", None)}
        for config in (target_config, draft_config)
    ]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]


def check_pair(fingerprint: str, target_config: Any, draft_config: Any) -> None:
    """Raises an [`InvalidConfigError`] if a fingerprint is not that of these two models."""
    _check_fingerprints(pair_fingerprint(target_config, draft_config), fingerprint)


def _check_fingerprints(expected: str, found: str) -> None:
    if expected and found and expected != found:
        raise InvalidConfigError(
            f"this was learnt from another pair of models: expected fingerprint {expected}, got {found}. Start a new one for "
            "this pair, with `specdec calibrate` or `specdec train`"
        )
