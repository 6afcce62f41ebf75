"""The runner: what a row's text depends on, and the figures drawn from rows."""

from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch

from hf_specdec import EASDConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality import Batch, Evaluation, Question, Row, RowsFile, parse_quality_arms, summarize
from hf_specdec.quality.runner import changed_rate, row_seed
from tests.toys import noisy_copy, state_of, tiny_llama


EOS = 5


class Words:
    """Writes a token as its number."""

    pad_token_id = 0

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama()
    model.generation_config.eos_token_id = EOS  # rows stop alone, so that they may advance alone
    return SimpleNamespace(model=model, draft=noisy_copy(model))


def evaluation(pair, path, arms="random-0.3", batch_size=3, questions=6, resume=False, **options):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(6, 64, (5 + 3 * i % 7,), generator=generator).tolist() for i in range(questions)]
    known = [Question(i, "", Decimal(7)) for i in range(questions)]
    chosen = parse_quality_arms(arms.split(","), 0.5, 4)
    file = RowsFile.start(path, {}, {}, resume=resume)
    return Evaluation(
        pair.model,
        pair.draft,
        Words(),
        known,
        prompts,
        chosen,
        file,
        batch_size=batch_size,
        max_new_tokens=16,
        length=4,
        **options,
    )


def texts(batches):
    return {(batch.arm, batch.seed, row.question): row.tokens for batch in batches for row in batch.rows}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_depends_on_seed_and_question_alone(pair, tmp_path, temperature):
    options = {"arms": "exact,easd,random-0.3", "temperature": temperature, "questions": 4}
    together = texts(evaluation(pair, tmp_path / "a", batch_size=4, seeds=(4, 9), **options).run())
    alone = texts(evaluation(pair, tmp_path / "b", batch_size=1, seeds=(9, 4), **options).run())
    assert len(together) == (24 if temperature else 16)
    shared = together.keys() & alone.keys()
    assert len(shared) == (24 if temperature else 8)  # greedy arms without dice have the first seed only
    assert {key: together[key] for key in shared} == {key: alone[key] for key in shared}
    first, second = ([together["random-0.3", seed, i] for i in range(4)] for seed in (4, 9))
    assert first != second


def test_the_exact_arm_writes_plain_texts_and_easd_does_not(pair, tmp_path):
    found = texts(evaluation(pair, tmp_path / "rows", arms="plain,exact,easd-plain,easd").run())
    by_arm = {arm: [found[arm, 0, i] for i in range(6)] for arm in ("plain", "exact", "easd-plain", "easd")}
    assert by_arm["exact"] == by_arm["easd-plain"] == by_arm["plain"] != by_arm["easd"]
    assert all(EOS not in text[:-1] for text in by_arm["plain"])


def test_nothing_of_the_users_changes(pair, tmp_path):
    before, dice = (state_of(pair.model), state_of(pair.draft)), torch.get_rng_state()
    evaluation(pair, tmp_path / "rows", arms="plain,exact,easd,random", temperature=0.7).run()
    assert torch.equal(torch.get_rng_state(), dice)
    for old, new in zip(before, (state_of(pair.model), state_of(pair.draft)), strict=True):
        assert old[:2] == new[:2]
        assert old[3:] == new[3:]
        assert all(torch.equal(old[2][name], new[2][name]) for name in old[2])


def test_a_checkpoints_own_penalty_is_switched_off(pair, tmp_path):
    usual = texts(evaluation(pair, tmp_path / "a", arms="plain,exact").run())
    pair.model.generation_config.repetition_penalty = 5.0
    try:
        assert texts(evaluation(pair, tmp_path / "b", arms="plain,exact").run()) == usual
    finally:
        pair.model.generation_config.repetition_penalty = None


def test_batches_hold_similar_lengths_and_are_taken_in_a_mixed_order(pair, tmp_path):
    run = evaluation(pair, tmp_path / "rows", arms="exact,easd", batch_size=2, questions=12)
    lengths = [[len(run.prompts[place]) for place in batch] for batch in run.batches]
    assert [each for batch in lengths for each in batch] == sorted(map(len, run.prompts))
    order = [(task.arm.name, task.number) for task in run._tasks()]
    numbers = [number for _, number in order[::2]]
    assert sorted(numbers) == list(range(6))
    assert numbers != sorted(numbers)
    assert [name for name, _ in order[:4]] == ["exact", "easd", "easd", "exact"]


