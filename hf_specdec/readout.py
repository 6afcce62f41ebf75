"""The two ends of a model, found by trying: how it embeds tokens, and how it reads its last hidden states out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from hf_specdec._compat import undecorated_model


__all__ = ["ModelEnds", "find_ends", "has_fixed_positions", "is_called_unseen"]

# Rotary embeddings of a position that do not depend on how long the text is.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@final
@dataclass(frozen=True)
class ModelEnds:
    """Embedding and head of a model that does nothing else before its first and after its last layer.

    Args:
        embedding (`nn.Module`): Embeds ids.
        norm (`nn.Module`): The final norm.
        head (`nn.Module`): The LM head.
    """

    embedding: nn.Module
    norm: nn.Module
    head: nn.Module

    def logits(self, hidden: Tensor) -> Tensor:
        """`(batch, columns, vocab)`, of hidden states `(batch, columns, hidden_size)`."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def find_ends(model: Any, ids: Tensor, embedded: Tensor, hidden: Tensor, logits: Tensor) -> ModelEnds | None:
    """The ends of a model, if they explain what one of its passes shows; None where a model does more than that.

    Args:
        model (`PreTrainedModel`): A causal LM.
        ids (`torch.LongTensor` of shape `(batch, columns)`): What it was fed.
        embedded (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): What its first layer was given.
        hidden (`torch.FloatTensor` of shape `(batch, columns, hidden_size)`): What its final norm was given.
        logits (`torch.FloatTensor` of shape `(batch, vocab)`): What it said after the last column.
    """
    bare = undecorated_model(model)
    embedding, head = bare.get_input_embeddings(), bare.get_output_embeddings()
    if embedding is None or head is None or not torch.equal(embedding(ids), embedded):
        return None
    norms = [each for each in bare.get_decoder().children() if "norm" in type(each).__name__.lower()]
    for norm in (*norms, nn.Identity()):
        ends = ModelEnds(embedding, norm, head)
        if torch.allclose(ends.logits(hidden[:, -1:])[:, -1], logits, rtol=1e-4, atol=1e-4):
            return ends
    return None


def is_called_unseen(model: Any) -> bool:
    """Whether nobody would notice that a model's layers ran without it: it and its decoder carry neither a hook nor a
    `forward` of somebody else's."""
    bare = undecorated_model(model)
    return not any(
        each._forward_hooks or each._forward_pre_hooks or "forward" in vars(each)
        for each in {model, bare, bare.get_decoder()}
    )


def has_fixed_positions(config: Any) -> bool:
    """Whether a column's rotary embedding is the same in passes of any width."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return True
    kinds = (
        [parameters] if "rope_type" in parameters else [each for each in parameters.values() if isinstance(each, dict)]
    )
    return all(each.get("rope_type", "default") in _FIXED_ROPE for each in kinds)
