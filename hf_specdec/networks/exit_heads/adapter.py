"""The layer of an adapter head, which has keys and values of its own."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.utils import ModelOutput

from hf_specdec._compat import CACHE_KEY
from hf_specdec.networks.attention import draft_attention
from hf_specdec.networks.exit_heads.configuration import ExitAdapterConfig
from hf_specdec.networks.rotary import DraftRotaryEmbedding


__all__ = ["AdapterLayer", "ExitAdapter"]


class AdapterLayer(nn.Module):
    """A Llama layer, with the parameter names of Llama and of the families like it.

    Args:
        config ([`ExitAdapterConfig`]): Its shape.
    """

    def __init__(self, config: ExitAdapterConfig) -> None:
        super().__init__()
        self.self_attn = draft_attention(config, config.hidden_size, qk_norm=config.qk_norm)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **attention)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@final
class ExitAdapter(PreTrainedModel):
    """A layer on the hidden states of a middle layer, then a matrix. It begins as the identity.

    Published (Kangaroo, arXiv 2404.18911): one layer over the shallow features, trained by the final law, with a cache of its
    own. Ours: the MLP, and the matrix, which takes over what is linear in the way to the last layer.

    Args:
        config ([`ExitAdapterConfig`]): Shape of the layer.
    """

    config_class = ExitAdapterConfig
    config: ExitAdapterConfig
    base_model_prefix = ""
    main_input_name = "hidden_states"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ExitAdapterConfig) -> None:
        super().__init__(config)
        self.layer = AdapterLayer(config)
        self.map = nn.Linear(config.hidden_size, config.hidden_size)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """What the target's final norm should see, under the name of `logits`, as [`PrefixLM`] reads it.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): The target's.
            attention_mask (`torch.LongTensor` of shape `(batch, cached + columns)`, *optional*): 0 where nothing attends to.
            position_ids (`torch.LongTensor` of shape `(batch, columns)`, *optional*): Positions.
            use_cache (`bool`): Accepted for transformers' sake; the cache is used if it is given.
            kwargs: The cache, under the name that the installed transformers gives it.
        """
        body = self.body(hidden_states, attention_mask, position_ids, kwargs.get(CACHE_KEY))
        return ModelOutput(logits=self.map(body))

    def body(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The layer without the matrix."""
        if position_ids is None:
            seen = 0 if cache is None else int(cache.get_seq_length())
            columns = hidden_states.shape[1]
            position_ids = torch.arange(seen, seen + columns, device=hidden_states.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_KEY: cache},
        )
        positions = self.rotary_emb(hidden_states, position_ids=position_ids)
        states: Tensor = self.layer(
            hidden_states, attention_mask=mask, position_embeddings=positions, **{CACHE_KEY: cache}
        )
        return states

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing is written to the residual stream at first, and the matrix is the identity."""
        if module is self.map:
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()
            if module in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                nn.init.zeros_(module.weight)
        else:
            super()._init_weights(module)
