"""Loading what a command works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.output import spinner


__all__ = ["Models", "load_models", "load_tokenizer", "quiet"]


# What transformers, torch and bitsandbytes raise for files, versions, devices and memory that do not fit.
_LOADING_ERRORS = (OSError, ValueError, ImportError, KeyError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Models:
    """A target, what drafts for it, and the target's tokenizer."""

    target: Any
    assistant: Any
    tokenizer: Any


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the progress bars and remarks of transformers, and restores them."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_models(
    target: str,
    assistant: str | None,
    *,
    dtype: str = "auto",
    device_map: str | None = None,
    quantization: str | None = None,
    packed: bool | Literal["auto"] = "auto",
    networks: bool = False,
) -> Models:
    """Loads both models and the tokenizer; drafter networks and exit heads too where `networks` says that the command can use
    them.

    Raises:
        [`CommandError`]: If a checkpoint cannot be loaded; the message names it.
    """
    import torch

    from hf_specdec.loading import load_assistant, load_model
    from hf_specdec.networks.checkpoint import is_draft_checkpoint, is_exit_heads

    if device_map is None and torch.cuda.is_available():
        device_map = "auto"
    options: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "device_map": device_map,
        "quantization": quantization,
        "packed": packed,
    }
    with quiet():
        tokenizer = load_tokenizer(target)
        model = _load(target, load_model, target, **options)
        if assistant is None:
            return Models(model, None, tokenizer)
        kind = (
            "a drafter network"
            if is_draft_checkpoint(assistant)
            else "exit heads"
            if is_exit_heads(assistant)
            else None
        )
        if kind is None:
            return Models(model, _load(assistant, load_model, assistant, **options), tokenizer)
        if not networks:
            raise CommandError(f"{assistant} is {kind}, and this command needs a causal LM as draft")
        return Models(model, _load(assistant, load_assistant, assistant, model), tokenizer)


def load_tokenizer(name: str) -> Any:
    """A checkpoint's tokenizer.

    Raises:
        [`CommandError`]: If it cannot be loaded.
    """
    from transformers import AutoTokenizer

    return _load(f"the tokenizer of {name}", AutoTokenizer.from_pretrained, name)


def _load(name: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    with spinner(f"Loading {name}"):
        try:
            return load(*args, **kwargs)
        except _LOADING_ERRORS as error:
            raise CommandError(f"cannot load {name}: {error}") from error
