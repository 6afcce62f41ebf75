"""Recorded rounds: what is written down is what happened, and nothing changes because of it."""

from dataclasses import replace

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.acceptance import EarlyExactGuard, Nucleus
from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.rcsd import RoundBook, RoundRecorder, read_shards, roll_out
from hf_specdec.training.texts import Text, observe
from hf_specdec.training.unroll import drafted_logits
from tests.networks import drafter_for, small_target
from tests.toys import noisy_copy, prompts, tiny_llama


STEPS = 4


def decode(target, network, recorder, *, rows=1, seed=3, num_new=14, steps=STEPS, batching="auto", **options):
    config = SpeculativeConfig(
        acceptance=recorder or "exact",
        drafting="model",
        length=steps,
        batching=batching,
        guard=None,
        on_drafter_error="raise",
    )
    rounds = []

    def note(round_):
        rounds.append(round_)
        if recorder is not None:
            recorder(round_)

    out = target.generate(
        **prompts(rows, columns=6, seed=seed),
        assistant_model=network,
        speculative_config=config,
        round_callback=note,
        max_new_tokens=num_new,
        **({"do_sample": False} | options),
    )
    return out, rounds


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_recorded_is_what_happened(rows, batching):
    target = small_target()
    network = drafter_for(target, "eagle")
    plain, _ = decode(target, network, None, rows=rows, batching=batching, eos_token_id=5)
    recorder = RoundRecorder(pad_token_id=0, top=3)
    out, rounds = decode(target, network, recorder, rows=rows, batching=batching, eos_token_id=5)
    assert torch.equal(out, plain)
    recorder.close()
    given = prompts(rows, columns=6)
    assert len(recorder.recordings) == rows
    for row, recording in enumerate(recorder.recordings):
        prompt = given["input_ids"][row][given["attention_mask"][row].bool()].tolist()
        answer = [token for round_ in rounds for token in round_.emitted[row]]
        assert recording.text == Text((*prompt, *answer), len(prompt))
        at, real = len(prompt) + len(rounds[0].emitted[row]), iter(recording.rounds)
        for round_ in rounds[1:]:
            if round_.emitted[row] and int(round_.num_drafted[row]):
                each = next(real)
                assert each.anchor == at - 2
                assert (len(each.drafts), each.num_accepted) == (
                    int(round_.num_drafted[row]),
                    int(round_.num_accepted[row]),
                )
                check_round(target, recording.text.tokens[:at], each)
            at += len(round_.emitted[row])
        assert next(real, None) is None


def check_round(target, prefix, each):
    """Choices and laws are the target's own, after the drafts before them, computed without any cache."""
    logits = target(torch.tensor([[*prefix, *each.drafts]])).logits[0, len(prefix) - 1 : -1]
    assert each.choices == tuple(logits.argmax(-1).tolist())
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(log_p.gather(-1, each.laws.tokens.long()), each.laws.log_p.float(), rtol=0, atol=5e-3)
    assert each.laws.tokens[:, 0].tolist() == list(each.choices)
    torch.testing.assert_close(
        each.laws.log_p.float().exp().sum(-1) + each.laws.tail.float(), torch.ones(len(log_p)), atol=5e-3, rtol=0
    )
    first = next((i for i, pair in enumerate(zip(each.drafts, each.choices, strict=True)) if pair[0] != pair[1]), None)
    assert each.num_accepted == (len(each.drafts) if first is None else first)


def test_the_drafter_scores_recorded_drafts_as_it_did_when_it_made_them():
    target = small_target()
    network = drafter_for(target, "eagle")
    texts = [Text(tuple(decode(target, network, None, seed=seed)[0][0].tolist()), 6) for seed in (1, 2)]
    recordings = roll_out(target, network, texts, steps=STEPS, batch_size=2)
    assert [recording.text for recording in recordings] == texts
    rounds = RoundBook(recordings)(texts, STEPS)
    with torch.no_grad():
        best = [each.argmax(-1) for each in drafted_logits(network, observe(target, network, texts), rounds.tokens)]
    assert sum(int(each.sum()) for each in rounds.drafted) > 20
    for drafts, mine, drafted in zip(rounds.tokens, best, rounds.drafted, strict=True):
        assert torch.equal(drafts[drafted], mine[drafted])
    for step, accepted in enumerate(rounds.accepted):
        for row, column in accepted.nonzero().tolist():
            assert int(rounds.tokens[step][row, column]) == texts[row].tokens[column + 2 + step]


