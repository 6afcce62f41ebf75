"""EASD at temperature 0, and what it counts."""

import numpy as np
import pytest
import torch

from hf_specdec import EASDConfig
from hf_specdec.acceptance import EASD, Exact
from hf_specdec.records import Evidence
from hf_specdec.verify import verify
from tests.acceptance import Dice
from tests.acceptance.easd import BANNED, COUNTERS, SURE, UNSURE, WAYS, always, one_position, reference_fires
from tests.toys import noisy_copy, prompts, tiny_llama


# --- temperature 0 --------------------------------------------------------------------------------------------------


def greedy_token(rule, token, scores, draft_logits=None):
    evidence = one_position(UNSURE, UNSURE if draft_logits is None else draft_logits, scores, token, do_sample=False)
    bonus = torch.tensor([[0.0, 0.0, 0.0, 5.0]], dtype=torch.float64)
    verdict = verify(rule, evidence, bonus, None, torch.tensor([True]))
    return int(verdict.num_accepted), int(verdict.next_tokens)


SCORES = [1.0, 4.0, 3.5, 2.0]  # argmax 1, runner-up 2


@pytest.mark.parametrize("apply_to", ["accepted", "all"])
def test_an_aligned_draft_gives_way_to_the_runner_up(apply_to):
    assert greedy_token(Exact(), 1, SCORES) == (1, 3)
    assert greedy_token(always(apply_to=apply_to), 1, SCORES) == (0, 2)


@pytest.mark.parametrize("token", [0, 2, 3])
@pytest.mark.parametrize(("resample", "apply_to"), WAYS)
def test_any_other_draft_gives_way_to_the_argmax(token, resample, apply_to):
    assert greedy_token(always(resample=resample, apply_to=apply_to), token, SCORES) == (0, 1)


@pytest.mark.parametrize("apply_to", ["accepted", "all"])
def test_plain_resampling_emits_the_argmax_whatever_was_drafted(apply_to):
    """So at temperature 0 it changes the number of accepted drafts and never the text."""
    rule = always(resample="plain", apply_to=apply_to)
    assert {greedy_token(rule, token, SCORES) for token in range(4)} == {(0, 1)}


@pytest.mark.parametrize(("penalty", "expected"), [(0.0, 2), (0.5, 2), (0.6, 2), (0.61, 1), (0.9, 1), (1.0, 1)])
def test_a_penalty_only_removes_a_narrow_lead(penalty, expected):
    """exp(3.5 - 4) = 0.607: the argmax keeps its place while its penalised probability is above the runner-up's."""
    assert greedy_token(always(penalty=penalty), 1, SCORES)[1] == expected


def test_the_runner_up_is_sought_among_what_the_processors_left():
    assert greedy_token(always(), 1, [1.0, 4.0, BANNED, 2.0]) == (0, 3)
    assert greedy_token(always(), 1, [BANNED, 4.0, BANNED, BANNED]) == (1, 3)


def reference_text(target, draft, prompt, rule, *, length, tokens):
    """Greedy EASD for one text with no cache at all: the text, and how often the rule fired and changed a token."""

    def logits(model, text):
        with torch.no_grad():
            return model(torch.tensor([text])).logits[0].double().numpy()

    text, end = list(prompt), len(prompt) + tokens
    text.append(int(logits(target, text)[-1].argmax()))  # the prompt's own token has no draft
    fired = changed = 0
    while len(text) < end:
        drafted, draft_rows = [], []
        for _ in range(min(length, end - len(text) - 1)):
            draft_rows.append(logits(draft, text + drafted)[-1])
            drafted.append(int(draft_rows[-1].argmax()))
        target_rows = logits(target, text + drafted)[len(text) - 1 :]
        for token, target_row, draft_row in zip(drafted, target_rows, draft_rows, strict=False):
            order = np.argsort(-target_row)
            aligned = token == order[0]
            if reference_fires(target_row, draft_row, rule):
                fired, changed = fired + 1, changed + aligned
                text.append(int(order[1] if aligned and rule.resample == "masked" else order[0]))
                if rule.resample == "plain":
                    changed -= aligned
                break
            text.append(int(order[0]))
            if not aligned:
                break
        else:
            text.append(int(target_rows[len(drafted)].argmax()))
    return text, fired, changed


