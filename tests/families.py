"""Tiny random causal LMs of many model families, for what must hold whatever the architecture.

`FAMILIES` maps a name to a `Family`, and `FAMILIES[name].build("sdpa", seed=0)` returns a float32 model of four layers in
evaluation mode within milliseconds. Families that the installed transformers lacks are in `MISSING`, with the reason.
`REFUSED` holds models whose state cannot be rewound.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


VOCAB_SIZE = 64
WINDOW = 8

# Weights are large so that logits are not nearly tied; embeddings are untied because a tied toy (Gemma above all) repeats
# its last token for ever. Configs keep the names they do not know, without effect.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# For configs whose default head size is a constant.
HEAD = {"head_dim": 8}
SLIDING = {"sliding_window": WINDOW}
ALTERNATING = SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}
UPPER_HALF = SLIDING | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# The sparse indexer keeps more tokens than the tests make: cut short, it picks among ties, which no decoding reproduces.
INDEXER = {"head_dim": 8, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
COMPRESSED = {
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "sliding_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    "mlp_layer_types": ["moe"] * 4,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
}
CHUNKED = {
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 64,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
}
GEMMA = HEAD | {"query_pre_attn_scalar": 8}
LAYER_INPUTS = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
SHARED_KV = {"num_kv_shared_layers": 2}
NANO = SHARED_KV | {"laurel_rank": 4, "activation_sparsity_pattern": None}
ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 32}
LOCAL = {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA_LAYERS = {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32}
MAMBA_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


@dataclass(frozen=True)
class Family:
    """How to build one tiny model.

    Args:
        config_name: The config class, by its name in `transformers`.
        overrides: Values that replace or extend `TINY`.
        sliding: Whether some layer attends through a window of `WINDOW` tokens.
        gain: Factor on the attention weights. A toy whose next token depends mostly on its last one is soon caught in a
            cycle, so where attention is weak it is made to count.
        first_seed: What `seed=0` stands for; chosen where the first weights repeat themselves.
    """

    config_name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    sliding: bool = False
    gain: float = 1.0
    first_seed: int = 0

    @property
    def attentions(self) -> tuple[str, ...]:
        """The attention implementations that the family supports, of "eager" and "sdpa"."""
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[getattr(transformers, self.config_name)]
        return ("eager", "sdpa") if model_class._supports_sdpa else ("eager",)

    def config(self) -> PreTrainedConfig:
        return getattr(transformers, self.config_name)(**copy.deepcopy(TINY | self.overrides))

    def build(self, attn_implementation: str = "eager", seed: int = 0) -> PreTrainedModel:
        """Returns a model whose weights depend on `seed` alone; the global generator is left as it was."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.first_seed + seed)
            model = AutoModelForCausalLM.from_config(
                self.config(), attn_implementation=attn_implementation, dtype=torch.float32
            )
            for name, parameter in model.named_parameters():
                if "att" in name:
                    parameter.mul_(self.gain)
        return model.eval()


def noisy_copy(model: PreTrainedModel, noise: float = 0.03, seed: int = 0) -> PreTrainedModel:
    """A drafter that agrees with `model` often but not always: each parameter gets noise of `noise` times its spread."""
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in twin.parameters():
            if parameter.numel() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    return twin


def random_twin(family: Family, attn_implementation: str = "eager", seed: int = 0) -> PreTrainedModel:
    """A drafter of the same architecture with weights of its own, which agrees by accident only."""
    return family.build(attn_implementation, 1000 + seed)


