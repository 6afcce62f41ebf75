"""Exit heads: what the hidden states of a middle layer must become before the model's own norm and head read them."""

from hf_specdec.networks.exit_heads.adapter import ExitAdapter
from hf_specdec.networks.exit_heads.configuration import ExitAdapterConfig, ExitHeadsConfig
from hf_specdec.networks.exit_heads.modeling import ExitHeads


__all__ = ["ExitAdapter", "ExitAdapterConfig", "ExitHeads", "ExitHeadsConfig"]
