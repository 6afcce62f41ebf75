"""Safetensors files of ours, which say in their metadata what they hold."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hf_specdec.errors import InvalidConfigError


__all__ = ["read_tagged"]


def read_tagged(path: Path, expected: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file whose metadata names the format `expected`.

    Raises:
        [`InvalidConfigError`]: If it is no safetensors file, or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise InvalidConfigError(f"{path} is not a safetensors file: {error}") from error
    if about.get("format") != expected:
        raise InvalidConfigError(f"{path} holds {about.get('format')!r}, expected {expected!r}")
    return about, tensors
