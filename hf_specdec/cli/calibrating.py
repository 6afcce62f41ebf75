"""What the commands that calibrate a pair of models share: the texts, the config they start from, and what a card says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.models import Models, quiet
from hf_specdec.cli.output import progress_bar
from hf_specdec.cli.settings import build_config
from hf_specdec.cli.texts import read_pairs, read_texts


if TYPE_CHECKING:
    from hf_specdec.configs import BaseConfig


__all__ = ["about_pair", "base_config", "calibrate_pair", "read_some"]

_Config = TypeVar("_Config", bound="BaseConfig")
_Found = TypeVar("_Found")


def base_config(name: str, kind: type[_Config], called: str) -> _Config:
    """The config of `--config`, which must be of this kind."""
    config = build_config(name)
    if not isinstance(config, kind):
        raise CommandError(f"--config must be {called} config, got {type(config).__name__}")
    return config


def read_some(data: Path, prompt_field: str | None, field: str, limit: int | None) -> list[str] | list[tuple[str, str]]:
    """Texts, or pairs of prompt and text where there is a field of prompts."""
    return read_texts(data, field, limit) if prompt_field is None else read_pairs(data, prompt_field, field, limit)


def calibrate_pair(
    calibrate: Callable[..., _Found], models: Models, data: Sequence[Any], label: str, **options: Any
) -> _Found:
    """What `calibrate` finds about a target and its assistant along texts or prompts, with a bar named `label`."""
    with quiet(), progress_bar(label) as progress:
        return calibrate(
            models.target, models.assistant, data, tokenizer=models.tokenizer, progress=progress, **options
        )


def about_pair(target: str, draft: str, data: Path, fingerprint: str) -> dict[str, str]:
    """What was measured with what, by name and never by path."""
    return {"target": Path(target).name, "draft": Path(draft).name, "fingerprint": fingerprint, "data": data.name}
