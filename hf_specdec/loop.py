"""The loop: a drafter proposes, a rule judges, a controller says how far, the loop commits and yields rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.errors import DrafterError
from hf_specdec.live_rows import everyone, worth_leaving
from hf_specdec.readback import read_together, sent
from hf_specdec.records import (
    Budget,
    Context,
    Draft,
    Explainer,
    Judged,
    Observer,
    Place,
    Round,
    Verdict,
)
from hf_specdec.run import Run
from hf_specdec.sequences import Sequences
from hf_specdec.timing import mark, seconds_between
from hf_specdec.tree_lm import TreeLM
from hf_specdec.tree_walk import TreeWalk
from hf_specdec.verify import evidence_of, verify
from hf_specdec.warping import needs_prefix, warp


__all__ = ["speculate"]


@dataclass(frozen=True)
class _Committed:
    emitted: list[list[int]]
    num_verified: Tensor
    num_accepted: Tensor
    events: Mapping[str, Any]
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    path: Tensor | None = None
    draft: Draft | None = None  # as it was read with the verdict
    problem: str | None = None


def speculate(run: Run, prompt_outputs: Any) -> Iterator[Round]:
    """Decodes until every row has stopped.

    Args:
        run ([`Run`]): The parts.
        prompt_outputs: The target's outputs on the prompts; only the logits after the last column are used.

    Yields:
        One [`Round`] for the prompt's own token (`is_prefill`), then one per target forward pass.
    """
    texts, batch_size = run.sequences, run.sequences.batch_size
    schedule = run.controller.start(batch_size)
    started = time.perf_counter()
    nothing = Draft.empty(texts.batch_size)
    committed = _commit(run, nothing, prompt_outputs.logits[:, -1:])
    _show(run, prompt_outputs, committed, texts.prompt_columns - 1)
    yield _round(run, nothing, committed, 0.0, time.perf_counter() - started, is_prefill=True)

    while _goes_on(run):
        if not bool(texts.unfinished.any()):
            run.target.idle()
            continue
        started, begun = time.perf_counter(), mark(_drafts_on(run))
        draft, problem = _propose(run, _cap(run, schedule.next_budget().of_rows(texts.rows)))
        drafted, done = time.perf_counter(), mark(draft.tokens.device)
        if not run.lockstep:
            texts.pad_finished(int(draft.limits.max() if draft.parents is None else draft.longest.max()))
        padded = texts.with_padded_rows(draft) if run.lockstep else draft
        length = int(texts.lengths[0])
        outputs, committed = _judge(run, padded)
        _show(run, outputs, committed, length - 1)
        draft, problem = committed.draft or draft, committed.problem or problem
        ended = time.perf_counter()
        # The device may still have been drafting when the target's pass was asked for.
        if (seconds := seconds_between(begun, done)) is not None:
            drafted = started + seconds
        round_ = _round(run, draft, committed, drafted - started, ended - drafted, problem=problem)
        round_ = everyone(round_, texts.rows, batch_size)
        if run.drops_rows and worth_leaving(texts.unfinished):
            lost = run.keep_rows(texts.unfinished.nonzero()[:, 0])
            round_ = replace(round_, problem=lost or round_.problem)
        schedule.observe(round_)
        yield round_


def _judge(run: Run, draft: Draft) -> tuple[Any, _Committed]:
    """The target's pass over a draft, and what is committed of it."""
    texts = run.sequences
    if draft.parents is None:
        unread = None if draft.unread is None else draft.tokens
        outputs = run.target.run(texts.with_draft(draft), texts.lengths + draft.limits, draft.limits + 1, unread)
        committed = _commit(run, draft, outputs.logits)
        if committed.draft is not None:
            run.target.tell(committed.draft.tokens)
        return outputs, committed
    assert isinstance(run.target, TreeLM)
    outputs = run.target.run_tree(texts.tokens, texts.lengths, draft)
    logits = outputs.logits.to(texts.device, torch.float32)
    record = run.record
    walk = TreeWalk(texts, run.processors, run.do_sample, run.streams, record.add, lambda: record.given_scores)
    walked = walk.in_step(draft, logits) if run.lockstep else walk.by_row(draft, logits)
    run.target.keep_path(walked.path)
    return outputs, _Committed(walked.emitted, walked.num_verified, (walked.path >= 0).sum(-1), {}, path=walked.path)


def _goes_on(run: Run) -> bool:
    unfinished = bool(run.sequences.unfinished.any())
    return unfinished if run.goes_on is None else run.goes_on(unfinished)


def _drafts_on(run: Run) -> torch.device:
    """Where the drafter computes."""
    device: torch.device = getattr(run.drafter, "device", run.target.device)
    return device


