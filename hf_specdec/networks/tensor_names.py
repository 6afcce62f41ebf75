"""The names of a checkpoint's tensors, without loading a tensor and without unpickling anything."""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open


__all__ = ["PICKLED", "SAFE", "tensor_names"]

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def tensor_names(fetch: Callable[[str], Path | None]) -> frozenset[str] | None:
    """The names of the tensors, from safetensors where there are any.

    Of a pickle only the opcodes are read, never run; the names are then among the strings returned.

    Args:
        fetch (`Callable[[str], Path | None]`): From a file's name to where it lies, or None where it is missing.

    Returns:
        None if there are no weights, or only in torch's format of before 2020.
    """
    for name in (SAFE, PICKLED):
        if (index := fetch(f"{name}.index.json")) is not None:
            return frozenset(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}))
        if (weights := fetch(name)) is not None:
            return _safe_names(weights) if name == SAFE else _strings(weights)
    return None


def _safe_names(path: Path) -> frozenset[str]:
    with safe_open(path, "pt") as tensors:
        return frozenset(tensors.keys())


def _strings(path: Path) -> frozenset[str] | None:
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if pickled is None:
            return None
        return frozenset(value for _, value, _ in pickletools.genops(archive.read(pickled)) if isinstance(value, str))
