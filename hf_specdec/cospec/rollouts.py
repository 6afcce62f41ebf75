"""Texts under a policy that throws dice, and the decisions that led to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from hf_specdec import SpeculativeConfig
from hf_specdec.acceptance import FEATURES, ArbitrationPolicy, arbitration_features
from hf_specdec.acceptance.cospec import is_plausible
from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.gates import allowed, mismatched
from hf_specdec.bench.batched import eos_token_ids, until_end
from hf_specdec.cospec.reinforce import Episode
from hf_specdec.placement import device_of
from hf_specdec.records import Evidence, Judged, Outcome
from hf_specdec.sequences import pad_left, padding_of


__all__ = ["ArbitrationSampler", "Decision", "Rollouts"]


@dataclass(frozen=True)
class Decision:
    """One reached mismatch: its place among the new tokens, what was drafted, what the policy saw, whether it was taken."""

    place: int
    drafted: int
    features: Tensor
    taken: bool


@final
@dataclass(frozen=True)
class ArbitrationSampler:
    """The rule of [`CoSpec`] with dice: a plausible mismatch is taken with the policy's probability. It keeps what it met.

    Args:
        policy ([`ArbitrationPolicy`], *optional*): The policy; without one nothing is taken.
        floor_ratio (`float`): As for [`CoSpec`].
        prompt_columns (`int`): Columns before the first new token.
        met (`list[list[Decision]]`): Reached mismatches by row.
    """

    lossless: ClassVar[bool] = False
    needs_draft_logits: ClassVar[bool] = True
    throws_dice: ClassVar[bool] = True

    policy: ArbitrationPolicy | None = None
    floor_ratio: float = 1e-3
    prompt_columns: int = 0
    met: list[list[Decision]] = field(default_factory=list)

    def acceptance(self, evidence: Evidence) -> Tensor:
        exact, candidates = exact_acceptance(evidence), self._candidates(evidence)
        if self.policy is None or not bool(candidates.any()):
            return exact
        return torch.where(candidates, self.policy(arbitration_features(evidence)).to(exact.dtype), exact)

    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        return {}

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Keeps the reached mismatches that the policy may decide."""
        evidence = judged.evidence
        features = arbitration_features(evidence).float().cpu()
        decided = judged.reached.cpu() & self._candidates(evidence).cpu()
        while len(self.met) < len(decided):
            self.met.append([])
        if evidence.place is None:
            return {}
        for row, place in decided.nonzero().tolist():
            self.met[row].append(
                Decision(
                    int(evidence.place.columns[row, place]) - self.prompt_columns,
                    int(evidence.tokens[row, place]),
                    features[row, place],
                    bool(judged.accepted[row, place]),
                )
            )
        return {}

    def _candidates(self, evidence: Evidence) -> Tensor:
        plausible = is_plausible(evidence, self.floor_ratio) & allowed(evidence)
        return mismatched(evidence) & evidence.valid & plausible


@dataclass
class Rollouts:
    """Answers of a frozen pair of models under a policy.

    Args:
        target, draft (`PreTrainedModel`): The models.
        prompts (sequence of token ids): The prompts.
        is_correct (`Callable[[int, list[int]], bool]`): Whether the new tokens answer the prompt of this index.
        policy ([`ArbitrationPolicy`], *optional*): The policy; without one the texts are the target's own.
        max_new_tokens (`int`): Longest answer.
        length (`int`): Tokens to draft per round.
        floor_ratio (`float`): As for [`CoSpec`].
        speed_weight (`float`): Reward for one more token per round; an answer's correctness is worth 1.
        seed (`int`): Decides the dice, together with the number of texts so far.
    """

    target: Any
    draft: Any
    prompts: Sequence[Sequence[int]]
    is_correct: Callable[[int, list[int]], bool]
    policy: ArbitrationPolicy | None = None
    max_new_tokens: int = 256
    length: int = 5
    floor_ratio: float = 1e-3
    speed_weight: float = 0.05
    seed: int = 0
    num_texts: int = 0

    def __call__(self, prompt: int, number: int) -> list[Episode]:
        """As many episodes of a prompt, decoded together."""
        texts, met, stats = self.decode([prompt] * number)
        episodes = []
        for row, text in enumerate(texts):
            reward = float(self.is_correct(prompt, text)) + self.speed_weight * stats.rows[row].tokens_per_round
            episodes.append(_episode(met[row], reward))
        return episodes

    @torch.no_grad()
    def decode(self, prompts: Sequence[int]) -> tuple[list[list[int]], list[list[Decision]], Any]:
        """New tokens of one text for each of these prompts, the decisions in them, and the statistics of the run.

        Args:
            prompts (`Sequence[int]`): Indices of prompts, answered together; one may stand there more than once.
        """
        number = len(prompts)
        inputs = pad_left([self.prompts[each] for each in prompts], padding_of(self.target), device_of(self.target))
        width = inputs["input_ids"].shape[1]
        rule = ArbitrationSampler(self.policy, self.floor_ratio, width, [[] for _ in range(number)])
        seeds = [(self.seed << 32) + self.num_texts + row for row in range(number)]
        self.num_texts += number
        config = SpeculativeConfig(
            acceptance=rule, guard=None, drafting="model", length=self.length, on_drafter_error="raise"
        )
        output = self.target.generate(
            **inputs, assistant_model=self.draft, speculative_config=config,
            do_sample=False, max_new_tokens=self.max_new_tokens, row_seeds=seeds, return_dict_in_generate=True,
        )  # fmt: skip
        eos = eos_token_ids(self.target)
        texts = [until_end(row, eos) for row in output.sequences[:, width:].tolist()]
        return texts, rule.met, output.speculative_stats

    def own(self) -> Rollouts:
        """The same without a policy, for the target's own texts."""
        return replace(self, policy=None)


def _episode(met: list[Decision], reward: float) -> Episode:
    features = torch.stack([each.features for each in met]) if met else torch.zeros(0, len(FEATURES))
    return Episode(features, torch.tensor([each.taken for each in met], dtype=torch.bool), reward)
