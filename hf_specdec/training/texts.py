"""Texts as training sees them, with what the target says about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_specdec.errors import InvalidConfigError
from hf_specdec.features import FeatureTap
from hf_specdec.networks import DraftNetwork
from hf_specdec.placement import device_of


__all__ = ["Text", "TextBatch", "check_head", "cut_texts", "digest_of", "observe", "padded"]


@dataclass(frozen=True)
class Text:
    """One text: a prompt and the target's answer to it.

    Args:
        tokens (`tuple[int, ...]`): Token ids of both.
        num_prompt_tokens (`int`): How many of them are the prompt's, which is not trained on.

    Raises:
        [`InvalidConfigError`]: If no token would be trained on: the answer is empty, or the whole text is shorter than the
            three tokens that a first draft needs.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_prompt_tokens < len(self.tokens) or len(self.tokens) < 3:
            raise InvalidConfigError(
                f"the loss mask of a text of {len(self.tokens)} tokens, {self.num_prompt_tokens} of them its prompt's, is all "
                "zero: leave it out, or let the target answer"
            )

    @property
    def num_anchors(self) -> int:
        """Columns whose chain has a first draft to train."""
        return len(self.tokens) - max(self.num_prompt_tokens, 2)


def digest_of(texts: Iterable[Text], *more: object) -> str:
    """SHA-256 of texts, and of what else belongs to them and JSON can hold."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.tokens, text.num_prompt_tokens]).encode())
    digest.update(json.dumps(more).encode())
    return digest.hexdigest()


def cut_texts(texts: Sequence[Text], max_tokens: int) -> list[Text]:
    """The texts, cut to `max_tokens`; those whose prompt is as long already are left out.

    Raises:
        [`InvalidConfigError`]: If none is left.
    """
    kept = [
        Text(text.tokens[:max_tokens], text.num_prompt_tokens) for text in texts if text.num_prompt_tokens < max_tokens
    ]
    if not kept:
        raise InvalidConfigError(f"every prompt has {max_tokens} tokens or more: pass a larger max_tokens")
    return kept


@dataclass(frozen=True)
class TextBatch:
    """Texts padded on the right, with the target's features and logits.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, tokens)`): Token ids.
        loss_mask (`torch.BoolTensor` of shape `(batch, tokens)`): Which tokens are the answer's.
        features (`torch.FloatTensor` of shape `(batch, tokens, feature_size)`): The target's features.
        logits (`torch.FloatTensor` of shape `(batch, tokens, vocab)`): Its logits; those of column `t` are about token `t + 1`.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    logits: Tensor


def padded(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Token ids, padded on the right, and which of them are the answers'; both `(batch, tokens)`."""
    tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
    places = torch.arange(tokens.shape[1])
    ends = torch.tensor([len(text.tokens) for text in texts])[:, None]
    starts = torch.tensor([text.num_prompt_tokens for text in texts])[:, None]
    return tokens, (places >= starts) & (places < ends)


def check_head(network: DraftNetwork, states: Tensor, logits: Tensor) -> None:
    """Raises an [`InvalidConfigError`] unless the target's head makes these logits of the states after its final norm."""
    with torch.no_grad():
        mine = network.target_logits(states).float()
    if not torch.allclose(mine, logits, rtol=1e-3, atol=1e-3):
        raise InvalidConfigError(
            "the target does more to its logits than its output head does (a scale or a cap), so they cannot be computed "
            "from kept features: let the trainer observe the target at each step"
        )


def observe(target: Any, network: DraftNetwork, texts: Sequence[Text]) -> TextBatch:
    """The target's features and logits of some texts, in one pass without gradients.

    Args:
        target (`PreTrainedModel`): A causal LM in evaluation mode; nothing of it is changed.
        network ([`DraftNetwork`]): Says which features it reads.
        texts (`Sequence[Text]`): The texts.
    """
    tokens, loss_mask = padded(texts)
    read = torch.arange(tokens.shape[1]) < torch.tensor([len(text.tokens) for text in texts])[:, None]
    device = device_of(target)
    tap = FeatureTap(target, network.taps_of(target))
    with torch.no_grad(), tap.capture() as captured:
        outputs = target(input_ids=tokens.to(device), attention_mask=read.long().to(device), use_cache=False)
    place = network.device
    return TextBatch(
        tokens=tokens.to(place),
        loss_mask=loss_mask.to(place),
        features=captured.features.to(place, network.dtype),
        logits=outputs.logits.to(place).float(),
    )
