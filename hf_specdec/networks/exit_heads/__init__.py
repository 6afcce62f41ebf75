"""Exit heads: what the hidden states of a middle layer must become before the model's own norm and head read them."""

from hf_specdec.networks.exit_heads.configuration import ExitHeadsConfig
from hf_specdec.networks.exit_heads.modeling import ExitHeads


__all__ = ["ExitHeads", "ExitHeadsConfig"]