def test_sampled_texts_are_those_of_the_wrapped_rule():
    target = small_target()
    network = drafter_for(target, "eagle")
    texts = []
    for recorder in (None, RoundRecorder()):
        torch.manual_seed(7)
        texts.append(decode(target, network, recorder, do_sample=True, num_new=20)[0])
    assert torch.equal(*texts)


def test_rows_that_end_apart_are_recorded_as_alone():
    target = tiny_llama(layers=1)
    draft, together, recordings = noisy_copy(target, noise=0.3), RoundRecorder(), []
    ids = prompts(5, columns=6)["input_ids"]
    for part, recorder in [(ids, together), *((row[None], RoundRecorder()) for row in ids)]:
        config = SpeculativeConfig(acceptance=recorder, drafting="model", length=3, on_drafter_error="raise")
        options = {"assistant_model": draft, "speculative_config": config, "round_callback": recorder}
        target.generate(part, attention_mask=torch.ones_like(part), do_sample=False, max_new_tokens=16, **options)
        recorder.close()
        recordings += recorder.recordings
    assert recordings[:5] == recordings[5:]
    assert len({len(each.rounds) for each in together.recordings}) > 1


def test_a_relaxed_rule_keeps_its_name_and_its_acceptance():
    rule = Nucleus()
    recorder = RoundRecorder(rule=rule)
    assert (recorder.lossless, recorder.needs_draft_logits, recorder.throws_dice) == (
        rule.lossless,
        rule.needs_draft_logits,
        rule.throws_dice,
    )


def test_a_relaxed_rule_is_guarded_and_limited_as_without_the_recorder():
    target, found = tiny_llama(layers=1), []
    draft = noisy_copy(target, noise=0.3)
    for rule in (Nucleus(0.99), RoundRecorder(rule=Nucleus(0.99))):
        config = SpeculativeConfig(acceptance=rule, drafting="model", length=4, tv_budget=2.0, on_drafter_error="raise")
        assert config.rule == EarlyExactGuard(rule, 2)
        torch.manual_seed(7)
        options = {"assistant_model": draft, "speculative_config": config, "do_sample": True, "max_new_tokens": 24}
        found.append(target.generate(**prompts(), **options, return_dict_in_generate=True))
    (bare, recorded), stats = found, [each.speculative_stats for each in found]
    assert torch.equal(bare.sequences, recorded.sequences)
    assert stats[1].num_unknown_steps == 0
    assert stats[0].total_step_tv == stats[1].total_step_tv > 0
    own = RoundRecorder(rule=EarlyExactGuard(Nucleus(), 5))
    assert SpeculativeConfig(acceptance=own).rule is own


def test_shards_are_bounded_and_go_on(tmp_path):
    target = small_target()
    network = drafter_for(target, "eagle")
    expected = []
    for start in (1, 4):  # the second recorder finds what the first one wrote
        recorder = RoundRecorder(tmp_path, top=2, texts_per_shard=2, max_shards=2)
        memory = RoundRecorder(top=2)
        for seed in range(start, start + 3):
            decode(target, network, recorder, seed=seed)
            decode(target, network, memory, seed=seed)
        recorder.close()
        expected += memory.recordings
    assert [file.name for file in sorted(tmp_path.iterdir())] == [f"rounds-0000000{n}.safetensors" for n in (2, 3)]
    found = list(read_shards(tmp_path))
    assert len(found) == 3
    for one, other in zip(found, expected[3:], strict=True):
        assert one.text == other.text
        for mine, theirs in zip(one.rounds, other.rounds, strict=True):
            assert replace(mine, laws=None) == replace(theirs, laws=None)
            assert torch.equal(mine.laws.tokens, theirs.laws.tokens)
            assert torch.equal(mine.laws.log_p, theirs.laws.log_p)
            assert torch.equal(mine.laws.tail, theirs.laws.tail)


def test_what_cannot_be_recorded_or_looked_up_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match="texts_per_shard"):
        RoundRecorder(texts_per_shard=0)
    with pytest.raises(InvalidConfigError, match="no recorded rounds"):
        list(read_shards(tmp_path))
    with pytest.raises(InvalidConfigError, match="no recorded rounds"):
        RoundBook([])