def _cap(run: Run, budget: Budget) -> Budget:
    """The controller's wish, cut to what the run has left; one place is the target's own token."""
    room = (run.max_length - run.sequences.lengths - 1).clamp(min=0)
    return budget.capped(torch.where(run.sequences.active, room, 0))


def _propose(run: Run, budget: Budget) -> tuple[Draft, str | None]:
    """The drafter's proposal. A drafter that fails is reported once and not asked again."""
    texts = run.sequences
    if run.drafter is None or not bool((budget.limit > 0).any()):
        return Draft.empty(texts.batch_size), None
    context = Context(texts.tokens, texts.lengths, run.prompt_mask, texts.active)
    try:
        draft = run.drafter.propose(context, budget).check(context, budget, run.vocab_size)
        # Processors and criteria that see the whole batch at each step must see its tokens.
        return _check_tree(run, draft.read() if run.lockstep else draft), None
    except Exception as error:
        return Draft.empty(texts.batch_size), run.lose_drafter(error)


def _check_tree(run: Run, draft: Draft) -> Draft:
    if draft.parents is not None and not (run.rule.lossless and isinstance(run.target, TreeLM)):
        judge = "this run" if run.rule.lossless else type(run.rule).__name__
        raise DrafterError(
            f"{type(run.drafter).__name__} drafted a tree, and {judge} judges chains only: draft chains, or pass "
            "RCSDConfig(tree=...)"
        )
    return draft


def _commit(run: Run, draft: Draft, logits: Tensor) -> _Committed:
    logits = logits.to(run.sequences.device, torch.float32)
    return _commit_in_step(run, draft, logits) if run.lockstep else _commit_by_row(run, draft, logits)


def _commit_in_step(run: Run, draft: Draft, logits: Tensor) -> _Committed:
    """Position by position: processors, verdict, criteria, in plain decoding's own order, until some row must stop."""
    texts = run.sequences
    emitted: list[list[int]] = [[] for _ in range(texts.batch_size)]
    num_verified, num_accepted = torch.zeros_like(draft.lengths), torch.zeros_like(draft.lengths)
    events: dict[str, Tensor] = {}
    place, block = _place(texts, draft), logits.clone() if run.processors else logits
    judged: list[tuple[Tensor, Tensor, Verdict]] = []
    for position in range(draft.width + 1):
        raw, going = logits[:, position], texts.active
        shown = raw.clone() if run.processors else raw  # a processor may write into what it is shown
        scores = run.processors(texts.prefix, shown) if run.processors else raw
        run.record.add(scores, shown)
        width = int(position < draft.width)
        if run.processors:
            block[:, position] = scores
        whole = evidence_of(draft, block, logits, run.do_sample, 0, draft.width, place)
        evidence = evidence_of(draft, scores[:, None], raw[:, None], run.do_sample, position, width, place, whole)
        verdict = verify(run.rule, evidence, scores, run.streams, going)
        accepted = verdict.num_accepted > 0
        tokens = torch.where(accepted, draft.tokens[:, position], verdict.next_tokens) if width else verdict.next_tokens
        for row, token in enumerate(texts.append_step(tokens, run.record.given_scores)):
            emitted[row].extend(token)
        if width:
            reached = going & draft.valid[:, position]
            judged.append((reached, reached & accepted, verdict))
            num_verified += reached
        num_accepted += going & accepted
        events = _add(events, verdict.events, going)
        # What was fed after the end of a row is not the padding that plain decoding would have fed.
        ended = going & ~texts.active
        if bool(ended.any()) or not bool(accepted[texts.active].all()):
            break
    together = _together(run, draft, block, logits, place, judged)
    return _Committed(emitted, num_verified, num_accepted, *_observe(run, together, events))


def _together(
    run: Run,
    draft: Draft,
    scores: Tensor,
    logits: Tensor,
    place: Place,
    judged: list[tuple[Tensor, Tensor, Verdict]],
) -> Judged | None:
    """What was judged one position after another, as one record; None where the rule does not look at it."""
    if not judged or not isinstance(run.rule, Observer | Explainer):
        return None
    whole = evidence_of(draft, scores, logits, run.do_sample, 0, draft.width, place)
    evidence = evidence_of(draft, scores, logits, run.do_sample, 0, len(judged), place, whole)
    reached, accepted = (torch.stack(each, -1) for each in list(zip(*judged, strict=True))[:2])
    uniforms = torch.cat([verdict.uniforms for *_, verdict in judged if verdict.uniforms is not None], -1)
    return Judged(evidence, reached, accepted, uniforms, judged[-1][2].next_tokens)


