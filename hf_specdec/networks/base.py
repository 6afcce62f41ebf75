"""What the drafter networks share: the pass over one layer, and the parts they borrow from their target."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.utils import ModelOutput

from hf_specdec._compat import CACHE_KEY, undecorated_model
from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.linear import PackedLinear
from hf_specdec.networks.rotary import DraftRotaryEmbedding
from hf_specdec.networks.target import TargetIdentity
from hf_specdec.placement import device_of, is_sharded, weight_of


__all__ = ["DraftNetwork", "DraftOutput"]


@dataclass
class DraftOutput(ModelOutput):
    """What a drafter network says.

    Args:
        logits (`torch.FloatTensor` of shape `(batch, kept, draft_vocab)`): Logits on the draft vocabulary.
        last_hidden_state (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): The states that stand in for the
            target's features in the next step.
    """

    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None


@dataclass(frozen=True)
class _Borrowed:
    """Modules of the target; not a module itself, so that they are no part of the network's own weights."""

    embedding: Any
    head: Any
    architectures: tuple[str, ...]
    num_layers: int


class DraftNetwork(PreTrainedModel, ABC):
    """One decoder layer that predicts from its target's features (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840).

    Column `t` reads the *next* token's embedding and the target's feature of column `t`, and predicts token `t + 2`.
    Where no feature is known yet, the network's own output of the column before stands in (published).

    Initial weights are torch's own, not normal with a deviation of 0.02, which is published to hurt EAGLE-3.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _borrowed: _Borrowed | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rotary_emb = DraftRotaryEmbedding(config)
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @abstractmethod
    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Indices into the `hidden_states` of a target with `num_layers` layers that make up a feature."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Width of a feature: the tapped states side by side."""

    @abstractmethod
    def combine(self, features: Tensor) -> Tensor:
        """`(batch, columns, hidden_size)` from target features `(batch, columns, feature_size)`."""

    @abstractmethod
    def advance(self, embeddings: Tensor, states: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """The layer. Returns the states that recur, and those that the logits are read from."""

    @abstractmethod
    def to_logits(self, states: Tensor) -> Tensor:
        """Logits on the draft vocabulary."""

    @abstractmethod
    def to_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Draft logits on the target's vocabulary; `-inf` where a token is not in the draft vocabulary."""

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> DraftOutput:
        """One pass.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, columns)`): For each column the token *after* it.
            hidden_states (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): The target's features through
                [`~DraftNetwork.combine`], or the network's own earlier output.
            attention_mask (`torch.LongTensor` of shape `(batch, cached + columns)`, *optional*): 0 where nothing attends to.
            position_ids (`torch.LongTensor` of shape `(batch, columns)`, *optional*): Positions of the *features*.
            use_cache (`bool`): Accepted for transformers' sake; the cache is used if it is given.
            logits_to_keep (`int`): Compute the logits of this many final columns; 0 for all.
            kwargs: The cache, under the name that the installed transformers gives it.
        """
        cache = kwargs.pop(CACHE_KEY, None)
        embeddings = self.embed(input_ids)
        if position_ids is None:
            seen = 0 if cache is None else int(cache.get_seq_length())
            position_ids = torch.arange(seen, seen + input_ids.shape[1], device=embeddings.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_KEY: cache},
        )
        states, readable = self.advance(
            embeddings,
            hidden_states.to(embeddings),
            attention_mask=mask,
            position_embeddings=self.rotary_emb(embeddings, position_ids=position_ids),
            **{CACHE_KEY: cache},
        )
        logits = self.to_logits(readable[:, -logits_to_keep:])
        return DraftOutput(logits=logits, last_hidden_state=states)

    @property
    def _table(self) -> Any:
        return self.embed_tokens if self.config.has_embedding else self.borrowed.embedding

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that can be fed."""
        return int(self._table.weight.shape[0])

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings in the network's own dtype, from its own table or its target's, without the factor that some targets
        put on them (as serving engines do)."""
        table = self._table
        if is_sharded(table) and type(table).forward is nn.Embedding.forward:
            return table(input_ids.to(device_of(table))).to(self.device, self.dtype)  # it gathers rows, not the table
        with weight_of(table) as weight:
            embeddings = nn.functional.embedding(input_ids.to(weight.device), weight)
        return embeddings.to(self.device, self.dtype)

    def attach(self, target: Any, tokenizer: Any = None) -> None:
        """Borrows the embeddings and the output head of the target, which is not changed and not saved with the network.

        Args:
            target (`PreTrainedModel`): A causal LM.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, for drafters that name its hash.

        Raises:
            [`IncompatibleDraftError`]: If hidden size, number of layers or vocabulary do not fit, or the checkpoint names
                another tokenizer or other base weights.
        """
        inner = undecorated_model(target)
        config = inner.config.get_text_config(decoder=True)
        self.check_target(inner, config)
        TargetIdentity.of_config(self.config).check(inner, tokenizer)
        names = tuple(inner.config.architectures or (type(inner).__name__,))
        self._borrowed = _Borrowed(
            inner.get_input_embeddings(), inner.get_output_embeddings(), names, config.num_hidden_layers
        )

    def twin(self) -> DraftNetwork:
        """A copy with weights of its own that borrows from the same target, in evaluation mode."""
        return copy.deepcopy(self, {id(self._borrowed): self._borrowed}).eval()

    def check_target(self, inner: Any, config: Any) -> None:
        """Raises an [`IncompatibleDraftError`] if the sizes do not fit."""
        name = type(inner).__name__
        if config.vocab_size != self.config.vocab_size:
            raise IncompatibleDraftError(
                f"the drafter was made for a vocabulary of {self.config.vocab_size} tokens, {name} has {config.vocab_size}: "
                "load the target that the drafter was trained for"
            )
        num_layers = config.num_hidden_layers
        if outside := [index for index in self.taps(num_layers) if not 0 <= index <= num_layers]:
            raise IncompatibleDraftError(
                f"the drafter reads the hidden states {outside} of its target, {name} has hidden states 0 to {num_layers}: "
                "load the target that the drafter was trained for, or pass taps=(low, mid, high)"
            )
        expected = len(self.taps(num_layers)) * config.hidden_size
        if expected != self.feature_size:
            raise IncompatibleDraftError(
                f"the drafter reads features of {self.feature_size} numbers, {name} gives {expected} (hidden size "
                f"{config.hidden_size}): load the target that the drafter was trained for"
            )
        if inner.get_output_embeddings() is None:
            raise IncompatibleDraftError(f"{name} has no output head: pass a causal LM as target")
        if not self.config.has_embedding and config.hidden_size != self.config.hidden_size:
            raise IncompatibleDraftError(
                f"the drafter has no embed_tokens.weight of its own and cannot use those of {name}: its hidden size is "
                f"{self.config.hidden_size}, the target's {config.hidden_size}"
            )

    def check_attached(self, target: Any) -> None:
        """Attaches a network that has no target yet, and refuses a target that is not the one it borrows from."""
        inner = undecorated_model(target)
        if self._borrowed is None:
            self.attach(inner)
        elif self._borrowed.embedding is not inner.get_input_embeddings():
            raise IncompatibleDraftError(
                f"this {type(self).__name__} is attached to another model than the {type(inner).__name__} that generates: load "
                "it with target=... for this one, or call attach(model)"
            )

    def taps_of(self, target: Any) -> tuple[int, ...]:
        """[`~DraftNetwork.taps`] for a loaded target."""
        return self.taps(undecorated_model(target).config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def borrowed(self) -> _Borrowed:
        """The target's embeddings and output head."""
        if self._borrowed is None:
            raise IncompatibleDraftError(
                f"this {type(self).__name__} has no target yet: load it with AutoDrafter.from_pretrained(..., target=model), "
                "or call attach(model)"
            )
        return self._borrowed

    @property
    def target_architectures(self) -> tuple[str, ...]:
        """The class names in the target's config; none while the network has no target."""
        return () if self._borrowed is None else self._borrowed.architectures

    @property
    def target_num_layers(self) -> int | None:
        """Number of layers of the target; None while the network has no target."""
        return None if self._borrowed is None else self._borrowed.num_layers

    def target_logits(self, states: Tensor) -> Tensor:
        """The target's own head on `states`, in the head's dtype and on its device, brought back to the network's."""
        head = self.borrowed.head
        weight = head.storage if isinstance(head, PackedLinear) else head.weight  # a packed layer's `weight` is a copy
        dtype = weight.dtype if weight.is_floating_point() else states.dtype
        place = states.device if weight.is_meta else weight.device  # an offloaded head fetches what it is given
        return head(states.to(place, dtype)).to(states.device)

    def _init_weights(self, module: nn.Module) -> None:
        """Torch's own initialisation for linear layers, transformers' for norms and rotary tables."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        else:
            super()._init_weights(module)
