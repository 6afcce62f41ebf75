"""The target's features of all texts, computed once and kept in memory: later epochs cost no pass of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.training.texts import Text, TextBatch, observe


__all__ = ["KeptFeatures"]


@final
class KeptFeatures:
    """Stands in for [`observe`] on texts that were observed before; the logits come from the target's own head.

    Only for networks that read the states after the target's final norm (the EAGLE family, HASS), since the logits are read
    from the same states. A text takes `tokens * hidden_size` numbers of the network's dtype, see [`~KeptFeatures.num_bytes`].

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): Says which features it reads.
        texts (`Sequence[Text]`): Every text that will be asked for.
        batch_size (`int`): Texts per pass of the target.

    Raises:
        [`InvalidConfigError`]: If the network reads other states, or the target does more to its logits than its head does.
    """

    def __init__(self, target: Any, network: DraftNetwork, texts: Sequence[Text], batch_size: int = 16) -> None:
        num_layers = undecorated_model(target).config.get_text_config(decoder=True).num_hidden_layers
        if network.taps_of(target) != (num_layers,):
            raise InvalidConfigError(
                f"kept features serve networks that read the target's last states, {type(network).__name__} reads the hidden "
                f"states {network.taps_of(target)}: let the trainer observe the target at each step"
            )
        self._network = network
        self._features: dict[Text, Tensor] = {}
        # Texts of one length side by side, so that little of a pass is padding.
        ordered = sorted(dict.fromkeys(texts), key=lambda text: len(text.tokens))
        for start in range(0, len(ordered), batch_size):
            part = ordered[start : start + batch_size]
            batch = observe(target, network, part)
            if start == 0:
                self._check_head(batch)
            for text, features in zip(part, batch.features, strict=True):
                self._features[text] = features[: len(text.tokens)].clone()

    @property
    def num_bytes(self) -> int:
        """Memory that the features take."""
        return sum(features.nbytes for features in self._features.values())

    def __call__(self, target: Any, network: DraftNetwork, texts: Sequence[Text]) -> TextBatch:
        """The batch that [`observe`] would give, with features of padding 0.

        Raises:
            [`InvalidConfigError`]: If a text was not among those that were observed.
        """
        if any(text not in self._features for text in texts):
            raise InvalidConfigError("a text was not observed when the features were kept: pass all texts of the run")
        features = pad_sequence([self._features[text] for text in texts], batch_first=True)
        tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
        places = torch.arange(tokens.shape[1])
        ends = torch.tensor([len(text.tokens) for text in texts])[:, None]
        starts = torch.tensor([text.num_prompt_tokens for text in texts])[:, None]
        with torch.no_grad():
            logits = self._network.target_logits(features).float()
        place = network.device
        return TextBatch(tokens.to(place), ((places >= starts) & (places < ends)).to(place), features, logits)

    def _check_head(self, batch: TextBatch) -> None:
        with torch.no_grad():
            mine = self._network.target_logits(batch.features).float()
        if not torch.allclose(mine, batch.logits, rtol=1e-3, atol=1e-3):
            raise InvalidConfigError(
                "the target does more to its logits than its output head does (a scale or a cap), so they cannot be computed "
                "from kept features: let the trainer observe the target at each step"
            )
