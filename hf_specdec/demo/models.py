"""Fresh models and their optimizer."""

import math

import torch
from torch import nn
from transformers import LlamaForCausalLM

from .shape import Shape


def new_model(shape: Shape, layers: int, vocab_size: int) -> LlamaForCausalLM:
    """A fresh model; the projections that write to the residual stream start smaller with depth."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = shape.config(layers, vocab_size, initializer_range=0.04, **special)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight /= math.sqrt(2 * layers)
            layer.mlp.down_proj.weight /= math.sqrt(2 * layers)
    return model


def new_optimizer(module: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the rate is set at every step."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    decayed = {"params": matrices, "weight_decay": weight_decay}
    free = {"params": vectors, "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, free], betas=(0.9, 0.98), foreach=True)
