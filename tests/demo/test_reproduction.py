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


@pytest.fixture
def docs(tmp_path):
    file = tmp_path / "docs.jsonl"
    text = "The list is a sequence of objects, and a tuple is one that does not change. " * 4
    file.write_text(
        "".join(json.dumps({"id": f"page{number}", "text": text + str(number)}) + "\n" for number in range(90))
    )
    return file


def test_everything_is_trained_measured_and_reported_and_then_not_again(tmp_path, docs):
    pair, report, library = load_pair(), tmp_path / "rcsd", tmp_path / "library"
    library.mkdir()
    seen = []
    found = reproduce(
        pair, docs, tmp_path / "out", report, PLAN, library=library, progress=lambda *each: seen.append(each)
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
    assert reproduce(pair, docs, tmp_path / "out", report, PLAN, library=library) == found
    assert sizes == [len(log.read_text().splitlines()) for log in logs] == [2, 2, 2, 2]
    assert (tmp_path / "out" / "texts.jsonl").read_text() == texts
    with pytest.raises(InvalidConfigError, match="stage_steps 2, now 3"):
        reproduce(pair, docs, tmp_path / "out", report, replace(PLAN, stage_steps=3, steps=(1,)), library=library)