@pytest.mark.parametrize(
    ("batch_size", "batching", "resample"),
    [
        (1, "ragged", "masked"),
        (1, "ragged", "plain"),
        (1, "lockstep", "masked"),
        (3, "ragged", "masked"),
        (
            3,
            "lockstep",
            "plain",
        ),  # masked, rows in step meet the rule elsewhere: a rejection cuts the others' drafts too
    ],
)
def test_text_and_counters_equal_a_reference_without_any_cache(batch_size, batching, resample):
    target = tiny_llama(layers=2)
    draft = noisy_copy(target, noise=0.1)
    config = EASDConfig(
        entropy_threshold=1.2, overlap_threshold=0.5, top_n=4, resample=resample, length=3, batching=batching,
        on_drafter_error="raise",
    )  # fmt: skip
    inputs = prompts(batch_size)
    out = target.generate(
        **inputs,
        assistant_model=draft,
        speculative_config=config,
        do_sample=False,
        max_new_tokens=16,
        return_dict_in_generate=True,
    )
    totals = [0, 0]
    for row in range(batch_size):
        real = inputs["attention_mask"][row].bool()
        text, fired, changed = reference_text(
            target, draft, inputs["input_ids"][row][real].tolist(), config.rule, length=3, tokens=16
        )
        assert out.sequences[row][7 - int(real.sum()) :].tolist() == text
        counted = out.speculative_stats.rows[row].events
        if batching == "ragged" or batch_size == 1:
            assert (counted["easd_fired"], counted["easd_changed_token"]) == (fired, changed)
        totals = [totals[0] + fired, totals[1] + changed]
    assert totals[0] > 2
    assert (totals[1] > 0) == (resample == "masked")
    exact = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert torch.equal(out.sequences, exact) == (resample == "plain")
    assert not out.speculative_stats.lossless


# --- counters, by hand ----------------------------------------------------------------------------------------------


HALF, FIRST, SECOND = [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
BOTH_UNSURE, TARGET_SURE, DRAFT_SURE = (UNSURE, UNSURE), (SURE, UNSURE), (UNSURE, SURE)
DISAGREE = (UNSURE, UNSURE[::-1])
# Token 0 is drafted twice with certainty. Per row: what holds at each position, the target's two laws, how many tokens
# were drafted, three dice; then the accepted number, the emitted token, and the two counts.
TRACES = {
    "fires on a kept draft": ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.3, 0.5, 0.5], 0, 1, 1, 1),
    "fires on a lost draft": ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.7, 0.5, 0.5], 0, 1, 1, 0),
    "fires after an accepted draft": ([DRAFT_SURE, BOTH_UNSURE], [HALF, HALF], 2, [0.3, 0.3, 0.5], 1, 1, 1, 1),
    "is not reached": ([TARGET_SURE, BOTH_UNSURE], [SECOND, HALF], 2, [0.3, 0.3, 0.5], 0, 1, 0, 0),
    "is silent twice": ([TARGET_SURE, DRAFT_SURE], [HALF, HALF], 2, [0.3, 0.3, 0.5], 2, 3, 0, 0),
    "is silent where the sets differ": ([DISAGREE, DISAGREE], [HALF, HALF], 2, [0.3, 0.7, 0.5], 1, 1, 0, 0),
    "has one candidate only": ([BOTH_UNSURE, BOTH_UNSURE], [FIRST, FIRST], 2, [0.3, 0.3, 0.5], 2, 3, 0, 0),
    "has no draft": ([BOTH_UNSURE, BOTH_UNSURE], [HALF, HALF], 0, [0.3, 0.3, 0.5], 0, 3, 0, 0),
    "has one draft": ([TARGET_SURE, BOTH_UNSURE], [FIRST, HALF], 1, [0.3, 0.3, 0.5], 1, 3, 0, 0),
}


def traced(traces, rule):
    laws = torch.tensor([trace[1] for trace in traces], dtype=torch.float64)
    certain = [positions for positions, *_ in traces]
    evidence = Evidence(
        tokens=torch.zeros(len(traces), 2, dtype=torch.long),
        valid=torch.arange(2) < torch.tensor([trace[2] for trace in traces])[:, None],
        scores=laws.log(),
        target_logits=torch.tensor([[target for target, _ in each] for each in certain], dtype=torch.float64),
        do_sample=True,
        q=torch.tensor(FIRST, dtype=torch.float64).expand(len(traces), 2, -1),
        draft_logits=torch.tensor([[draft for _, draft in each] for each in certain], dtype=torch.float64),
    )
    bonus = torch.tensor([[BANNED, BANNED, BANNED, 0.0]]).expand(len(traces), -1)
    numbers = torch.tensor([trace[3] for trace in traces], dtype=torch.float64)
    return verify(rule, evidence, bonus, Dice(numbers), torch.ones(len(traces)) > 0)


def test_counters_on_hand_made_traces():
    verdict = traced(list(TRACES.values()), EASD(1.0, 1.0, 0.5, top_n=2))
    columns = (verdict.num_accepted, verdict.next_tokens, *(verdict.events[name] for name in COUNTERS))
    found = dict(zip(TRACES, zip(*(each.tolist() for each in columns), strict=True), strict=True))
    assert found == {name: trace[4:] for name, trace in TRACES.items()}


def test_a_draft_that_survives_its_penalty_is_not_counted_as_changed():
    trace = ([BOTH_UNSURE, TARGET_SURE], [HALF, FIRST], 2, [0.3, 0.5, 0.1])
    for penalty, token, changed in ((0.0, 1, 1), (0.5, 0, 0), (1.0, 0, 0)):
        verdict = traced([trace], EASD(1.0, 1.0, 0.5, top_n=2, penalty=penalty))
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.next_tokens.tolist() == [token]
        assert [int(verdict.events[name]) for name in COUNTERS] == [1, changed]
