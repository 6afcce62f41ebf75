"""The EAGLE-1 network: one layer on the target's last hidden states."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_specdec.networks.attention import draft_attention
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.eagle.configuration import EagleConfig


__all__ = ["EagleDrafter", "EagleLayer"]


class EagleLayer(nn.Module):
    """A Llama layer without a norm before its attention (published)."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = draft_attention(config, config.hidden_size, qk_norm=False)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states, **attention)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@final
class EagleDrafter(DraftNetwork):
    """EAGLE-1 (arXiv 2401.15077): `f'[t+1] = layer(fc([embed(x[t+1]); f[t]]))`, and the target's own head on `f'`.

    `f` are the target's hidden states after its final norm. HASS (arXiv 2408.15766) trains the same network.
    """

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.post_init()

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states after the final norm."""
        return (num_layers,)

    @property
    def feature_size(self) -> int:
        """The hidden size."""
        return self.config.hidden_size

    def combine(self, features: Tensor) -> Tensor:
        """The features as they are."""
        return features

    def advance(self, embeddings: Tensor, states: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        states = self.layers[0](self.fc(torch.cat([embeddings, states], -1)), **attention)
        return states, states

    def to_logits(self, states: Tensor) -> Tensor:
        return self.target_logits(states)

    def to_target_vocabulary(self, logits: Tensor) -> Tensor:
        return logits
