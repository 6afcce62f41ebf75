"""What two models say along given texts, a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.errors import InvalidConfigError
from hf_specdec.prefix_lm import PrefixLM


__all__ = ["Text", "logits_along"]

Text = str | Sequence[int] | Tensor | tuple[str, str]

_POSITIONS_PER_PASS = 128  # of a model
_POSITIONS_PER_STEP = 32  # of the statistics, which need several fp32 tensors of this many laws


def logits_along(
    target: Any,
    draft: Any,
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    max_tokens: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Teacher-forced logits of both models at every position whose next token a text holds.

    Args:
        target, draft (`PreTrainedModel`): The two models. Vocabularies may be padded differently, as in decoding.
        texts (sequence of `str`, token ids, or pairs `(prompt, text)` of `str`): What to read; strings need `tokenizer`. The
            positions of a pair's prompt are read but not told.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        max_tokens (`int`): Longest part of a text that is read, prompt included.
        progress (`Callable`, *optional*): Called with the number of texts read and of all texts.

    Yields:
        Logits of the target and of the draft, in fp32, of shape `(positions, vocab)`, never of two texts at once.

    Raises:
        [`InvalidConfigError`]: If an argument is out of range, or the texts hold no position.
    """
    if max_tokens < 2:
        raise InvalidConfigError(f"max_tokens must be at least 2, got {max_tokens}")
    found = False
    for index, text in enumerate(texts):
        tokens, first = _token_ids(text, tokenizer)
        tokens = tokens[:max_tokens]
        if len(tokens) - 1 > first:
            found = True
            yield from _one_text(target, draft, tokens, first)
        if progress is not None:
            progress(index + 1, len(texts))
    if not found:
        raise InvalidConfigError("the texts hold no position to measure: each needs at least two tokens")


def _one_text(target: Any, draft: Any, tokens: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The positions `first .. len(tokens) - 2`, a few at a time: laws over a whole text would not fit."""
    models = [(model, PrefixLM(model)) for model in (target, draft)]
    for start in range(first, len(tokens) - 1, _POSITIONS_PER_PASS):
        stop = min(start + _POSITIONS_PER_PASS, len(tokens) - 1)
        target_logits, draft_logits = (_logits(model, lm, tokens[:stop], stop - start) for model, lm in models)
        for step in range(0, stop - start, _POSITIONS_PER_STEP):
            rows = slice(step, step + _POSITIONS_PER_STEP)
            ours = target_logits[rows].float()
            yield ours, fit_vocabulary(draft_logits[rows], ours.shape[-1]).to(ours.device, torch.float32)


def _logits(model: Any, lm: PrefixLM, prefix: Tensor, num_positions: int) -> Tensor:
    """`(num_positions, vocab)`, the logits at the last positions of a prefix; what was read before lies in the cache."""
    rows = undecorated_model(model).get_input_embeddings().weight.shape[0]
    lengths, last = torch.tensor([len(prefix)]), torch.tensor([num_positions])
    return lm.score(prefix[None].clamp(max=rows - 1), lengths, last)[0]


def _token_ids(text: Text, tokenizer: Any) -> tuple[Tensor, int]:
    """The tokens, and the first position to count: the one that predicts the first token after the prompt."""
    if isinstance(text, str):
        return torch.tensor(_tokenizer(tokenizer)(text)["input_ids"], dtype=torch.long), 0
    if isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str) and isinstance(text[1], str):
        prompt = _tokenizer(tokenizer)(text[0])["input_ids"]
        answer = tokenizer(text[1], add_special_tokens=False)["input_ids"]
        return torch.tensor([*prompt, *answer], dtype=torch.long), max(0, len(prompt) - 1)
    tokens = torch.as_tensor(text).cpu()
    if tokens.ndim != 1 or tokens.is_floating_point():
        raise InvalidConfigError(
            "a text must be a string, a pair (prompt, text) of strings, or one row of token ids, got shape "
            f"{tuple(tokens.shape)}, {tokens.dtype}"
        )
    return tokens.long(), 0


def _tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InvalidConfigError("texts that are strings need the target's tokenizer: pass tokenizer=...")
    return tokenizer