def test_the_controls_rate_stays_when_seeds_are_added(pair, tmp_path):
    first = evaluation(pair, tmp_path / "rows", arms="easd,random", temperature=0.7, seeds=(0,)).run()
    rate = next(batch.rate for batch in first if batch.arm == "random")
    assert rate == changed_rate([batch for batch in first if batch.arm == "easd"]) > 0
    more = evaluation(pair, tmp_path / "rows", arms="easd,random", temperature=0.7, seeds=(0, 1), resume=True).run()
    assert changed_rate([batch for batch in more if batch.arm == "easd"]) != rate
    assert {batch.rate for batch in more if batch.arm == "random"} == {rate}


def test_row_seeds_of_the_wrong_number_are_refused(pair):
    with pytest.raises(InvalidConfigError, match="one seed for each of 2 rows, got 1"):
        pair.model.generate(
            torch.tensor([[7, 8, 9]] * 2),
            attention_mask=torch.ones(2, 3, dtype=torch.long),
            pad_token_id=0,
            assistant_model=pair.draft,
            speculative_config=EASDConfig(),
            do_sample=True,
            max_new_tokens=3,
            row_seeds=[1],
        )


def test_seeds_of_questions_differ():
    seeds = {row_seed(seed, question) for seed in range(5) for question in range(200)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def batch(arm, right, seed=0, tokens=None, **counts):
    known = {
        "num_rounds": 2,
        "num_draft_tokens": 8,
        "num_verified_tokens": 8,
        "num_accepted_tokens": 5,
        "num_new_tokens": 8,
    }
    rows = [
        Row(i, (tokens or [[1, 2]] * 9)[i], "", None if i == 0 else "7", bool(each), i > 0, counts and known | counts)
        for i, each in enumerate(right)
    ]
    return Batch(arm, seed, 0, rows, seconds=4.0, decode_seconds=2.0)


def test_figures_worked_out_by_hand():
    plain = batch("plain", [1, 1, 0, 0])
    easd = batch("easd", [1, 0, 1, 1], tokens=[[1, 2], [1, 3], [1, 2], [1, 2, 3]], easd_fired=2, easd_changed_token=1)
    control = [batch("random", [1, 1, 1, 0], 0), batch("random", [0, 1, 0, 0], 1)]
    found = summarize([easd, plain, *control], greedy=True)
    assert list(found) == ["plain", "easd", "random"]
    assert found["plain"]["accuracy"]["mean"] == 0.5
    assert found["easd"]["accuracy"]["mean"] == 0.75
    assert found["easd"]["difference"]["plain"]["mean"] == 0.25
    assert found["easd"]["difference"]["random"]["mean"] == 0.25
    assert (found["easd"]["won"], found["easd"]["lost"]) == (2, 1)
    assert found["random"]["accuracy_by_seed"] == [0.75, 0.25]
    assert found["random"]["accuracy"]["mean"] == 0.5
    assert "won" not in found["random"]
    assert found["easd"]["text_equal"] == {"plain": 0.5, "random": 0.5}
    assert found["random"]["text_equal"] == {"plain": 1.0}
    assert found["easd"]["fire_rate"] == 8 / 32
    assert found["easd"]["changed_rate"] == 4 / 32
    assert found["easd"]["acceptance_rate"] == 20 / 32
    assert found["easd"]["tokens_per_round"] == (32 - 4) / 8
    assert found["easd"]["tokens_per_second"] == 9 / 4
    assert found["plain"]["decode_tokens_per_second"] == 4 / 2
    assert found["plain"]["unanswered"] == found["plain"]["cut_off"] == 0.25
    assert "fire_rate" not in found["plain"]
    assert "text_equal" not in summarize([plain, easd], greedy=False)["easd"]


def test_only_common_questions_count():
    found = summarize([batch("plain", [1, 1, 0, 0]), batch("exact", [1, 1])], greedy=True)
    assert found["plain"]["num_questions"] == 2
    assert found["plain"]["accuracy"]["mean"] == 1.0


def test_the_rate_is_per_aligned_draft():
    assert changed_rate([batch("easd", [1, 0], easd_fired=4, easd_changed_token=5)]) == 0.5
    with pytest.raises(InvalidConfigError, match="no aligned draft"):
        changed_rate([batch("easd", [1], num_accepted_tokens=0, easd_changed_token=0)])
