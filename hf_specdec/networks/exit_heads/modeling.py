"""Exit heads of every kind behind one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError
from hf_specdec.layer_gate import find_layers
from hf_specdec.networks.exit_heads.adapter import ExitAdapter
from hf_specdec.networks.exit_heads.card import CARD, render_card
from hf_specdec.networks.exit_heads.configuration import ExitHeadsConfig
from hf_specdec.networks.exit_heads.warm_start import activation_of, start_as_layers
from hf_specdec.networks.fresh import layer_options
from hf_specdec.networks.target import TargetIdentity
from hf_specdec.placement import device_of


__all__ = ["ExitHeads"]


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
    _supports_sdpa = True
    _supports_attention_backend = True
    _checked: weakref.ref[Any] | None = None
    draft_ids: Tensor | None  # of the draft vocabulary that the heads were fitted to

    def __init__(self, config: ExitHeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleDict({str(layer): self._new_head() for layer in config.exit_layers})
        size = None if config.draft_vocabulary is None else config.draft_vocabulary["size"]
        self.register_buffer("draft_ids", None if size is None else torch.zeros(size, dtype=torch.long))
        self.post_init()

    def _new_head(self) -> nn.Module:
        config = self.config
        if config.kind == "adapter":
            return ExitAdapter(config.adapter_config())
        return nn.Identity() if config.kind == "raw" else nn.Linear(config.hidden_size, config.hidden_size)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)

    @classmethod
    def for_target(
        cls, target: Any, kind: str, exit_layers: Sequence[int], tokenizer: Any = None, vocabulary: Any = None
    ) -> ExitHeads:
        """Unfitted heads in float32, with the target's fingerprint.

        An adapter's layer starts as a copy of the target's next layer, where that has the same parameters and the copy gives
        the layer's hidden states of some tokens (ours); elsewhere it starts as the identity.

        Args:
            target (`PreTrainedModel`): The target; nothing of it is changed.
            kind (`str`): See [`ExitHeadsConfig`].
            exit_layers (`Sequence[int]`): Where the heads sit.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, whose hash the heads then carry.
            vocabulary ([`DraftVocabulary`], *optional*): The ids that the exits shall score; they are saved with the heads.

        Raises:
            [`InvalidConfigError`]: If a layer is not one of the target's inner ones.
        """
        inner, layers = undecorated_model(target), find_layers(target)
        if not exit_layers or max(exit_layers) >= len(layers):
            raise InvalidConfigError(
                f"exit_layers must be some of the layers 1 to {len(layers) - 1}, got {list(exit_layers)}"
            )
        config, identity = inner.config.get_text_config(decoder=True), TargetIdentity.of(inner, tokenizer)
        bias, qk_norm = (f"self_attn.{name}" in layers[0].state_dict() for name in ("q_proj.bias", "q_norm.weight"))
        own = {"attention_bias": bias, "qk_norm": qk_norm, "hidden_act": activation_of(config)}
        shape = layer_options(config) | own if kind == "adapter" else None
        options: dict[str, Any] = {"target_tokenizer": identity.tokenizer, "target_weights": identity.weights}
        if vocabulary is not None:
            known = {"vocab_size": vocabulary.vocab_size, "fingerprint": vocabulary.fingerprint}
            options["draft_vocabulary"] = {"size": len(vocabulary.token_ids), **known}
        heads = cls(
            ExitHeadsConfig(
                kind, list(exit_layers), config.hidden_size, shape, identity.name, **({} if kind == "raw" else options)
            )
        ).to(device_of(inner))
        if heads.draft_ids is not None:
            heads.draft_ids.copy_(torch.tensor(vocabulary.token_ids))
        if kind == "adapter":
            start_as_layers(inner, layers, {depth: heads.head(depth) for depth in exit_layers})
        return heads

    def check_target(self, target: Any, tokenizer: Any = None) -> None:
        """Checks that these heads were fitted to `target`.

        Args:
            target (`PreTrainedModel`): The target.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, for heads that name its hash.

        Raises:
            [`IncompatibleDraftError`]: If width, tokenizer or base weights are others'.
        """
        inner = undecorated_model(target)
        if self.config.kind == "raw" or (self._checked is not None and self._checked() is inner):
            return
        width = inner.config.get_text_config(decoder=True).hidden_size
        if self.config.hidden_size != width:
            raise IncompatibleDraftError(
                f"the exit heads read hidden states of width {self.config.hidden_size}, and those of "
                f"{type(inner).__name__} have {width}: load the heads that were fitted to this model"
            )
        TargetIdentity.of_config(self.config).check(inner, tokenizer)
        self._checked = weakref.ref(inner)

    @property
    def reads_context(self) -> bool:
        """Whether a head looks at the columns before its own, whose keys and values it then keeps."""
        return bool(self.config.kind == "adapter")

    def head(self, layer: int) -> Any:
        """The head after `layer` layers.

        Raises:
            [`InvalidConfigError`]: If there is none.
        """
        if str(layer) not in self.heads:
            raise InvalidConfigError(f"there is no exit head after layer {layer}; there are {self.config.exit_layers}")
        return self.heads[str(layer)]

    def forward(self, hidden_states: Tensor, layer: int) -> Tensor:
        """What the target's final norm should see.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): After `layer` layers; for adapters
                all columns of the texts from the first on.
            layer (`int`): One of `config.exit_layers`.

        Raises:
            [`InvalidConfigError`]: If there is no head at that layer.
        """
        head = self.head(layer)
        result: Tensor = head(hidden_states).logits if self.reads_context else head(hidden_states)
        return result

    def before_map(self, hidden_states: Tensor, layer: int) -> Tensor:
        """What the head's matrix reads: an adapter's layer has run, and a linear head reads the hidden states themselves."""
        body: Tensor = self.head(layer).body(hidden_states) if self.reads_context else hidden_states
        return body

    def map_of(self, layer: int) -> nn.Linear:
        """The head's matrix."""
        head = self.head(layer)
        matrix: nn.Linear = head.map if self.reads_context else head
        return matrix

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but from safetensors alone, and no head is left at random.

        Raises:
            [`IncompatibleDraftError`]: If a weight is missing, or there is one that no head has; the message names them.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        heads, info = super().from_pretrained(*args, **{"use_safetensors": True, **kwargs}, output_loading_info=True)
        if wrong := [
            f"{name} {sorted(info[f'{name}_keys'])}" for name in ("missing", "unexpected") if info[f"{name}_keys"]
        ]:
            raise IncompatibleDraftError(
                f"the weights of {args[0] if args else 'the checkpoint'} are not those of {heads.config.kind} exit heads "
                f"after the layers {heads.config.exit_layers}: {'; '.join(wrong)}"
            )
        return (heads, info) if wants_info else heads

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As in transformers, in safetensors, and with a card."""
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / CARD).write_text(render_card(self.config), encoding="utf-8")

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, commit_message: str | None = None) -> str:
        """Uploads weights, config and card in one commit and returns its address."""
        api = HfApi()
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=commit_message or "Upload exit heads"
            )
        return str(commit.commit_url)
