"""Tiny models and parts for tests. Weights are drawn here; nothing is downloaded."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM


__all__ = ["drafters_for", "noisy_copy", "prompts", "state_of", "tiny_llama"]


def tiny_llama(seed=0, vocab_size=64, layers=4, width=32, attn_implementation="sdpa", **overrides):
    """A random Llama whose logits are not near-tied, so that greedy texts are well defined."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attn_implementation,
        **overrides,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def noisy_copy(model, noise=0.15, seed=1):
    """A copy with noise on each parameter, relative to its spread: a drafter that is right sometimes."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.numel() > 1:
                scale = noise * parameter.std()
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return twin


def drafters_for(model):
    """Drafters that are always, sometimes and never right."""
    return {"always": model, "sometimes": noisy_copy(model), "never": tiny_llama(seed=99)}


def prompts(batch_size=1, columns=7, seed=3, vocab_size=64):
    """Random prompts; rows of a batch are padded on the left to different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab_size, (batch_size, columns), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch_size):
        padding = (row * 2) % (columns - 1)
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def state_of(model):
    """Everything of a model that decoding must not change."""
    return (
        copy.deepcopy(model.config.to_dict()),
        copy.deepcopy(model.generation_config.to_dict()),
        {name: value.clone() for name, value in model.state_dict().items()},
        [(name, tuple(module._forward_hooks), module.training) for name, module in model.named_modules()],
        [(name, sorted(vars(module))) for name, module in model.named_modules()],
    )
