"""`specdec train cospec` and `specdec calibrate cospec`: the folder they write is a config that `generate` takes."""

import json

import pytest

from hf_specdec import CoSpecConfig
from hf_specdec.acceptance import FEATURES, PolicyNetwork


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"w{i} w{2 * i + 1} w{3 * i + 2}", "answer": f"so\n#### {i}"} for i in range(1, 7)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def options_of(pair, data):
    small = ["--max-new-tokens", 10, "--length", 3, "--held-out", 0.4, "--flips", 3, "--warm-steps", 5]
    return [*pair.options, "--data", data / "questions.jsonl", "--examples", 0, "--no-chat", "--batch-size", 4, *small]


def test_both_write_a_policy_with_figures_and_card(run, run_json, pair, data):
    fitted = run_json("calibrate", "cospec", *options_of(pair, data), "--save", data / "fitted")
    more = ["--steps", 2, "--groups", 1, "--group-size", 2]
    trained = run_json("train", "cospec", *options_of(pair, data), *more, "--out", data / "trained")
    assert fitted["steps"] == []
    assert [each["step"] for each in trained["steps"]] == [1, 2]
    assert trained["num_labels"] == fitted["num_labels"] > 0
    assert trained["held_out_warm_agreement"] == fitted["held_out_warm_agreement"] == fitted["held_out_agreement"]
    again = run_json("train", "cospec", *options_of(pair, data), *more, "--out", data / "trained", "--resume")
    assert again == trained
    other = [*options_of(pair, data), "--flips", 2, "--out", data / "trained", "--resume"]
    assert "labels of other models, questions or options" in run("train", "cospec", *other, code=2).stderr
    for name in ("fitted", "trained"):
        policy = PolicyNetwork.load(data / name)
        assert policy.fingerprint == fitted["fingerprint"]
        config = CoSpecConfig.from_pretrained(data / name)
        assert config.length == 3
        assert f"{fitted['num_labels']} labelled mismatches" in (data / name / "README.md").read_text()
        assert policy.mean.shape == (len(FEATURES),)
        run("generate", *pair.options, "--config", data / name, "--prompt", "w1 w2", "--no-chat", "--max-new-tokens", 6)


def test_questions_on_one_side_only_are_refused(run, pair, data):
    options = [*options_of(pair, data), "--out", data / "x"]
    options[options.index("--held-out") + 1] = 0.0
    assert "0 are held out" in run("train", "cospec", *options, code=2).stderr
