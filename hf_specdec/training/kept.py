"""The target's features of texts, kept in memory once they were computed: later epochs cost no pass of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.training.texts import Text, TextBatch, check_head, observe, padded


__all__ = ["KeptFeatures"]


@final
class KeptFeatures:
    """Stands in for [`observe`] and calls it once for each text; afterwards the logits come from the target's own head.

    Only for networks that read the states after the target's final norm (the EAGLE-1 family, HASS), since the logits are
    read from the same states. One object serves one target. A text takes `tokens * hidden_size` numbers of the network's
    dtype.

    Args:
        max_bytes (`int`): Most memory for features; texts that find no room are observed each time.

    Raises:
        [`InvalidConfigError`]: At the first call, if the network reads other states, or the target does more to its logits
            than its head does.
    """

    def __init__(self, max_bytes: int = 4 * 2**30) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._features: dict[Text, Tensor] = {}
        self._is_checked = False

    def __call__(self, target: Any, network: DraftNetwork, texts: Sequence[Text]) -> TextBatch:
        """What [`observe`] gives; where all texts are known, with features of padding 0."""
        if any(text not in self._features for text in texts):
            return self._observe(target, network, texts)
        features = pad_sequence([self._features[text] for text in texts], batch_first=True)
        tokens, loss_mask = padded(texts)
        with torch.no_grad():
            logits = network.target_logits(features).float()
        place = network.device
        return TextBatch(tokens.to(place), loss_mask.to(place), features, logits)

    def _observe(self, target: Any, network: DraftNetwork, texts: Sequence[Text]) -> TextBatch:
        batch = observe(target, network, texts)
        if not self._is_checked:
            _check(target, network, batch)
            self._is_checked = True
        for text, features in zip(texts, batch.features, strict=True):
            kept = features[: len(text.tokens)]
            if text not in self._features and self.num_bytes + kept.nbytes <= self.max_bytes:
                self._features[text] = kept.clone()
                self.num_bytes += kept.nbytes
        return batch


def _check(target: Any, network: DraftNetwork, batch: TextBatch) -> None:
    num_layers = undecorated_model(target).config.get_text_config(decoder=True).num_hidden_layers
    if network.taps_of(target) != (num_layers,):
        raise InvalidConfigError(
            f"kept features serve networks that read the target's last states, {type(network).__name__} reads the hidden "
            f"states {network.taps_of(target)}: let the trainer observe the target at each step"
        )
    check_head(network, batch.features, batch.logits)
