"""The frequent part of a vocabulary, which is all that a draft model's head has to score (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hf_specdec.errors import InvalidConfigError


__all__ = ["DraftVocabulary", "count_tokens", "tokenizer_fingerprint"]

_FORMAT = "hf_specdec.draft_vocabulary"


@final
@dataclass(frozen=True)
class DraftVocabulary:
    """Token ids that a draft model may draft.

    Published (FR-Spec, arXiv 2502.14856, section 3.2): the ids are ranked by their frequency in a corpus, the draft's head
    computes the rows of these ids only, and verification is untouched. Ours: special ids are always kept, ties go to the
    smaller id, and each run adds its prompts' own ids ([`hf_specdec.reduced_head`]).

    Args:
        token_ids (`tuple[int, ...]`): The ids that are kept, the most frequent first.
        vocab_size (`int`): Number of ids of the tokenizer they were counted with.
        fingerprint (`str`): [`tokenizer_fingerprint`] of that tokenizer; empty where it is not known.

    Raises:
        [`InvalidConfigError`]: If there is no id, or one is repeated or outside `[0, vocab_size)`.
    """

    token_ids: tuple[int, ...]
    vocab_size: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(int(each) for each in self.token_ids))
        if not self.token_ids or len(set(self.token_ids)) < len(self.token_ids):
            raise InvalidConfigError("a draft vocabulary needs at least one token id, and each of them once")
        if min(self.token_ids) < 0 or max(self.token_ids) >= self.vocab_size:
            raise InvalidConfigError(
                f"the ids of a draft vocabulary must lie in [0, {self.vocab_size}), got {min(self.token_ids)} to "
                f"{max(self.token_ids)}"
            )

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[int, int],
        size: int,
        *,
        vocab_size: int,
        always: Iterable[int] = (),
        fingerprint: str = "",
    ) -> DraftVocabulary:
        """The `size` most frequent ids, ties by id; ids without a count rank last.

        Args:
            counts (`Mapping[int, int]`): How often each id occurred.
            size (`int`): Number of ids to keep, those of `always` included.
            vocab_size (`int`): Number of ids there are.
            always (`Iterable[int]`): Ids that are kept whatever their count.
            fingerprint (`str`): Of the tokenizer.

        Raises:
            [`InvalidConfigError`]: If `size` is not in `[number of always ids, vocab_size]`.
        """
        kept = set(always)
        if not max(1, len(kept)) <= size <= vocab_size:
            raise InvalidConfigError(
                f"size must lie between {max(1, len(kept))} (the ids that are always kept) and {vocab_size} (the whole "
                f"vocabulary), got {size}"
            )
        ranked = sorted(range(vocab_size), key=lambda token: (-counts.get(token, 0), token))
        frequent = [token for token in ranked if token not in kept][: size - len(kept)]
        chosen = kept.union(frequent)
        return cls(tuple(token for token in ranked if token in chosen), vocab_size, fingerprint)

    @classmethod
    def from_texts(cls, tokenizer: Any, texts: Iterable[str], size: int) -> DraftVocabulary:
        """The ids that are most frequent in `texts`, and every special id of the tokenizer.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The tokenizer of target and draft.
            texts (`Iterable[str]`): A corpus like what will be generated.
            size (`int`): Number of ids to keep.
        """
        return cls.from_tokenizer(tokenizer, count_tokens(tokenizer, texts), size)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, counts: Mapping[int, int], size: int) -> DraftVocabulary:
        """The `size` most frequent ids of a tokenizer's counts, and every special id of the tokenizer."""
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(token for token, each in added.items() if each.special)}
        return cls.from_counts(
            counts, size, vocab_size=len(tokenizer), always=special, fingerprint=tokenizer_fingerprint(tokenizer)
        )

    @classmethod
    def of_heads(cls, heads: Any) -> DraftVocabulary | None:
        """The one that exit heads ([`ExitHeads`]) were fitted to; None where they score the whole vocabulary."""
        if heads is None or heads.draft_ids is None:
            return None
        known = heads.config.draft_vocabulary
        return cls(tuple(heads.draft_ids.tolist()), known["vocab_size"], known["fingerprint"])

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises an [`InvalidConfigError`] if the ids were counted with another tokenizer."""
        if len(tokenizer) == self.vocab_size and self.fingerprint in ("", tokenizer_fingerprint(tokenizer)):
            return
        raise InvalidConfigError(
            f"this draft vocabulary was counted with another tokenizer ({self.vocab_size} ids, fingerprint "
            f"{self.fingerprint[:12] or 'unknown'}) than the target's ({len(tokenizer)} ids, fingerprint "
            f"{tokenizer_fingerprint(tokenizer)[:12]}). Count one with `specdec calibrate vocabulary`"
        )

    def save(self, path: str | Path) -> Path:
        """Writes a safetensors file and returns its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"format": _FORMAT, "vocab_size": str(self.vocab_size), "fingerprint": self.fingerprint}
        path.write_bytes(save({"token_ids": torch.tensor(self.token_ids)}, metadata))
        return path

    @classmethod
    def load(cls, path: str | Path) -> DraftVocabulary:
        """Reads what [`~DraftVocabulary.save`] wrote.

        Raises:
            [`InvalidConfigError`]: If there is no such file, or it holds something else.
        """
        if not Path(path).is_file():
            raise InvalidConfigError(
                f"there is no draft vocabulary at {path}: make one with `specdec calibrate vocabulary`"
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise InvalidConfigError(f"{Path(path).name} is a safetensors file, but no draft vocabulary")
                token_ids = file.get_tensor("token_ids").tolist()
            vocab_size, fingerprint = int(metadata["vocab_size"]), metadata["fingerprint"]
        except SafetensorError as error:
            raise InvalidConfigError(f"{Path(path).name} is not a safetensors file: {error}") from error
        except KeyError as error:
            raise InvalidConfigError(
                f"{Path(path).name} is a draft vocabulary without {error}: make one with `specdec calibrate vocabulary`"
            ) from error
        return cls(tuple(token_ids), vocab_size, fingerprint)


def count_tokens(tokenizer: Any, texts: Iterable[str]) -> Counter[int]:
    """How often each id occurs in the texts, which are read without special tokens."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return counts


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the tokens in the order of their ids, in hexadecimal digits."""
    return _fingerprint(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _fingerprint(tokenizer: Any, size: int) -> str:
    """Kept, since a large vocabulary takes a noticeable time; `size` changes when tokens are added."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
