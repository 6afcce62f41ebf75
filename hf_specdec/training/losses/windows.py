"""Windows that a drafter samples from each column of a text, and what greedy decoding would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import Unrolled
from hf_specdec.training.losses.survival import on_draft_vocabulary


__all__ = ["Windows", "sample_windows"]


@dataclass(frozen=True)
class Windows:
    """`G` windows of K drafts from each column. After its first rejected draft a window is meaningless: the law there was
    computed after the text's own tokens.

    Args:
        drafts (`torch.LongTensor` of shape `(K, group, batch, tokens)`): Tokens of the draft vocabulary.
        matches (`torch.BoolTensor` of the same shape): Which of them are the target's choice.
        trained (`torch.BoolTensor` of shape `(K, batch, tokens)`): Which drafts of each chain are trained: those up to the
            text's first token that is not the target's choice, behind which an accepted window would not be the text.
        odds (`torch.FloatTensor` of shape `(K, batch, tokens)`): How likely the drafter is to draw the target's choice.
    """

    drafts: Tensor
    matches: Tensor
    trained: Tensor
    odds: Tensor

    @property
    def accepted(self) -> Tensor:
        """`(K, group, batch, tokens)`: drafts that greedy decoding keeps."""
        return (self.matches & self.trained[:, None]).cumprod(0).bool()

    @property
    def reached(self) -> Tensor:
        """`(K, group, batch, tokens)`: the accepted drafts and the first rejected one."""
        before = torch.cat([torch.ones_like(self.accepted[:1]), self.accepted[:-1]])
        return before & self.trained[:, None]

    @property
    def rewards(self) -> Tensor:
        """`(group, batch, tokens)`: the share of a window that is accepted."""
        return self.accepted.sum(0) / self.trained.sum(0).clamp(min=1)

    @property
    def advantages(self) -> Tensor:
        """`(K, group, batch, tokens)`: how much more of the window is to be expected once draft `i`, which is reached, is known
        than before: `(1 + V_{i+1}) (accepted_i - a_i) / K_t` with `V_i = a_i (1 + V_{i+1})`, the drafts that will be accepted
        from `i` on. At least 0 where it is accepted, at most 0 where it is rejected, and 0 in the mean."""
        gains, following = [], torch.ones_like(self.odds[0])
        backwards = (each.flip(0) for each in (self.odds, self.trained, self.accepted))
        for odds, trained, accepted in zip(*backwards, strict=True):
            gains.append(following * (accepted.to(odds) - odds))
            following = 1.0 + trained * odds * following
        return torch.stack(gains[::-1]) / self.trained.sum(0).clamp(min=1)

    def rewards_of_responses(self) -> tuple[Tensor, Tensor]:
        """`(group, batch, 1)`, the mean reward of each rollout's rounds, and `(group, batch, tokens)`, the columns at which
        those rounds stand. A round that accepts `n` drafts commits `n + 1` tokens, and the next one stands there. No round
        stands at the first trained column, whose first draft is about the token that the prefill chooses."""
        lengths, trained, columns = self.accepted.sum(0), self.trained[0], self.trained.shape[-1]
        due = (trained.long().argmax(-1) + 1).expand(lengths.shape[:2])
        visited = torch.zeros(lengths.shape, dtype=torch.bool, device=lengths.device)
        for column in range(columns):
            here = (due == column) & trained[:, column]
            visited[..., column] = here
            due = torch.where(here, column + lengths[..., column] + 1, due)
        rounds = visited.sum(-1, keepdim=True).clamp(min=1)
        return (self.rewards * visited).sum(-1, keepdim=True) / rounds, visited

    def log_probabilities(self, logits: Sequence[Tensor], temperature: float) -> Tensor:
        """`(K, group, batch, tokens)`, `ln q` of each draft under K tensors of logits `(batch, tokens, draft_vocab)`."""
        if len(logits) != len(self.drafts):
            raise InvalidConfigError(
                f"expected logits of {len(self.drafts)} steps, got {len(logits)}: a reference is needed for kl_weight above 0"
            )
        found = []
        for drafts, each in zip(self.drafts, logits, strict=True):
            log_q = (each / temperature).log_softmax(-1)
            found.append(log_q.gather(-1, drafts.movedim(0, -1)).movedim(-1, 0))
        return torch.stack(found)


def sample_windows(unrolled: Unrolled, group_size: int, temperature: float) -> Windows:
    """Samples windows with one generator for each text and step, so that they do not depend on the batch.

    Raises:
        [`InvalidConfigError`]: If there are not as many seeds as texts.
    """
    rows, columns = unrolled.masks[0].shape
    if len(unrolled.seeds) != rows:
        raise InvalidConfigError(f"sampling needs one seed for each of the {rows} texts, got {len(unrolled.seeds)}")
    drafts, matches, odds, trained = [], [], [], []
    is_choice = torch.ones_like(unrolled.masks[0])  # of all tokens of the chain so far
    for step, (student, target) in enumerate(zip(unrolled.student_logits, unrolled.target_logits, strict=True)):
        uniforms = torch.stack(
            [
                torch.rand(columns, group_size, generator=torch.Generator().manual_seed(seed * 1009 + step))
                for seed in unrolled.seeds
            ]
        )
        law = (student.detach().float() / temperature).softmax(-1)
        cumulated = law.cumsum(-1)
        # The last entry is 1 but for rounding, and no draft may lie beyond it.
        drawn = torch.searchsorted(cumulated, uniforms.to(cumulated) * cumulated[..., -1:], right=True)
        drawn = drawn.clamp(max=student.shape[-1] - 1).movedim(-1, 0)
        choices = target.argmax(-1)
        places, known = on_draft_vocabulary(choices, unrolled.target_ids)
        drafts.append(drawn)
        matches.append((drawn == places) & known)
        odds.append(law.gather(-1, places[..., None])[..., 0] * known)
        trained.append(unrolled.masks[step] & is_choice)
        is_choice = is_choice & (unrolled.tokens[step] == choices)
    return Windows(torch.stack(drafts), torch.stack(matches), torch.stack(trained), torch.stack(odds))
