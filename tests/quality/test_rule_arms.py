"""Arms of rules and procedures by name, the Pareto front, and reward-guided answers in a measurement."""

import pytest

from hf_specdec import CoSpecConfig, CSDConfig, InvalidConfigError, NucleusConfig
from hf_specdec.acceptance import ACCEPTANCE, POLICY_NAME, CorrectionMemory, FLy, PolicyNetwork, TopK
from hf_specdec.quality import Evaluation, Judgement, Learnt, RowsFile, pareto_front, parse_quality_arms
from hf_specdec.quality.rsd import CheckReward, LikelihoodReward
from tests.quality.test_rsd import greedy, letter_tokenizer
from tests.quality.test_runner import Decimal, Question
from tests.toys import noisy_copy, tiny_llama


NEEDS = {"lenience": "-0.5", "lossy_eps": "-0.1", "ensemble": "-0.5", "ears": "-0.2", "asd": "-1"}


def test_every_rule_has_an_arm(tmp_path):
    CorrectionMemory(fingerprint="x").save(tmp_path / "memory.safetensors")
    PolicyNetwork(4).save(tmp_path / POLICY_NAME)
    learnt = Learnt(tmp_path, tmp_path)
    names = [name + NEEDS.get(name, "") for name in ACCEPTANCE if name not in ("judge", "relaxed_thinking")]
    arms = parse_quality_arms(names, 2.0, 4, learnt)
    for name, arm in zip(names, arms, strict=True):
        rule = arm.config.rule
        inner = getattr(rule, "inner", rule)
        assert isinstance(inner, ACCEPTANCE[name.partition("-")[0]])
        assert arm.config.on_drafter_error == "raise"
        assert arm.config.drafting == "model"
        assert arm.config.length == (15 if isinstance(inner, FLy) else 4)
    by_name = dict(zip(names, arms, strict=True))
    assert isinstance(by_name["csd"].config, CSDConfig)
    assert by_name["csd"].config.fingerprint == "x"
    assert isinstance(by_name["cospec"].config, CoSpecConfig)


def test_a_value_is_the_rules_first_option():
    nucleus, topk = parse_quality_arms(["nucleus-0.7", "topk-3"], 2.0, 4)
    assert nucleus.config.nucleus_p == 0.7
    assert isinstance(nucleus.config, NucleusConfig)
    assert topk.config.rule.inner == TopK(3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenience", "exact at its default: name a value"),
        ("cospec", "--policy FOLDER"),
        ("judge", "judge of yours"),
        ("relaxed_thinking", "ends thinking"),
        ("nucleus-2", "nucleus_p must lie"),
        ("nonsense-3", "unknown arm"),
        ("mine=easd", "by name alone"),
    ],
)
def test_arms_that_cannot_be_measured_say_why(name, message):
    with pytest.raises(InvalidConfigError, match=message):
        parse_quality_arms([name], 2.0, 4)


def test_rewards_by_name():
    arms = parse_quality_arms(["rsd", "rsd-checks-0.5", "rsd-likelihood-0.3"], 2.0, 4)
    rewards = [(type(arm.procedure.reward), arm.procedure.threshold) for arm in arms]
    assert rewards == [(CheckReward, 0.7), (CheckReward, 0.5), (LikelihoodReward, 0.3)]
    assert not any(arm.is_plain for arm in arms)


def test_the_front_holds_what_nothing_beats():
    def figures(speed, accuracy):
        return {"tokens_per_second": speed, "accuracy": {"mean": accuracy}}

    summary = {
        "a": figures(1, 0.9),
        "b": figures(2, 0.8),
        "c": figures(2, 0.7),
        "d": figures(3, 0.1),
        "e": figures(1, 0.5),
    }
    assert pareto_front(summary) == ["d", "b", "a"]
    assert pareto_front({"a": figures(1, 0.5), "b": figures(1, 0.5)}) == ["a", "b"]


def test_a_measurement_answers_step_by_step(tmp_path):
    model = tiny_llama(layers=1)
    draft = noisy_copy(model, noise=0.3)
    prompts = [[6, 7, 8], [9, 10, 11, 12]]
    arms = parse_quality_arms(["rsd-likelihood-0", "rsd-likelihood-2"], 2.0, 4)
    file = RowsFile.start(tmp_path / "rows", {}, {}, resume=False)
    questions = [Question(i, "", Decimal(i)) for i in range(2)]
    evaluation = Evaluation(
        model, draft, letter_tokenizer(), questions, prompts, arms, file, batch_size=2, max_new_tokens=9,
        judge=lambda question, text: Judgement(text, question.index == 1),
    )  # fmt: skip
    rows = {(batch.arm, row.question): row for batch in evaluation.run() for row in batch.rows}
    for (arm, question), row in rows.items():
        keeps = arm.endswith("-0")
        expected = greedy(draft if keeps else model, prompts[question], 9)
        assert row.tokens == expected
        assert row.counts == {"rsd_steps": 1, "rsd_kept": int(keeps)}
        assert row.correct == (question == 1)
    sampled = Evaluation(model, draft, letter_tokenizer(), questions, prompts, arms, file, temperature=0.5, seeds=(3,))
    with pytest.raises(InvalidConfigError, match="decodes greedily"):
        sampled.run()
