"""`specdec verify`: exit codes, table and JSON."""

import json

import pytest

import hf_specdec.loop
from tests.test_losslessness import accepts_one_too_many


PROMPTS = ["--prompt", "w1 w2", "--prompt", "w3 w4 w5"]
OPTIONS = ["--no-chat", "--max-new-tokens", 16, "--drafting", "model", "--length", 4]


def test_a_sound_pair_passes(run, run_json, pair):
    result = run("verify", *pair.options, *OPTIONS, *PROMPTS)
    assert "2 of 2 texts are equal" in result.stdout
    assert result.stdout.splitlines()[-1] == "passed"
    report = run_json("verify", *pair.options, *OPTIONS, *PROMPTS, "--batch-size", 2)
    assert (report["passed"], report["num_equal"], report["num_prompts"]) == (True, 2, 2)
    assert report["num_accepted_tokens"] > 0
    assert report["config"]["drafting"] == "model"


def test_a_fault_is_shown_and_makes_it_fail(run, run_json, pair, monkeypatch):
    monkeypatch.setattr(hf_specdec.loop, "verify", accepts_one_too_many(hf_specdec.loop.verify))
    result = run("verify", *pair.options, *OPTIONS, *PROMPTS, code=1)
    assert "fault" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAILED: ")
    report = run_json("verify", *pair.options, *OPTIONS, *PROMPTS, code=1)
    assert report["num_faults"] > 0
    assert any(each["kind"] == "fault" and each["gap"] > 0 for each in report["comparisons"])


def test_a_tolerance_can_be_given(run, pair, monkeypatch):
    monkeypatch.setattr(hf_specdec.loop, "verify", accepts_one_too_many(hf_specdec.loop.verify))
    assert "rounding" in run("verify", *pair.options, *OPTIONS, *PROMPTS, "--tolerance", 1000).stdout


def test_a_relaxed_config_gets_no_verdict(run, pair, tmp_path):
    config = hf_specdec.EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0)
    config.save_pretrained(tmp_path)
    result = run("verify", *pair.options, *OPTIONS, *PROMPTS, "--config", tmp_path)
    assert "relaxed" in result.stdout
    assert "no verdict" in result.stdout.splitlines()[-1]


def test_without_prompts_a_few_are_built_in(run_json, pair):
    options = ["--max-new-tokens", 2, "--limit", 2]
    assert run_json("verify", *pair.options, *options)["num_prompts"] == 2


def test_prompts_from_a_file(run_json, pair, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"w{i}"}) + "\n" for i in range(3)))
    options = ["--prompts", tmp_path / "prompts.jsonl", "--field", "text", "--max-new-tokens", 2]
    assert run_json("verify", *pair.options, *options)["num_prompts"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "nonsense/at all"], "cannot read the config nonsense/at all"),
        (["--config", "esad"], "presets: cospec, csd, easd, exact"),
        (["--config", "easd", "--drafting", "ngram"], "n-gram draft"),
    ],
)
def test_mistakes_are_told_in_one_line(run, pair, options, message):
    result = run("verify", *pair.options, *PROMPTS, *options, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
