"""What users write: configurations and presets, one per file."""

from hf_specdec.configs.base import CONFIG_NAME, BaseConfig
from hf_specdec.configs.cospec import CoSpecConfig
from hf_specdec.configs.csd import CSDConfig
from hf_specdec.configs.easd import EASDConfig
from hf_specdec.configs.exact import ExactConfig
from hf_specdec.configs.nucleus import NucleusConfig
from hf_specdec.configs.presets import PRESETS, load_config
from hf_specdec.configs.rcsd import RCSDConfig
from hf_specdec.configs.self_draft import SelfDraftConfig
from hf_specdec.configs.speculative import SpeculativeConfig
from hf_specdec.configs.stock import STOCK_OPTIONS, with_stock_options


__all__ = [
    "CONFIG_NAME",
    "PRESETS",
    "STOCK_OPTIONS",
    "BaseConfig",
    "CSDConfig",
    "CoSpecConfig",
    "EASDConfig",
    "ExactConfig",
    "NucleusConfig",
    "RCSDConfig",
    "SelfDraftConfig",
    "SpeculativeConfig",
    "load_config",
    "with_stock_options",
]
