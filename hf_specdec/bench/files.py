"""Writing result files."""

from __future__ import annotations

import os
from pathlib import Path


__all__ = ["write_at_once"]


def write_at_once(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; the folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
