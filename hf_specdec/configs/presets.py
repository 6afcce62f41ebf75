"""The presets by name, and the way from a name, a dictionary or a file to a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.cospec import CoSpecConfig
from hf_specdec.configs.csd import CSDConfig
from hf_specdec.configs.easd import EASDConfig
from hf_specdec.configs.exact import ExactConfig
from hf_specdec.configs.nucleus import NucleusConfig
from hf_specdec.configs.rcsd import RCSDConfig
from hf_specdec.configs.self_draft import SelfDraftConfig
from hf_specdec.configs.speculative import SpeculativeConfig
from hf_specdec.errors import InvalidConfigError


__all__ = ["PRESETS", "load_config"]

PRESETS: MappingProxyType[str, type[BaseConfig]] = MappingProxyType(
    {
        "cospec": CoSpecConfig,
        "csd": CSDConfig,
        "easd": EASDConfig,
        "exact": ExactConfig,
        "nucleus": NucleusConfig,
        "rcsd": RCSDConfig,
        "self_draft": SelfDraftConfig,
        "speculative": SpeculativeConfig,
    }
)


def load_config(config: BaseConfig | Mapping[str, Any] | str | Path) -> BaseConfig:
    """A config from a config, its dictionary, a preset's name, or the path or Hub id of a saved one."""
    if isinstance(config, BaseConfig):
        return config
    if isinstance(config, Mapping):  # what a saved generation_config.json holds
        return BaseConfig.from_dict({"preset": SpeculativeConfig.__name__, **config})
    if isinstance(config, str) and config in PRESETS:
        return PRESETS[config]()
    if isinstance(config, str | Path):
        return BaseConfig.from_pretrained(config)
    raise InvalidConfigError(
        f"speculative_config must be a config object, its dictionary, one of {', '.join(sorted(PRESETS))}, or the path or Hub "
        f"id of a saved one; got {type(config).__name__}"
    )