_ALL: dict[str, Family] = {
    "apertus": Family("ApertusConfig", gain=1.5, first_seed=8),
    "arcee": Family("ArceeConfig", gain=1.5, first_seed=3),
    "biogpt": Family("BioGptConfig", first_seed=4),
    "bitnet": Family("BitNetConfig", first_seed=5),
    "bloom": Family("BloomConfig", {"initializer_range": 0.2}, first_seed=3),
    "codegen": Family("CodeGenConfig", {"rotary_dim": 4}, gain=1.5, first_seed=1),
    "cohere": Family("CohereConfig", {"logit_scale": 1.0}),
    "cohere2": Family("Cohere2Config", HEAD | ALTERNATING | {"logit_scale": 1.0}, sliding=True),
    "cwm": Family("CwmConfig", HEAD | ALTERNATING, sliding=True),
    "deepseek_v2": Family("DeepseekV2Config", LATENT_ATTENTION | ROUTED_EXPERTS | HEAD),
    "deepseek_v3": Family("DeepseekV3Config", LATENT_ATTENTION | ROUTED_EXPERTS, first_seed=1),
    "deepseek_v32": Family("DeepseekV32Config", LATENT_ATTENTION | ROUTED_EXPERTS | INDEXER),
    "diffllama": Family("DiffLlamaConfig"),
    "doge": Family("DogeConfig"),
    "dots1": Family("Dots1Config", HEAD | ALTERNATING | ROUTED_EXPERTS, sliding=True),
    "ernie4_5": Family("Ernie4_5Config", HEAD),
    "ernie4_5_moe": Family("Ernie4_5_MoeConfig", EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    "exaone4": Family("Exaone4Config", ALTERNATING, sliding=True, gain=1.5),
    "falcon": Family("FalconConfig", gain=1.5, first_seed=1),
    "falcon-alibi": Family("FalconConfig", ALIBI, gain=3.0, first_seed=11),
    "falcon-grouped": Family("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}, gain=1.5),
    "flex_olmo": Family("FlexOlmoConfig", EXPERTS, gain=1.5, first_seed=1),
    "gemma": Family("GemmaConfig", GEMMA),
    "gemma2": Family("Gemma2Config", GEMMA | ALTERNATING, sliding=True),
    "gemma3": Family("Gemma3TextConfig", GEMMA | ALTERNATING, sliding=True),
    "gemma3n": Family("Gemma3nTextConfig", GEMMA | ALTERNATING | LAYER_INPUTS | NANO, sliding=True),
    "gemma4": Family("Gemma4TextConfig", GEMMA | ALTERNATING | LAYER_INPUTS, sliding=True),
    "gemma4-shared": Family("Gemma4TextConfig", GEMMA | ALTERNATING | LAYER_INPUTS | SHARED_KV, sliding=True),
    "glm": Family("GlmConfig", HEAD),
    "glm4": Family("Glm4Config", HEAD),
    "glm4_moe": Family("Glm4MoeConfig", HEAD | ROUTED_EXPERTS),
    "glm_moe_dsa": Family("GlmMoeDsaConfig", LATENT_ATTENTION | ROUTED_EXPERTS | INDEXER),
    "gpt2": Family("GPT2Config", gain=1.5, first_seed=1),
    "gpt_bigcode": Family("GPTBigCodeConfig", gain=1.5),
    "gpt_neo": Family("GPTNeoConfig", LOCAL, sliding=True),
    "gpt_neox": Family("GPTNeoXConfig", gain=1.5, first_seed=4),
    "gpt_oss": Family("GptOssConfig", HEAD | ALTERNATING | EXPERTS, sliding=True),
    "gptj": Family("GPTJConfig", {"rotary_dim": 4}, gain=1.5),
    "granite": Family("GraniteConfig"),
    "granitemoe": Family("GraniteMoeConfig", EXPERTS),
    "helium": Family("HeliumConfig", HEAD),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Config", HEAD, gain=1.5),
    "jais2": Family("Jais2Config", gain=1.5, first_seed=3),
    "jetmoe": Family("JetMoeConfig", EXPERTS | {"kv_channels": 8}),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama": Family("LlamaConfig"),
    "llama4": Family("Llama4TextConfig", HEAD | EXPERTS | CHUNKED, sliding=True),
    "minicpm3": Family("MiniCPM3Config", LATENT_ATTENTION, first_seed=1),
    "minimax_m2": Family("MiniMaxM2Config", HEAD | EXPERTS, first_seed=1),
    "ministral": Family("MinistralConfig", HEAD | ALTERNATING, sliding=True),
    "ministral3": Family("Ministral3Config", HEAD, first_seed=1),
    "mistral": Family("MistralConfig", SLIDING, sliding=True),
    "mixtral": Family("MixtralConfig", SLIDING | EXPERTS, sliding=True),
    "modernbert_decoder": Family(
        "ModernBertDecoderConfig", {"local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 1}, sliding=True
    ),
    "mpt": Family("MptConfig", {"initializer_range": 0.2, "max_seq_len": 128, "use_cache": True}, first_seed=17),
    "nanochat": Family("NanoChatConfig", first_seed=3),
    "nemotron": Family("NemotronConfig", first_seed=2),
    "olmo": Family("OlmoConfig"),
    "olmo2": Family("Olmo2Config", gain=1.5, first_seed=4),
    "olmo3": Family("Olmo3Config", ALTERNATING, sliding=True, gain=1.5, first_seed=1),
    "olmoe": Family("OlmoeConfig", EXPERTS),
    "opt": Family("OPTConfig", gain=1.5, first_seed=1),
    "persimmon": Family("PersimmonConfig", gain=1.5, first_seed=2),
    "phi": Family("PhiConfig", gain=1.5, first_seed=6),
    "phi3": Family("Phi3Config", SLIDING, sliding=True),
    "phimoe": Family("PhimoeConfig", SLIDING | EXPERTS, sliding=True),
    "qwen2": Family("Qwen2Config"),
    "qwen2-sliding": Family("Qwen2Config", UPPER_HALF, sliding=True),
    "qwen2_moe": Family("Qwen2MoeConfig", UPPER_HALF | EXPERTS | {"shared_expert_intermediate_size": 64}, sliding=True),
    "qwen3": Family("Qwen3Config", HEAD, gain=1.5, first_seed=1),
    "qwen3-sliding": Family("Qwen3Config", HEAD | UPPER_HALF, sliding=True),
    "qwen3_moe": Family("Qwen3MoeConfig", HEAD | EXPERTS, gain=1.5),
    "seed_oss": Family("SeedOssConfig", HEAD),
    "smollm3": Family("SmolLM3Config", UPPER_HALF | {"no_rope_layers": [1, 0, 1, 0]}, sliding=True),
    "stablelm": Family("StableLmConfig"),
    "starcoder2": Family("Starcoder2Config", SLIDING, sliding=True, gain=1.5),
    "vaultgemma": Family("VaultGemmaConfig", GEMMA | ALTERNATING, sliding=True),
    "xglm": Family("XGLMConfig", gain=1.5, first_seed=3),
    "youtu": Family("YoutuConfig", LATENT_ATTENTION, first_seed=1),
}
# State-space, linear-attention and compressing models, pure and hybrid, whose state no rejected draft can be taken out of,
# and one that keeps no state at all between forward passes.
_ALL_REFUSED: dict[str, Family] = {
    "bamba": Family("BambaConfig", MAMBA_HEADS | {"attn_layer_indices": [1, 3]}),
    "deepseek_v4": Family("DeepseekV4Config", SLIDING | ROUTED_EXPERTS | INDEXER | COMPRESSED),
    "falcon_h1": Family("FalconH1Config", MAMBA_HEADS | {"mamba_d_ssm": 64}),
    "falcon_mamba": Family("FalconMambaConfig"),
    "granitemoehybrid": Family("GraniteMoeHybridConfig", MAMBA_HEADS | EXPERTS | MAMBA_LAYERS),
    "jamba": Family("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
    "mamba": Family("MambaConfig"),
    "mamba2": Family("Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "minimax": Family("MiniMaxConfig", HEAD | EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "olmo_hybrid": Family("OlmoHybridConfig", LINEAR_ATTENTION),
    "openai-gpt": Family("OpenAIGPTConfig"),
    "qwen3_5": Family("Qwen3_5TextConfig", HEAD | LINEAR_ATTENTION),
    "qwen3_next": Family(
        "Qwen3NextConfig", HEAD | LINEAR_ATTENTION | EXPERTS | {"shared_expert_intermediate_size": 32}
    ),
    "recurrent_gemma": Family("RecurrentGemmaConfig", {"lru_width": 32, "attention_window_size": WINDOW}),
    "rwkv": Family("RwkvConfig", {"context_length": 128, "attention_hidden_size": 32}),
}


def _installed(table: dict[str, Family]) -> dict[str, Family]:
    return {name: family for name, family in table.items() if hasattr(transformers, family.config_name)}


FAMILIES = _installed(_ALL)
REFUSED = _installed(_ALL_REFUSED)
MISSING = {
    name: f"transformers {transformers.__version__} has no {family.config_name}"
    for name, family in (_ALL | _ALL_REFUSED).items()
    if name not in FAMILIES | REFUSED
}
