"""Which models can take part, and how a draft model is fitted to its target: vocabularies and tokenizers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_specdec._compat import OWN_GENERATE_CLASSES, undecorated_model, virtual_tokens
from hf_specdec.errors import IncompatibleDraftError, UnsupportedModelError


__all__ = ["check_model", "check_tokenizers", "fit_vocabulary", "saved_tokenizer", "tell_few_acceptances"]

logger = logging.getLogger(__name__)

# A drafter network that reads other layers than those it was trained on is hardly ever right; 1.2 % was reported where they
# were off by one.
_FEW, _JUDGED = 0.05, 100


def check_model(model: Any) -> None:
    """Raises an [`UnsupportedModelError`] that names the class if it cannot be decoded speculatively.

    Args:
        model (`PreTrainedModel`): A target or a draft model, possibly wrapped by PEFT.
    """
    prompt = virtual_tokens(model)
    model = undecorated_model(model)
    name = type(model).__name__
    if prompt is not None:
        raise UnsupportedModelError(
            f"{name} has PEFT's virtual tokens before its text ({prompt}); PEFT then feeds one token per pass, and drafts "
            "cannot be checked. Call it without `speculative_config`, or use an adapter without virtual tokens, such as LoRA."
        )
    if name in OWN_GENERATE_CLASSES:
        raise UnsupportedModelError(
            f"{name} brings its own `generate`, which is not the loop over one causal LM that hf_specdec speeds up. Call it "
            "without `speculative_config`."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; hf_specdec decodes decoder-only models.")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state from which rejected drafts cannot be taken back. Call it without "
            "`speculative_config`."
        )


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits `(..., draft_vocab)` on the target's vocabulary, `(..., vocab_size)`.

    Models of one tokenizer may pad their vocabularies differently: ids that the target lacks are cut off, ids that the
    drafter lacks get no probability.
    """
    missing = vocab_size - logits.shape[-1]
    logits = logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits


def check_tokenizers(
    target: Any,
    draft: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Refuses a draft model that counts its tokens differently.

    Tokenizers that were not given are looked for where the models were loaded from, in the local cache only.

    Returns:
        Whether the tokenizers could be compared. Where they could not, one warning is given per process.

    Raises:
        [`IncompatibleDraftError`]: If the two vocabularies assign different ids.
    """
    if undecorated_model(target) is undecorated_model(draft):
        return True
    names = [undecorated_model(model).config.name_or_path for model in (target, draft)]
    if tokenizer is None and draft_tokenizer is None:
        same = _saved_tokenizers_agree(*names) if all(names) else None
    else:
        first = tokenizer if tokenizer is not None else saved_tokenizer(names[0])
        second = draft_tokenizer if draft_tokenizer is not None else saved_tokenizer(names[1])
        same = None if first is None or second is None else _agree(first, second)
    if same is False:
        raise IncompatibleDraftError(
            f"the draft model {names[1] or type(draft).__name__} uses another tokenizer than the target "
            f"{names[0] or type(target).__name__}: the same ids stand for different tokens. Use a draft model of the target's "
            'family, or drafting="ngram"'
        )
    if same is None:
        _warn_once()
    return same is not None


def _agree(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether all tokens that both know have the same id, and each knows most of the other's."""
    ours, theirs = first.get_vocab(), second.get_vocab()
    shared = ours.keys() & theirs.keys()
    return len(shared) >= 0.9 * min(len(ours), len(theirs)) and all(ours[token] == theirs[token] for token in shared)


@lru_cache(maxsize=8)
def saved_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was saved beside a checkpoint, from the local cache only; None where there is none."""
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError):
        return None


@lru_cache(maxsize=64)
def _saved_tokenizers_agree(first: str, second: str) -> bool | None:
    if first == second:
        return True
    ours, theirs = saved_tokenizer(first), saved_tokenizer(second)
    return None if ours is None or theirs is None else _agree(ours, theirs)


def tell_few_acceptances(target: str, taps: Sequence[int], num_accepted: int, num_judged: int) -> None:
    """Warns, once for each target and choice of layers, where hardly any draft of a drafter network was accepted: the text is
    right whatever it reads, so nothing else would tell. The bounds are ours: 5 % of at least 100 drafts that were judged.

    Args:
        target (`str`): Name of the target's class.
        taps (`Sequence[int]`): Indices into the target's `hidden_states` that the network reads.
        num_accepted, num_judged (`int`): Drafts of a run.
    """
    if num_judged >= _JUDGED and num_accepted < _FEW * num_judged:
        _warn_of_few(target, tuple(taps))


@lru_cache(maxsize=64)
def _warn_of_few(target: str, taps: tuple[int, ...]) -> None:
    logger.warning(
        "The drafter network's drafts were accepted in less than %.0f %% of the places where they were judged. It reads the "
        "hidden states %s of %s. If it was trained on others, load it with AutoDrafter.from_pretrained(..., taps=(low, mid, "
        "high)); if it was trained for other weights, or not at all, it only costs time.",
        100 * _FEW, list(taps), target,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _warn_once() -> None:
    logger.warning(
        "The tokenizers of target and draft model are not known, so nobody checked that they agree. Pass tokenizer=... and "
        "assistant_tokenizer=... to have them compared."
    )