def _commit_by_row(run: Run, draft: Draft, logits: Tensor) -> _Committed:
    """One verdict on the whole draft; each row then takes its own tokens until a criterion stops it."""
    texts, going = run.sequences, run.sequences.unfinished
    place = _place(texts, draft)
    text = place.text_on(logits.device) if needs_prefix(run.processors) else place.text
    scores = warp(run.processors, text, texts.lengths, logits)
    evidence = evidence_of(draft, scores, logits, run.do_sample, 0, draft.width, place)
    ends = sent(draft.lengths, scores.device)
    bonus = scores[torch.arange(texts.batch_size, device=scores.device), ends]
    verdict = verify(run.rule, evidence, bonus, run.streams, going)
    draft, unread = verdict.draft or draft, draft.unread
    proposed = [
        [*draft.tokens[row, : int(verdict.num_accepted[row])].tolist(), int(verdict.next_tokens[row])]
        if going[row]
        else []
        for row in range(texts.batch_size)
    ]
    emitted = texts.append_rows(proposed)
    if texts.batch_size == 1:
        for position in range(len(emitted[0])):
            run.record.add(scores[:, position], logits[:, position])
    counts = torch.tensor([len(each) for each in emitted])
    num_accepted = torch.minimum(verdict.num_accepted, counts)
    num_verified = torch.minimum(draft.lengths, verdict.num_accepted + 1).minimum(counts)
    cut = counts <= verdict.num_accepted  # the row stopped before the position that the rule's events are about
    events = _add({}, verdict.events, going & ~cut)
    positions = torch.arange(draft.width)
    judged = Judged(
        evidence,
        positions < num_verified[:, None],
        positions < num_accepted[:, None],
        verdict.uniforms,
        verdict.next_tokens,
    )
    problem = None
    if unread is not None and not verdict.sound:
        problem = run.lose_drafter(DrafterError(unread.complaint))
    events, marks = _observe(run, judged if draft.width else None, events)
    return _Committed(
        emitted, num_verified, num_accepted, events, marks, draft=None if unread is None else draft, problem=problem
    )


def _place(texts: Sequences, draft: Draft) -> Place:
    columns = texts.lengths[:, None] + torch.arange(draft.width)
    drafted = None if draft.unread is None else (columns, draft.tokens)
    return Place(texts.with_draft(draft), columns, texts.prompt_columns, texts.eos_token_ids, drafted)


def _observe(
    run: Run, judged: Judged | None, events: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
    """Shows a committed round to a rule that wants to see it, only now: a memory must not change within a round."""
    if judged is None:
        return events, {}
    marks = run.rule.explain(judged) if isinstance(run.rule, Explainer) else {}
    counts = run.rule.observe(judged) if isinstance(run.rule, Observer) else {}
    values = read_together([*marks.values(), *counts.values()])
    marks, seen = dict(zip(marks, values, strict=False)), values[len(marks) :]
    return _add(events, dict(zip(counts, seen, strict=True)), judged.reached.any(-1)), marks


def _add(events: dict[str, Tensor], more: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return events | {name: events.get(name, 0) + torch.where(rows, count, 0) for name, count in more.items()}


def _show(run: Run, outputs: Any, committed: _Committed, first_column: int) -> None:
    if run.observe_outputs is not None:
        run.observe_outputs(outputs, max(map(len, committed.emitted)), first_column)


def _round(
    run: Run,
    draft: Draft,
    committed: _Committed,
    draft_seconds: float,
    verify_seconds: float,
    *,
    is_prefill: bool = False,
    problem: str | None = None,
) -> Round:
    return Round(
        emitted=committed.emitted,
        num_drafted=draft.lengths,
        num_verified=committed.num_verified,
        num_accepted=committed.num_accepted,
        unfinished=run.sequences.unfinished,
        draft_seconds=draft_seconds - draft.prefill_seconds - draft.shared_seconds,
        verify_seconds=verify_seconds + draft.shared_seconds,
        prefill_seconds=draft.prefill_seconds,
        source=draft.source,
        stretches=draft.kinds,
        is_prefill=is_prefill,
        events=_with_depths(draft, committed.events),
        problem=problem,
        num_attempted=draft.num_attempted,
        num_read=draft.num_read,
        path=committed.path,
        longest=None if draft.parents is None else draft.longest,
        marks=committed.marks,
    )


def _with_depths(draft: Draft, events: Mapping[str, Any]) -> Mapping[str, Any]:
    """The events with the histogram of the layers after which tokens were drafted, for drafters that leave early."""
    if draft.exit_depths is None:
        return events
    depths = torch.where(draft.valid, draft.exit_depths, 0)
    return {**events, "exit_depths": torch.nn.functional.one_hot(depths).sum(1)}
