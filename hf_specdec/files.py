"""Result files: written whole or not at all, and files of lines that a killed run may have left half a line in."""

from __future__ import annotations

import os
from pathlib import Path


__all__ = ["mended_lines", "whole_lines", "write_at_once"]


def write_at_once(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; the folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that has no end; none if there is no file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1].decode().split("\n")[:-1]


def mended_lines(path: Path) -> list[str]:
    """The [`whole_lines`] of a file, which keeps nothing else, so that lines may be added."""
    lines = whole_lines(path)
    if path.exists():
        os.truncate(path, sum(len(line.encode()) + 1 for line in lines))
    return lines
