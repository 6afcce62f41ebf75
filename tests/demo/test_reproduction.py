"""RCSD's table on the demo target, at its smallest: it runs, it resumes, and the report has what is read from it."""

import json
from dataclasses import replace

import pytest

from hf_specdec import InvalidConfigError
from hf_specdec.demo.pair import load_pair
from hf_specdec.quality.drafters.reproduction import Plan, reproduce


PLAN = Plan(
    texts=3,
    prompt_tokens=8,
    new_tokens=6,
    hass_steps=2,
    stage_steps=2,
    batch_size=2,
    held_out=2,
    measured_tokens=6,
    steps=(1, 2),
    seeds=(0,),
    evaluate_every=2,
)
ARMS = ["hass", "rcsd-dpo", "rcsd-grpo", "control"]


def test_everything_is_trained_measured_and_reported_and_then_not_again(tmp_path, corpus_file):
    pair, report, library = load_pair(), tmp_path / "rcsd", tmp_path / "library"
    library.mkdir()
    seen = []
    found = reproduce(
        pair, corpus_file, tmp_path / "out", report, PLAN, library=library, progress=lambda *each: seen.append(each)
    )
    parts = ["texts", "hass", "rcsd-dpo-0", "rcsd-grpo-0", "control-0", "measuring"]
    assert list(dict.fromkeys(part for part, *_ in seen)) == parts
    assert {part: counts for part, *counts in seen} == dict(zip(parts, ([3, 3], *[[2, 2]] * 4, [8, 8]), strict=True))
    content = json.loads(report.with_suffix(".json").read_text())
    assert list(content["summary"]["demo"]["pydocs"]) == ARMS
    assert content["seeds"] == [0]
    assert [row["step"] for row in content["hass_history"]] == [2]
    assert found["same_text"]
    assert all(rows["2"]["tau"] >= 1 for rows in found["arms"].values())
    logs = sorted((tmp_path / "out").glob("*/log.jsonl"))
    assert [log.parent.name for log in logs] == ["control-0", "hass", "rcsd-dpo-0", "rcsd-grpo-0"]
    sizes = [len(log.read_text().splitlines()) for log in logs]
    texts = (tmp_path / "out" / "texts.jsonl").read_text()
    with (tmp_path / "out" / "texts.jsonl").open("a") as lines:
        lines.write("[1, 2")  # as a killed run may leave it
    assert reproduce(pair, corpus_file, tmp_path / "out", report, PLAN, library=library) == found
    assert sizes == [len(log.read_text().splitlines()) for log in logs] == [2, 2, 2, 2]
    assert (tmp_path / "out" / "texts.jsonl").read_text() == texts
    with pytest.raises(InvalidConfigError, match="stage_steps 2, now 3"):
        reproduce(
            pair, corpus_file, tmp_path / "out", report, replace(PLAN, stage_steps=3, steps=(1,)), library=library
        )


def test_hass_may_be_trained_on_what_the_target_did_not_write(tmp_path, corpus_file):
    library, plan = tmp_path / "library", replace(PLAN, hass_on="corpus", stage_steps=2, steps=(1,))
    library.mkdir()
    pair = load_pair()
    for each in (PLAN, plan):
        reproduce(
            pair, corpus_file, tmp_path / each.hass_on, tmp_path / f"{each.hass_on}-report", each, library=library
        )
    texts, weights = (
        [(tmp_path / place / name).read_bytes() for place in ("target", "corpus")]
        for name in ("texts.jsonl", "hass/model.safetensors")
    )
    assert texts[0] == texts[1]
    assert weights[0] != weights[1]
    with pytest.raises(InvalidConfigError, match="hass_on"):
        Plan(hass_on="elsewhere")
