"""The EAGLE-3 network: one layer on three of the target's hidden states, with a vocabulary of its own."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_specdec.networks.attention import draft_attention
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.eagle3.configuration import Eagle3Config


__all__ = ["Eagle3Drafter", "Eagle3Layer", "default_taps"]

NUM_TAPS = 3


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Early, middle and late hidden states (published): `2, n // 2, n - 3`."""
    return (2, num_layers // 2, num_layers - 3)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the next token's embedding and the feature, each normalised (published)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = draft_attention(config, 2 * size, qk_norm=config.qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeddings: Tensor, states: Tensor, **attention: Any) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        inputs = torch.cat([self.input_layernorm(embeddings), normed], -1)
        hidden_states = residual + self.self_attn(inputs, **attention)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@final
class Eagle3Drafter(DraftNetwork):
    """EAGLE-3 (arXiv 2503.01840): `g = fc(low, mid, high)` for the target's tokens, the layer's output for drafted ones.

    Keys are those of the published checkpoints: `fc`, `midlayer.*`, `norm`, `lm_head`, and for a reduced vocabulary `d2t`
    (offsets: `target_id = draft_id + d2t[draft_id]`) and `t2d` (a mask of the target's vocabulary).
    """

    config_class = Eagle3Config
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, target_size = config.hidden_size, config.target_hidden_size or config.hidden_size
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(NUM_TAPS * target_size, eps=config.rms_norm_eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(target_size, eps=config.rms_norm_eps) for _ in range(NUM_TAPS)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(NUM_TAPS * target_size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        if config.has_head:
            self.lm_head = nn.Linear(size, self.draft_vocab_size, bias=False)
        if self.is_reduced:
            self.register_buffer("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.long))
            chosen = torch.arange(config.vocab_size) < self.draft_vocab_size
            self.register_buffer("t2d", chosen)
        self.post_init()

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that can be drafted."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def is_reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size != self.config.vocab_size

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The config's, or the [`default_taps`]."""
        return default_taps(num_layers) if self.config.taps is None else tuple(self.config.taps)

    @property
    def feature_size(self) -> int:
        """Three times the target's hidden size."""
        return self.fc.in_features

    def combine(self, features: Tensor) -> Tensor:
        """`fc` on the three states, after the norms that the config asks for."""
        features = features.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            taps = features.chunk(NUM_TAPS, -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return self.fc(features)

    def advance(self, embeddings: Tensor, states: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        states = self.midlayer(embeddings, states, **attention)
        readable = self.norm(states)
        return (readable if self.config.norm_output else states), readable

    def to_logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states) if self.config.has_head else self.target_logits(states)

    @property
    def target_ids(self) -> Tensor:
        """`(draft_vocab,)`, the target's id of each draft token."""
        ids = torch.arange(self.draft_vocab_size, device=self.device)
        return ids + self.d2t if self.is_reduced else ids

    def to_target_vocabulary(self, logits: Tensor) -> Tensor:
        if not self.is_reduced:
            return logits
        everywhere = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return everywhere.index_copy_(-1, self.target_ids, logits)
