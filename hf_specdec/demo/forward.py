"""A training forward pass over the weights of a `LlamaForCausalLM`, cheap on a CPU.

It computes what the transformers model computes, with three differences that only matter for
training: whole layers may be skipped, hidden states of chosen layers are returned, and one decoder
layer is one pure function, so that `torch.compile` compiles it once for every layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding to `x` of shape `(batch, heads, length, head_dim)`."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: int = 2) -> Tensor:
    """Causal attention in plain operations: their backward pass is far faster on CPU than SDPA's.

    The queries come in blocks, each of which leaves out the keys that none of its rows may see. All
    arguments and the result have shape `(batch, heads, length, head_dim)`.
    """
    length = q.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    mixed = []
    for start in range(0, length, -(-length // blocks)):
        end = min(length, start - (-length // blocks))
        scores = torch.matmul(q[..., start:end, :], k[..., :end, :].transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(future[start:end, :end], -1e9), dim=-1)
        mixed.append(torch.matmul(weights, v[..., :end, :]))
    return torch.cat(mixed, dim=-2)


def decoder_layer(
    x: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, head_dim: int, eps: float
) -> Tensor:
    """One Llama decoder layer; `x` and the result have shape `(batch, length, width)`."""
    norm_1, w_q, w_k, w_v, w_o, norm_2, w_gate, w_up, w_down = weights
    batch, length, width = x.shape
    h = F.rms_norm(x, (width,), norm_1, eps)
    q, k, v = (F.linear(h, w).view(batch, length, -1, head_dim).transpose(1, 2) for w in (w_q, w_k, w_v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    mixed = attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), w_o)
    h = F.rms_norm(x, (width,), norm_2, eps)
    return x + F.linear(F.silu(F.linear(h, w_gate)) * F.linear(h, w_up), w_down)


def layer_weights(layer: Any) -> tuple[Tensor, ...]:
    """The nine weights of a transformers Llama layer, in the order `decoder_layer` takes them."""
    a, m = layer.self_attn, layer.mlp
    return (
        layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.o_proj.weight,
        layer.post_attention_layernorm.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight,
    )  # fmt: skip


def compiled_if(wanted: bool, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled for one set of shapes when `wanted`."""
    return torch.compile(function, dynamic=False) if wanted else function


class TrainingForward:
    """Runs a model's layers, keeping the hidden state after chosen layers.

    Args:
        compiled (`bool`): Compile the decoder layer. Shapes must then stay the same between calls.
    """

    def __init__(self, compiled: bool = False):
        self.layer = compiled_if(compiled, decoder_layer)

    def __call__(
        self, model: LlamaForCausalLM, ids: Tensor, keep: set[int], skip: frozenset[int] = frozenset()
    ) -> dict[int, Tensor]:
        """Returns `{layers run: hidden state}` for each depth in `keep`, normed and ready for the head.

        Args:
            ids (`Tensor` of shape `(batch, length)`): Token ids.
            keep (`set[int]`): Depths to return; depth `n` is the state after `n` layers.
            skip (`frozenset[int]`): Indices of the layers to leave out (layer dropout).
        """
        config = model.config
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = model.model.embed_tokens(ids)
        cos, sin = (table[:, None] for table in model.model.rotary_emb(x, positions))
        kept = {}
        for index, layer in enumerate(model.model.layers):
            if index not in skip:
                x = self.layer(x, layer_weights(layer), cos, sin, config.head_dim, config.rms_norm_eps)
            if index + 1 in keep:
                kept[index + 1] = model.model.norm(x)
        return kept
