"""What a run that may be gone on with was begun with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import write_at_once


__all__ = ["check_identity", "write_identity"]


def check_identity(file: Path, asked: Mapping[str, Any], what: str) -> None:
    """Refuses to go on with anything but what a run was begun with.

    Args:
        file (`Path`): Where [`write_identity`] wrote it down; runs of versions that did not are taken at their word.
        asked (`Mapping[str, Any]`): What is asked for now.
        what (`str`): What the run is, such as `"a fit"`.

    Raises:
        [`InvalidConfigError`]: If something else is asked for, naming it.
    """
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else asked
    if changed := [name for name in asked if known.get(name) != asked[name]]:
        raise InvalidConfigError(
            f"{file.parent} holds {what} with other {' and '.join(changed)}: resume with the same, or write to another folder"
        )


def write_identity(file: Path, asked: Mapping[str, Any]) -> None:
    """Writes down what a run is begun with (`Mapping`), at once."""
    write_at_once(file, (json.dumps(asked, indent=1) + "\n").encode())
