"""Toy checkpoints in the published dialects: configs, tensors, and the target they are for."""

import json
from functools import cache

import torch
from safetensors.torch import save_file

from hf_specdec.networks import AutoDrafter
from tests.networks import small_target


H, V, VD = 32, 64, 24
LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V, "max_position_embeddings": 128,
    "torch_dtype": "float16", "transformers_version": "4.28.1", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD, "tie_word_embeddings": False}
TARGET_IDS = torch.arange(0, V, 2)[:VD] + 1


@cache
def target():
    return small_target()


def weights(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def layer(prefix, in_features, heads=4, kv_heads=2, size=8, hidden=H):
    return {
        f"{prefix}self_attn.q_proj.weight": (heads * size, in_features),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * size, in_features),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * size, in_features),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * size),
        f"{prefix}mlp.gate_proj.weight": (48, hidden),
        f"{prefix}mlp.up_proj.weight": (48, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, 48),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def eagle1(bias=False, qkv_bias=False, embedding=True):
    shapes = {"fc.weight": (H, 2 * H)} | layer("layers.0.", H)
    shapes |= {"fc.bias": (H,)} if bias else {}
    shapes |= {"embed_tokens.weight": (V, H)} if embedding else {}
    if qkv_bias:
        shapes |= {f"layers.0.self_attn.{each}_proj.bias": (H if each == "q" else H // 2,) for each in "qkv"}
    return weights(shapes)


def eagle3(prefix="midlayer.", size=VD, embedding=False, extra=None, head_dim=8, hidden=H):
    shapes = {"fc.weight": (hidden, 3 * H), "norm.weight": (hidden,), "lm_head.weight": (size, hidden)}
    shapes |= layer(prefix, 2 * hidden, size=head_dim, hidden=hidden)
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= ({"embed_tokens.weight": (V, hidden)} if embedding else {}) | (extra or {})
    tensors = weights(shapes)
    if size < V:
        chosen = torch.zeros(V, dtype=torch.bool)
        chosen[TARGET_IDS] = True
        tensors |= {"d2t": TARGET_IDS - torch.arange(VD), "t2d": chosen}
    return tensors


def speculators(layer_type="llama", **options):
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": VD,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": LLAMA | {"model_type": layer_type, "head_dim": 8},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        **options,
    }


LLAMA3 = LLAMA | {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "bias": False}
QK_NORM = {"layers.0.self_attn.q_norm.weight": (8,), "layers.0.self_attn.k_norm.weight": (8,)}
FC_NORM = {f"fc_norm.{index}.weight": (H,) for index in range(3)}


def written(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder, model=None, **options):
    return AutoDrafter.from_pretrained(folder, target=model or target(), **options)


def logits_of(network):
    """Draft logits on some tokens and features, on the target's vocabulary."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (2, 9), generator=generator)
    features = torch.randn(2, 9, network.feature_size, generator=generator)
    with torch.no_grad():
        return network.to_target_vocabulary(network(ids, network.combine(features)).logits)


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}
