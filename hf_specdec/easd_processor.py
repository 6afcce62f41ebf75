"""EASD as a logits processor: the rule without speculation, in any decoding loop of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdec.acceptance import EASD
from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.configs import BaseConfig, EASDConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.prefix_lm import PrefixLM


__all__ = ["EASDLogitsProcessor"]


class EASDLogitsProcessor(LogitsProcessor):
    """Masks the token on which both models agree while both are unsure (arXiv 2512.23765), one step at a time.

    A processor is shown neither a drafted token nor the law it came from, so this one asks the draft model itself and
    takes its argmax for the draft (ours). Where the rule fires and that token is also the target's argmax, it is masked,
    and greedy decoding emits the runner-up. Speculative EASD masks the same tokens, except where it has no draft to judge:
    the bonus token after a fully accepted draft.

    Args:
        draft_model (`PreTrainedModel`): A causal LM of the target's tokenizer.
        config ([`EASDConfig`], *optional*): Thresholds. `resample="plain"` has no meaning here and is refused.
        pad_token_id (`int`, *optional*): Leading ids of a row that are padding; without it every id counts.

    Attributes:
        num_steps, num_fired, num_masked (`int`): Rows seen, rows in which the rule fired, rows in which a token was masked.
    """

    def __init__(self, draft_model: Any, config: BaseConfig | None = None, pad_token_id: int | None = None) -> None:
        config = EASDConfig() if config is None else config
        if not isinstance(config.rule, EASD):
            raise InvalidConfigError(f"expected a config whose rule is EASD, such as EASDConfig, got {config}")
        if config.rule.resample != "masked":
            raise InvalidConfigError('EASDLogitsProcessor only masks: expected resample="masked"')
        self.rule = config.rule
        self.draft_model = draft_model
        self.pad_token_id = pad_token_id
        self.num_steps = self.num_fired = self.num_masked = 0
        self._lm: PrefixLM | None = None
        self._shape = (0, 0)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masked copies of `scores` (`(batch, vocab)`, untempered) after the prefixes `input_ids` (`(batch, length)`)."""
        draft_logits = fit_vocabulary(self._draft_logits(input_ids), scores.shape[-1]).to(scores.device)
        fires = self.rule.fires(scores, draft_logits, scores.isfinite().sum(-1))
        drafted = draft_logits.argmax(-1)
        masked = fires if self.rule.apply_to == "all" else fires & (drafted == scores.argmax(-1))
        self.num_steps += len(scores)
        self.num_fired += int(fires.sum())
        self.num_masked += int(masked.sum())
        handicap = math.log(self.rule.penalty) if self.rule.penalty > 0 else -math.inf
        suppressed = scores.scatter(-1, drafted[:, None], scores.gather(-1, drafted[:, None]) + handicap)
        return torch.where(masked[:, None], suppressed, scores)

    def _draft_logits(self, input_ids: Tensor) -> Tensor:
        batch_size, length = input_ids.shape
        if self._lm is None or batch_size != self._shape[0] or length != self._shape[1] + 1:
            self._lm = PrefixLM(self.draft_model, prompt_mask=self._prompt_mask(input_ids))
        self._shape = (batch_size, length)
        lengths = torch.full((batch_size,), length)
        rows = self.draft_model.get_input_embeddings().weight.shape[0]
        return self._lm.score(input_ids.cpu().clamp(max=rows - 1), lengths, torch.ones_like(lengths))[:, 0].float()

    def _prompt_mask(self, input_ids: Tensor) -> Tensor | None:
        if self.pad_token_id is None:
            return None
        return ((input_ids != self.pad_token_id).long().cumsum(-1) > 0).long()
