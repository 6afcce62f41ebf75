"""Attention of the drafter networks: transformers' own, with inputs of another width."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention


__all__ = ["draft_attention"]


def draft_attention(config: LlamaConfig, in_features: int, *, qk_norm: bool) -> nn.Module:
    """One attention module in which queries, keys and values read `in_features` numbers and only they may have a bias.

    Args:
        config (`LlamaConfig`): Heads, head size, `attention_bias` and the attention implementation.
        in_features (`int`): Width of the input.
        qk_norm (`bool`): Whether queries and keys are normalised per head, as in Qwen3.
    """
    attention = (Qwen3Attention if qk_norm else LlamaAttention)(config, layer_idx=0)
    width, kv_width = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    attention.q_proj = nn.Linear(in_features, width, bias=config.attention_bias)
    attention.k_proj = nn.Linear(in_features, kv_width, bias=config.attention_bias)
    attention.v_proj = nn.Linear(in_features, kv_width, bias=config.attention_bias)
    attention.o_proj = nn.Linear(width, config.hidden_size, bias=False)
    return attention
