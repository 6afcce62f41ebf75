"""Exit heads of every kind behind one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads.configuration import ExitHeadsConfig


__all__ = ["ExitHeads"]


class _FromZero(nn.Linear):
    """A linear map that begins as zero. A class of its own, as transformers initialises each parameter only once."""


class _Adapter(nn.Module):
    """A residual bottleneck; it begins as the identity."""

    def __init__(self, hidden_size: int, adapter_size: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, adapter_size)
        self.up = _FromZero(adapter_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(nn.functional.silu(self.down(hidden)))


class ExitHeads(PreTrainedModel):
    """One head per exit layer. What a head returns goes through the target's own final norm, LM head, soft cap and scale,
    so `raw` heads are the identity: they have no weights, and need not be saved. Untrained heads of the other kinds begin
    as the identity too.

    Args:
        config ([`ExitHeadsConfig`]): Kind and place of the heads.
    """

    config_class = ExitHeadsConfig
    base_model_prefix = "exit_heads"
    main_input_name = "hidden_states"

    def __init__(self, config: ExitHeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleDict({str(layer): self._new_head() for layer in config.exit_layers})
        self.post_init()

    def _new_head(self) -> nn.Module:
        config = self.config
        if config.kind == "linear":
            return nn.Linear(config.hidden_size, config.hidden_size)
        return nn.Identity() if config.kind == "raw" else _Adapter(config.hidden_size, config.adapter_size)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            return
        nn.init.zeros_(module.bias)
        if isinstance(module, _FromZero):
            nn.init.zeros_(module.weight)
        elif module.weight.shape[0] == module.weight.shape[1]:
            nn.init.eye_(module.weight)
        else:
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, hidden_states: Tensor, layer: int) -> Tensor:
        """What the target's final norm should see.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): After `layer` layers.
            layer (`int`): One of `config.exit_layers`.

        Raises:
            [`InvalidConfigError`]: If there is no head at that layer.
        """
        if str(layer) not in self.heads:
            raise InvalidConfigError(f"there is no exit head after layer {layer}; there are {self.config.exit_layers}")
        head = self.heads[str(layer)]
        result: Tensor = head(hidden_states)
        return result
