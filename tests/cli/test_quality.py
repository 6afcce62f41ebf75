"""`specdec quality`: its outputs, resuming after a kill, and reports of what there is."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hf_specdec.acceptance import POLICY_NAME, CorrectionMemory, PolicyNetwork


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": f"w{i} w{2 * i + 1} w{3 * i + 2} " + "w7 " * (i % 3), "answer": f"so w{i}\n#### {i}"}
        for i in range(1, 7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options_for(pair, data, out, *more):
    options = [
        "--data",
        data,
        "--examples",
        "0",
        "--max-new-tokens",
        "12",
        "--batch-size",
        "2",
        "--out",
        out,
        "--threshold",
        "0.5",
    ]
    return ["quality", *pair.options, *options, *more]


def rows_of(path):
    """The finished batches without their times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    batches = [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines[1:]]
    return sorted(batches, key=lambda batch: (batch["arm"], batch["seed"], batch["number"]))


def test_the_outputs_agree_and_exact_texts_are_plain(pair, data, tmp_path, run_json):
    printed = run_json(*options_for(pair, data, tmp_path / "r" / "q", "--seeds", "0,1", "--note", "target=a toy"))
    saved = json.loads((tmp_path / "r" / "q.json").read_text())
    assert saved["summary"] == printed["summary"]
    assert list(saved["summary"]) == ["plain", "exact", "easd", "easd-plain", "random"]
    assert saved["environment"]["target"] == "a toy"
    for name in ("exact", "easd-plain"):  # at temperature 0 resampling without the mask is exact
        assert saved["summary"][name]["text_equal"]["plain"] == 1.0
        assert saved["summary"][name]["difference"]["plain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    easd, control = saved["summary"]["easd"], saved["summary"]["random"]
    assert easd["events"]["easd_changed_token"] > 0
    assert easd["text_equal"]["plain"] < 1.0
    kept = sum(
        row["counts"]["num_accepted_tokens"]
        for b in rows_of(tmp_path / "r" / "q.rows.jsonl")
        if b["arm"] == "easd"
        for row in b["rows"]
    )
    changed = easd["events"]["easd_changed_token"]
    assert control["control_rate"] == pytest.approx(changed / (kept + changed))
    assert control["seeds"] == [0, 1]
    assert easd["seeds"] == [0]
    assert len(saved["answers"]) == 6 * (4 + 2)
    table = (tmp_path / "r" / "q.md").read_text()
    assert "| easd-plain |" in table
    assert "- target: a toy" in table
    assert str(tmp_path) not in table + json.dumps(saved)
    assert (tmp_path / "r" / "q.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "more",
    [pytest.param([], id="greedy", marks=pytest.mark.slow), pytest.param(["--temperature", "0.7"], id="sampled")],
)
def test_a_killed_run_resumes_to_the_same_rows(pair, data, tmp_path, run_json, more):
    arms = ["--arms", "plain,easd,random", "--seeds", "3,4", *more]
    whole = run_json(*options_for(pair, data, tmp_path / "whole", *arms))
    out, rows = tmp_path / "killed", tmp_path / "killed.rows.jsonl"
    command = [sys.executable, "-m", "hf_specdec.cli", *map(str, options_for(pair, data, out, *arms))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not rows.exists() or rows.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = rows.read_text().splitlines(keepends=True)
    assert len(lines) >= 3
    rows.write_text("".join(lines[:3]) + lines[2][: len(lines[2]) // 2])  # two batches, and a line that was cut off
    resumed = run_json(*options_for(pair, data, out, "--resume", *arms))
    assert rows_of(rows) == rows_of(tmp_path / "whole.rows.jsonl")
    for name, figures in whole["summary"].items():
        assert {k: v for k, v in resumed["summary"][name].items() if "per_second" not in k} == {
            k: v for k, v in figures.items() if "per_second" not in k
        }


def test_arms_and_seeds_may_be_added(pair, data, tmp_path, run_json, run):
    run(*options_for(pair, data, tmp_path / "q", "--arms", "plain,easd,random"))
    before = rows_of(tmp_path / "q.rows.jsonl")
    more = run_json(
        *options_for(pair, data, tmp_path / "q", "--arms", "plain,exact,easd,random", "--seeds", "0,1", "--resume")
    )
    after = rows_of(tmp_path / "q.rows.jsonl")
    assert all(batch in after for batch in before)
    assert len(after) == len(before) + 3 + 3
    assert more["summary"]["random"]["seeds"] == [0, 1]


def test_an_interrupted_run_can_be_reported(pair, data, tmp_path, run_json, run):
    options = options_for(pair, data, tmp_path / "q", "--arms", "plain,exact")
    assert "without --report-only first" in run(*options, "--report-only", code=2).stderr
    run(*options)
    rows = tmp_path / "q.rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:4]) + lines[4][:20])
    kept = rows.read_text()
    report = run_json(*options, "--report-only")
    assert rows.read_text() == kept
    assert report["summary"]["exact"]["num_questions"] == 2
    rows.write_text("".join(lines[:2]))
    assert run_json(*options, "--report-only")["summary"].keys() == {json.loads(lines[1])["arm"]}
    rows.write_text(lines[0])
    assert "no question has been answered" in run(*options, "--report-only", code=2).stderr


def test_rows_of_other_settings_are_refused(pair, data, tmp_path, run):
    run(*options_for(pair, data, tmp_path / "q", "--arms", "plain", "--limit", "2"))
    kept = (tmp_path / "q.rows.jsonl").read_text()
    for more, message in [
        (["--limit", "2"], "--resume"),
        (["--limit", "3", "--resume"], "questions: 2, now 3"),
        (["--limit", "2", "--resume", "--max-new-tokens", "13"], "max_new_tokens: 12, now 13"),
        (["--limit", "2", "--resume", "--threshold", "1"], "threshold: 0.5, now 1.0"),
        (["--limit", "2", "--report-only", "--batch-size", "1"], "batch_size: 2, now 1"),
    ]:
        stderr = run(*options_for(pair, data, tmp_path / "q", "--arms", "plain", *more), code=2).stderr
        assert message in " ".join(stderr.split())
    assert (tmp_path / "q.rows.jsonl").read_text() == kept


def test_rows_of_another_memory_policy_or_sandbox_are_refused(pair, data, tmp_path, run):
    for name, path, save in [
        (
            "memory",
            tmp_path / "memory.safetensors",
            lambda size: CorrectionMemory(size).save(tmp_path / "memory.safetensors"),
        ),
        ("policy", tmp_path, lambda size: PolicyNetwork(size).save(tmp_path / POLICY_NAME)),
    ]:
        save(4)
        asked = options_for(pair, data, tmp_path / name, "--arms", "plain", "--limit", "2", f"--{name}", path)
        run(*asked)
        run(*asked, "--resume")
        save(5)
        assert f"settings ({name}: " in " ".join(run(*asked, "--resume", code=2).stderr.split())
    problem = {"prompt": "w1 w2", "test": "def check(candidate):\n    pass", "entry_point": "print"}
    path = tmp_path / "humaneval.jsonl"
    path.write_text(json.dumps(problem) + "\n")
    asked = options_for(pair, path, tmp_path / "h", "--arms", "plain", "--task", "humaneval", "--test-seconds", 20)
    run(*asked)
    stderr = run(*asked, "--resume", "--test-megabytes", 512, code=2).stderr
    assert "test_megabytes: 1024, now 512" in " ".join(stderr.split())
    assert "packed: None, now False" in " ".join(run(*asked, "--resume", "--no-packed", code=2).stderr.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "plain,nonsense"], "unknown arm 'nonsense'"),
        (["--arms", "plain,plain"], "each arm once"),
        (["--arms", "plain,stock-assistant-3"], "one prompt at a time"),
        (["--arms", "plain,random"], "add easd"),
        (["--arms", "random-1.5"], "rate must lie in"),
        (["--seeds", "0,0"], "different numbers"),
        (["--seeds", "a"], "--seeds takes"),
        (["--note", "target"], "KEY=VALUE"),
    ],
)
def test_wrong_options_are_explained(pair, data, tmp_path, run, more, message):
    stderr = run(*options_for(pair, data, tmp_path / "q", *more), code=2).stderr
    assert message in " ".join(stderr.split())
    rows = tmp_path / "q.rows.jsonl"
    assert not rows.exists() or rows.read_text().count("\n") == 1


def test_an_arm_that_drafts_needs_a_draft_model(pair, data, tmp_path, run):
    command = ["quality", "--target", pair.target, "--data", data, "--out", tmp_path / "q", "--arms", "plain,exact"]
    assert "need a draft model" in run(*command, code=2).stderr


def test_worked_examples_by_default_and_an_instruction_on_request(pair, data, tmp_path, run_json):
    command = ["quality", *pair.options, "--data", data, "--arms", "plain", "--max-new-tokens", "4"]
    shown = run_json(*command, "--out", tmp_path / "a")["environment"]
    assert shown["example 1"].endswith("#### 38")
    assert "instruction" not in shown
    asked = run_json(*command, "--out", tmp_path / "b", "--examples", 0)["environment"]
    assert "####" in asked["instruction"]
    assert "example 1" not in asked


def test_every_rule_is_an_arm_with_its_distance(pair, data, tmp_path, run_json):
    arms = "exact,nucleus-0.99,csd,topk-5,lenience-0.5"
    command = options_for(pair, data, tmp_path / "q", "--arms", arms, "--tv", "--limit", "2")
    summary = run_json(*command)["summary"]
    nucleus = summary["nucleus-0.99"]
    events, verified = nucleus["events"], nucleus["num_verified_tokens"]
    assert events["rescued"] == events["relaxed_accepted"] > 0
    assert nucleus["mean_step_tv"] == pytest.approx(events["rescued"] / verified)  # greedy: 1 for each rescued token
    assert nucleus["max_step_tv"] == 1.0
    assert "mean_step_tv" not in summary["exact"]
    assert summary["lenience-0.5"]["mean_step_tv"] == 0.0  # exact under greedy decoding
    table = (tmp_path / "q.md").read_text()
    assert "| mean step TV | max step TV |" in table
    assert "Pareto front of accuracy and tokens/s: `" in table


def test_humaneval_runs_the_tests_of_each_answer(pair, tmp_path, run_json, run):
    rows = [
        {"prompt": "w1 w2", "test": "def check(candidate):\n    pass", "entry_point": "print"},
        {"prompt": "w3 w4", "test": "def check(candidate):\n    assert False", "entry_point": "print"},
    ]
    path = tmp_path / "humaneval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["quality", *pair.options, "--task", "humaneval", "--data", path, "--out", tmp_path / "h", "--no-chat"]
    command += ["--max-new-tokens", 4, "--arms", "plain,exact", "--test-seconds", 20]
    found = run_json(*command)
    assert found["settings"]["task"] == "humaneval"
    assert "one code block" in found["environment"]["instruction"]
    answers = json.loads((tmp_path / "h.json").read_text())["answers"]
    assert {each["answer"] for each in answers} <= {"passed", "failed"}
    assert not any(each["correct"] for each in answers)  # words are no program
