"""Speculative decoding for Hugging Face transformers: `model.generate(..., speculative_config=...)`."""

from hf_specdec.acceptance import ACCEPTANCE, CorrectionMemory, EarlyExactGuard
from hf_specdec.configs import (
    BaseConfig,
    CoSpecConfig,
    CSDConfig,
    EASDConfig,
    ExactConfig,
    NucleusConfig,
    RCSDConfig,
    SelfDraftConfig,
    SpeculativeConfig,
)
from hf_specdec.drafters import DrafterBase, DraftSettings, DraftVocabulary, ScriptedDrafter
from hf_specdec.easd_processor import EASDLogitsProcessor
from hf_specdec.errors import (
    DrafterError,
    IncompatibleDraftError,
    InvalidConfigError,
    SpeculativeError,
    UnsupportedModelError,
)
from hf_specdec.generation import generate
from hf_specdec.hook import SpeculativeGenerationMixin, install, uninstall
from hf_specdec.lengths import (
    AdditiveLength,
    ConfidenceLength,
    ConstantLength,
    CostTable,
    GoodputLength,
    GoodputTree,
)
from hf_specdec.linear import pack_linears
from hf_specdec.loading import load_model
from hf_specdec.losslessness import LosslessReport, verify_lossless
from hf_specdec.networks import AutoDrafter, DraftNetwork, Eagle3Config, Eagle3Drafter, EagleConfig, EagleDrafter
from hf_specdec.networks.exit_heads import ExitHeads, ExitHeadsConfig
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput
from hf_specdec.stats import SpeculativeStats
from hf_specdec.trace import DecodingTrace
from hf_specdec.trees import TreeShape


__version__ = "0.1.0"

__all__ = [
    "ACCEPTANCE",
    "AdditiveLength",
    "AutoDrafter",
    "BaseConfig",
    "CSDConfig",
    "CoSpecConfig",
    "ConfidenceLength",
    "ConstantLength",
    "CorrectionMemory",
    "CostTable",
    "DecodingTrace",
    "DraftNetwork",
    "DraftSettings",
    "DraftVocabulary",
    "DrafterBase",
    "DrafterError",
    "EASDConfig",
    "EASDLogitsProcessor",
    "Eagle3Config",
    "Eagle3Drafter",
    "EagleConfig",
    "EagleDrafter",
    "EarlyExactGuard",
    "ExactConfig",
    "ExitHeads",
    "ExitHeadsConfig",
    "GoodputLength",
    "GoodputTree",
    "IncompatibleDraftError",
    "InvalidConfigError",
    "LosslessReport",
    "NucleusConfig",
    "RCSDConfig",
    "ScriptedDrafter",
    "SelfDraftConfig",
    "SpeculativeConfig",
    "SpeculativeDecoderOnlyOutput",
    "SpeculativeError",
    "SpeculativeGenerationMixin",
    "SpeculativeStats",
    "TreeShape",
    "UnsupportedModelError",
    "generate",
    "install",
    "load_model",
    "pack_linears",
    "uninstall",
    "verify_lossless",
]

install()
