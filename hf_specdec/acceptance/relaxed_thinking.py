"""Relaxed acceptance while the model thinks, strict acceptance of its answer."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import target_gate
from hf_specdec.acceptance.relaxed import MaskRule, check_range
from hf_specdec.acceptance.topk import best_tokens
from hf_specdec.errors import InvalidConfigError
from hf_specdec.readback import sent
from hf_specdec.records import Evidence


__all__ = ["RelaxedThinking"]


@final
@dataclass(frozen=True)
class RelaxedThinking(MaskRule):
    """Between the start and the end of thinking, accepts a draft among the target's top k that is not far behind the first.

    Published (serving engines' relaxed acceptance inside thinking): `x` in the top k and `p(x) >= r * p(top)`. Ours: the
    default of `min_ratio`, the untempered law, and the exact coin elsewhere. The end of thinking itself is never accepted
    relaxedly, so that the target decides when the answer starts.

    Args:
        start_token_id (`int`, *optional*): Token that starts thinking, in the prompt or in the text. Without it the text
            thinks from the first generated token on.
        end_token_id (`int`): Token that ends thinking.
        top_k (`int`): Size of the set; 0 is the exact rule.
        min_ratio (`float`): Least ratio to the most probable token, in [0, 1].
    """

    end_token_id: int | None = None
    start_token_id: int | None = None
    top_k: int = 10
    min_ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.end_token_id is None:
            raise InvalidConfigError(
                "relaxed_thinking needs the id of the token that ends thinking: pass "
                'RelaxedThinking(end_token_id=tokenizer.convert_tokens_to_ids("</think>"))'
            )
        if self.top_k < 0:
            raise InvalidConfigError(f"top_k must be at least 0, got {self.top_k}")
        check_range("min_ratio", self.min_ratio, 0.0, 1.0)

    def mask(self, evidence: Evidence) -> Tensor:
        law = target_gate(evidence)
        close = law >= self.min_ratio * law.amax(-1, keepdim=True)
        thinks = self._thinks(evidence).to(close.device)[..., None]
        goes_on = torch.arange(law.shape[-1], device=close.device) != self.end_token_id
        return thinks & close & best_tokens(evidence, self.top_k) & goes_on

    def _thinks(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, positions whose prefix has started thinking and not ended it."""
        if evidence.place is None:
            raise InvalidConfigError("relaxed_thinking must know the prefix: pass Evidence(place=...)")
        place = evidence.place
        device = evidence.scores.device
        text, column = place.text_on(device), torch.arange(place.text.shape[1], device=device)
        before = column < sent(place.columns, device)[..., None]
        ended = _last(text, self.end_token_id, before, column)
        if self.start_token_id is not None:
            return _last(text, self.start_token_id, before, column) > ended
        return ended < place.prompt_columns


def _last(text: Tensor, token: int | None, before: Tensor, column: Tensor) -> Tensor:
    """`(batch, width)`, the last column before each position that holds the token; -1 for none."""
    return torch.where(torch.eq(text, token if token is not None else -1)[:, None] & before, column, -1).amax(-1)
