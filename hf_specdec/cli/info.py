"""`specdec info`: versions, devices and presets."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import print_json


__all__ = ["info", "version"]

PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "huggingface-hub")


def version() -> str:
    """The version of this package."""
    from hf_specdec import __version__

    return __version__


@reports_errors
def info(as_json: Json = False, debug: Debug = False) -> None:
    """Show versions, devices and presets: what to put into a bug report."""
    values = _collect()
    if as_json:
        print_json(values)
        return
    for name, number in values["versions"].items():
        typer.echo(f"{name:16} {number}")
    typer.echo(f"{'devices':16} {', '.join(values['devices'])}")
    typer.echo(f"{'threads':16} {values['threads']}")
    for name, description in values["presets"].items():
        typer.echo(f"--config {name:12} {description}")


def _collect() -> dict[str, Any]:
    import torch

    from hf_specdec.configs import PRESETS

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            "hf_specdec": version(),
            "python": platform.python_version(),
            **{name: _version_of(name) for name in PACKAGES},
        },
        "devices": ["cpu", *gpus],
        "threads": torch.get_num_threads(),
        "presets": {
            name: (preset.__doc__ or "").partition(".\n")[0].partition(". ")[0] for name, preset in PRESETS.items()
        },
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
