"""The target's own lower layers as drafter, in the target's own cache (SpecBound, arXiv 2604.12247)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdec._compat import undecorated_model
from hf_specdec.drafters.adapter_run import AdapterRun
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.exit_policy import ExitPolicy
from hf_specdec.errors import DrafterError
from hf_specdec.features import TargetFeatures
from hf_specdec.layer_gate import LayerGate
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.readback import is_host, read_together, sent
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.timing import wait_for
from hf_specdec.verify import draw
from hf_specdec.warping import warp


__all__ = ["SelfDrafter"]


@dataclass(frozen=True)
class _Exit:
    """Where each row's newest token left the model, depth 0 where it did not, and the exit's logits there.

    On a GPU also the best tokens by these logits, where no more is asked for: they are read with the confidences.
    """

    depths: Tensor
    confidences: Tensor
    logits: Tensor
    best: Tensor | None = None

    def or_else(self, deeper: _Exit) -> _Exit:
        """The rows that have left here, and of the others what a deeper exit says."""
        here = self.depths > 0
        return _Exit(
            torch.where(here, self.depths, deeper.depths),
            torch.where(here, self.confidences, deeper.confidences),
            torch.where(sent(here[:, None], self.logits.device), self.logits, deeper.logits.to(self.logits.device)),
            None if self.best is None or deeper.best is None else torch.where(here, self.best, deeper.best),
        )


@dataclass
class _Growing:
    """The drafts of one round as they grow, `(batch,)` tokens at a time."""

    context: Context
    tokens: Tensor
    lengths: Tensor
    ahead: int
    drafted: list[Tensor] = field(default_factory=list)
    depths: list[Tensor] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    prefill_seconds: float = 0.0
    num_read: int = 0

    def append(self, tokens: Tensor, rows: Tensor) -> None:
        """Writes a token after each of `rows`."""
        room = int(self.lengths.max()) + 1 - self.tokens.shape[1]
        longer = torch.nn.functional.pad(self.tokens, (0, max(0, room)))
        here = (torch.arange(longer.shape[1]) == self.lengths[:, None]) & rows[:, None]
        self.tokens = torch.where(here, tokens[:, None], longer)
        self.lengths = self.lengths + rows.long()


@final
class SelfDrafter(DrafterBase):
    """Drafts with the target's lower layers. It shares keys, values and hidden states with the verification of its drafts.

    Whether a position is drafted is decided from the exit's law and never from the token drawn, which keeps sampling exact.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        target ([`LayeredLM`]): The run's own target.
        policy ([`ExitPolicy`]): When tokens leave.
        heads ([`ExitHeads`], *optional*): Exit heads; raw ones without them.
        prompt_states (`Mapping[int, TargetFeatures]`, *optional*): For adapters, by exit layer, the target's hidden states
            along the prompt; none of a target that has read none yet.
    """

    def __init__(
        self,
        settings: DraftSettings,
        target: LayeredLM,
        policy: ExitPolicy,
        heads: ExitHeads | None = None,
        prompt_states: Mapping[int, TargetFeatures] | None = None,
    ) -> None:
        super().__init__(settings)
        self.target, self.policy = target, policy
        self.heads: Any = None if heads is None or heads.config.kind == "raw" else heads
        self.num_layers = len(target.gate.layers)
        self.exits = policy.exits_of(self.num_layers, None if heads is None else tuple(heads.config.exit_layers))
        self.adapters: dict[int, AdapterRun] = {}
        if heads is not None and heads.reads_context:
            states = prompt_states or {depth: TargetFeatures(target.model, (depth,)) for depth in self.exits}
            self.adapters = {
                depth: AdapterRun(settings, target, heads.head(depth), depth, states[depth]) for depth in self.exits
            }
            target.on_pass = self._keep_states

    @classmethod
    def for_stock_loop(
        cls, settings: DraftSettings, model: Any, policy: ExitPolicy, heads: ExitHeads | None = None
    ) -> SelfDrafter:
        """The same algorithm for transformers' own assisted decoding, which cannot share its cache: this drafter keeps one,
        and verification runs all layers again. It is the way to compare, and seldom the way to be fast (ours).

        Args:
            settings ([`DraftSettings`]): What it must know about the run.
            model (`PreTrainedModel`): The target.
            policy, heads: As for the class.

        Raises:
            [`IncompatibleDraftError`]: If the heads were fitted to another model.
        """
        if heads is not None:
            heads.check_target(model)
        cache = DynamicCache(config=undecorated_model(model).config.get_text_config(decoder=True))
        held = torch.zeros(1, 0, dtype=torch.long)
        target = LayeredLM(model, LayerGate(model), pad_token_id=settings.pad_token_id, cache=cache, held=held)
        return cls(settings, target, policy, heads)

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """As for every drafter; nothing is drafted after a single token, which has no cache to stand on."""
        if input_ids.shape[1] < 2:
            return input_ids, None
        with self.target.alone():
            return super().get_candidates(input_ids, **kwargs)

    def propose(self, context: Context, budget: Budget) -> Draft:
        most = budget.max_tokens.clamp(max=self.policy.max_width)
        going = context.unfinished & (most > 0)
        growing = _Growing(context, context.tokens, context.lengths, int(most.max()))
        num_drafted, num_attempted = torch.zeros_like(most), torch.zeros_like(most)
        sureness, shared_seconds = torch.ones(len(most)), 0.0
        while bool(going.any()):
            num_attempted += going.long()
            started, prefill_seconds = time.perf_counter(), growing.prefill_seconds
            exit_ = self._leave(growing, going)
            going = going & (exit_.depths > 0)
            scores = self._scores(growing, exit_.logits) if bool(going.any()) else exit_.logits
            if budget.min_confidence > 0:
                going = going & (scores.softmax(-1).max(-1).values.cpu() >= budget.min_confidence)
            if not bool(going.any()):
                shared_seconds = time.perf_counter() - started - (growing.prefill_seconds - prefill_seconds)
                break
            tokens = self._draft_tokens(growing, scores, exit_, going)
            # Rows that have stopped for good are padded, by plain decoding as well: that they may be fed again is moot.
            idle = ~context.unfinished
            growing.append(torch.where(idle, self.settings.pad_token_id, tokens), going | idle)
            num_drafted += going.long()
            sureness = torch.where(going, sureness * exit_.confidences, sureness)
            going = going & (num_drafted < most) & ~self._is_eos(tokens)
            going = going & (sureness >= self.policy.min_cumulative_confidence)
        return self._draft(growing, num_drafted, num_attempted, shared_seconds)

    def _leave(self, growing: _Growing, going: Tensor) -> _Exit:
        """Takes the newest tokens up from exit to exit until those of all rows that still draft have left."""
        found = self._exit_after(self.exits[0], growing, going)
        for depth in self.exits[1:]:
            if bool((found.depths > 0)[going].all()):
                break
            found = found.or_else(self._exit_after(depth, growing, going))
        return found

    def _exit_after(self, depth: int, growing: _Growing, going: Tensor) -> _Exit:
        def head(hidden: Tensor) -> Tensor:
            if depth in self.adapters:
                mapped = self._adapted(self.adapters[depth], growing, going)
            else:
                mapped = self.heads(hidden.to(self.heads.device, self.heads.dtype), layer=depth)
            return mapped.to(hidden)

        transform = None if self.heads is None else head
        logits = self.target.climb(growing.tokens, growing.lengths, depth, transform, growing.ahead).float()
        asked = [self.policy.confidence(logits, depth, self.num_layers)]
        if self._best_is_enough and not is_host(logits.device):
            asked.append(self._best(logits))
        confidences, *best = read_together(asked)
        if bool(confidences[going].isnan().any()):
            raise DrafterError(f"the exit after layer {depth} gives logits that contain NaN")
        leaves = confidences >= self.policy.confidence_threshold
        return _Exit(torch.where(leaves, depth, 0), confidences, logits, best[0] if best else None)

    def _adapted(self, adapter: AdapterRun, growing: _Growing, going: Tensor) -> Tensor:
        started, reads_prompt = time.perf_counter(), adapter.lm is None
        mapped = adapter.read(growing.context, growing.tokens, growing.lengths, going)
        if reads_prompt:
            wait_for(mapped.device)  # once in a run
            growing.prefill_seconds += time.perf_counter() - started
        else:
            growing.num_read = max(growing.num_read, adapter.num_read)
        return mapped

    def _keep_states(self) -> None:
        for adapter in self.adapters.values():
            adapter.keep()

    def _scores(self, growing: _Growing, logits: Tensor) -> Tensor:
        """What drafts are chosen by: an exit's own scores, `(batch, kept)`, where its best is all that is asked for."""
        if self._best_is_enough:
            return logits
        whole = self.target.over_vocabulary(logits)
        return warp(self.settings.warpers, growing.tokens, growing.lengths, whole[:, None])[:, 0]

    @property
    def _best_is_enough(self) -> bool:
        return not self.settings.warpers and not (self.settings.do_sample and self.policy.draft_sampling)

    def _best(self, scores: Tensor) -> Tensor:
        """`(batch,)` tokens with the largest scores, where these are."""
        best, ids = scores.argmax(-1), self.target.climb_ids
        return best if ids is None or not self._best_is_enough else ids.to(best.device)[best]

    def _draft_tokens(self, growing: _Growing, scores: Tensor, exit_: _Exit, going: Tensor) -> Tensor:
        """`(batch,)` tokens of the exit's law, noted down with it."""
        streams = self.settings.streams
        if self.settings.do_sample and self.policy.draft_sampling:
            law = scores.softmax(-1)
            numbers = torch.rand(len(going), dtype=torch.float64) if streams is None else streams.uniforms(going)
            tokens = draw(law, numbers).cpu()
            growing.laws.append(law)
        else:
            tokens = self._best(scores).cpu() if exit_.best is None else exit_.best
        growing.drafted.append(tokens)
        growing.depths.append(torch.where(going, exit_.depths, 0))
        if self.settings.keep_logits:
            growing.logits.append(self.target.over_vocabulary(exit_.logits))
        return tokens

    def _draft(self, growing: _Growing, num_drafted: Tensor, num_attempted: Tensor, shared_seconds: float) -> Draft:
        empty = Draft.empty(len(num_drafted))
        return Draft(
            torch.stack(growing.drafted, -1) if growing.drafted else empty.tokens,
            num_drafted,
            q=torch.stack(growing.laws, 1) if growing.laws else None,
            logits=torch.stack(growing.logits, 1) if growing.logits else None,
            source="self",
            num_attempted=num_attempted,
            exit_depths=torch.stack(growing.depths, -1) if growing.depths else None,
            prefill_seconds=growing.prefill_seconds,
            shared_seconds=shared_seconds,
            num_read=growing.num_read,
        )

    def _is_eos(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.settings.eos_token_ids, dtype=tokens.dtype))
