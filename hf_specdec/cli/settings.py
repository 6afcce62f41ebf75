"""The speculative config that the options of a command describe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_specdec.cli.errors import CommandError
from hf_specdec.errors import SpeculativeError


if TYPE_CHECKING:
    from hf_specdec.configs import BaseConfig


__all__ = ["build_config", "refuse_method"]


def build_config(
    name: str,
    *,
    drafting: str | None = None,
    length: str | None = None,
    entropy_threshold: float | None = None,
    overlap_threshold: float | None = None,
    top_n: int | None = None,
) -> BaseConfig:
    """The config of a preset's name, a path or a Hub id, with the options given in place of its own."""
    from hf_specdec.configs import PRESETS, EASDConfig, load_config

    try:
        config = load_config(name)
    except SpeculativeError:
        raise
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read the config {name} (presets: {', '.join(PRESETS)}): {error}") from error
    changes: dict[str, Any] = {}
    if drafting is not None:
        changes["drafting"] = str(drafting)
    if length is not None:
        changes["length"] = _length(length)
    easd: dict[str, Any] = {
        "entropy_threshold": entropy_threshold,
        "overlap_threshold": overlap_threshold,
        "top_n": top_n,
    }
    given = {option: value for option, value in easd.items() if value is not None}
    if given and not isinstance(config, EASDConfig):
        options = ", ".join(f"--{option.replace('_', '-')}" for option in given)
        raise CommandError(f"{options} belongs to EASD and the config is {type(config).__name__}: pass --config easd")
    if entropy_threshold is not None:  # both models' thresholds, also where a saved config has them apart
        given |= {"target_entropy_threshold": None, "draft_entropy_threshold": None}
    return replace(config, **(changes | given))


def refuse_method(name: str, changes: dict[str, Any]) -> None:
    """Raises a [`CommandError`] if anything describes a method where none is used."""
    given = [f"--{option.replace('_', '-')}" for option, value in changes.items() if value is not None]
    if name != "exact":
        given.insert(0, "--config")
    if given:
        raise CommandError(f"--plain decodes without speculation: drop {', '.join(given)}")


def _length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise CommandError(f"--length must be a number of tokens or auto, got {text!r}") from None
