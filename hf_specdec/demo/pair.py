"""Loads the bundled pair and the demonstration's prompts from the package's own files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging


@dataclass(frozen=True)
class Pair:
    """A target, its draft and the tokenizer of both."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and what to call it."""

    name: str
    text: str


def load_pair(folder: Path | None = None) -> Pair:
    """Loads `target/` and `draft/` of `folder`, by default those of the package, in fp32."""
    if folder is None:
        with bundled_weights() as bundled:
            return load_pair(bundled)
    with no_progress_bars():
        target, draft = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
            for name in ("target", "draft")
        )
        return Pair(target, draft, AutoTokenizer.from_pretrained(folder / "target"))


@contextmanager
def bundled_weights() -> Iterator[Path]:
    """The folder of the package's own weights."""
    with as_file(files("hf_specdec.demo") / "weights") as folder:
        yield folder


def load_prompts() -> list[Prompt]:
    """The prompts of `prompts.json`."""
    text = (files("hf_specdec.demo") / "prompts.json").read_text(encoding="utf-8")
    return [Prompt(**entry) for entry in json.loads(text)]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars while it loads two tiny files."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
