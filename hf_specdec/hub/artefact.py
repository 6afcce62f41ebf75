"""The folder that a calibration writes: a config, its figures, and a small card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.configs import BaseConfig
from hf_specdec.files import write_at_once


__all__ = ["FIGURES_NAME", "write_artefact"]

FIGURES_NAME = "calibration.json"

_CARD = """---
library_name: hf_specdec
tags:
- speculative-decoding
---

# {title}

{summary}

| | |
|---|---|
{rows}

Written by `specdec calibrate` or `specdec train`, from the figures in `{figures}`. It is about this pair of models and these
texts, and no other.

```bash
specdec generate --target TARGET --draft DRAFT --config {folder} --prompt "..."
```
"""


def write_artefact(
    folder: Path, title: str, summary: str, config: BaseConfig, about: Mapping[str, Any], figures: Mapping[str, Any]
) -> Path:
    """Writes `speculative_config.json`, `calibration.json` and `README.md` into a folder, and returns the folder.

    Args:
        folder (`Path`): Made where it is not there.
        title, summary (`str`): For the card.
        config ([`BaseConfig`]): What was found, ready for `generate`.
        about (`dict`): What it was measured with: names of the models, the fingerprint, the data.
        figures (`dict`): What was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    content = json.dumps({"about": dict(about), "figures": dict(figures)}, indent=2, sort_keys=True) + "\n"
    write_at_once(folder / FIGURES_NAME, content.encode())
    rows = "\n".join(f"| {name} | {value} |" for name, value in about.items())
    card = _CARD.format(title=title, summary=summary, rows=rows, figures=FIGURES_NAME, folder=folder.name)
    write_at_once(folder / "README.md", card.encode())
    return folder
