"""One report holds several targets and data sets, and what was written by hand."""

import json

import pytest

from hf_specdec.quality.drafters import Arm, compare, write_report
from hf_specdec.training.acceptance import Measured


def found_of(tau, text=(1, 2)):
    arms = [
        Arm(name, [{3: [Measured(each, text), Measured(each + 1, text)]}])
        for name, each in (("hass", 1.0), ("control", tau))
    ]
    return compare(arms, baseline="hass", control="control", plain=[(1, 2), (1, 2)])


def write(path, tau, model, dataset, seeds=(0,), **more):
    write_report(path, {**found_of(tau), **more}, model=model, dataset=dataset, about={"seeds": list(seeds)})
    return json.loads(path.with_suffix(".json").read_text())


def test_targets_and_data_sets_stand_side_by_side(tmp_path):
    path = tmp_path / "rcsd"
    write(path, 2.0, "demo", "pydocs")
    write(path, 3.0, "qwen0.5", "humaneval", seeds=(0, 3))
    content = write(path, 4.0, "qwen0.5", "mt-bench")
    assert content["summary"] == {
        "demo": {"pydocs": {"hass": {"3": 1.5}, "control": {"3": 2.5}}},
        "qwen0.5": {
            "humaneval": {"hass": {"3": 1.5}, "control": {"3": 3.5}},
            "mt-bench": {"hass": {"3": 1.5}, "control": {"3": 4.5}},
        },
    }
    assert (content["seeds"], content["same_text"]) == ([0, 3], True)
    assert content["found"]["qwen0.5"]["humaneval"]["seeds"] == [0, 3]
    content = write(path, 5.0, "demo", "pydocs")  # measured again
    assert content["summary"]["demo"]["pydocs"]["control"] == {"3": 5.5}
    assert content["summary"]["qwen0.5"]["mt-bench"]["control"] == {"3": 4.5}
    page = path.with_suffix(".md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## demo, pydocs",
        "## qwen0.5, humaneval",
        "## qwen0.5, mt-bench",
    ]


def test_findings_stay_as_they_were_written(tmp_path):
    path = tmp_path / "rcsd"
    write(path, 2.0, "demo", "pydocs")
    page = path.with_suffix(".md")
    page.write_text(page.read_text() + "\n## Findings\n\nNone yet.\n")
    write(path, 3.0, "demo", "pydocs")
    assert page.read_text().endswith("\n\n## Findings\n\nNone yet.\n")
    assert "3.500" in page.read_text()


def test_a_report_of_the_first_layout_is_gone_on_with(tmp_path):
    path, old = tmp_path / "rcsd", found_of(2.0)
    summary = {"demo": {"pydocs": {"hass": {"3": 1.5}, "control": {"3": 2.5}}}}
    path.with_suffix(".json").write_text(json.dumps({"summary": summary, "seeds": [1], **old}))
    content = write(path, 3.0, "qwen0.5", "humaneval")
    assert content["summary"]["demo"] == summary["demo"]
    assert content["found"]["demo"]["pydocs"] == {"seeds": [1], **old}
    assert content["seeds"] == [0, 1]


def test_what_was_measured_besides_is_told(tmp_path):
    interval = {"mean": 1.2, "low": 1.1, "high": 1.3}
    row = {"tokens_per_second": 10.0, "speedup": 2.0, "speedup_over_baseline": 1.25, "interval_over_baseline": interval}
    pace = {"arms": {"hass": {**row, "same_text": False}}, "steps": 4, "repeats": 2, "num_prompts": 3, "threads": 1}
    entropy = {"edges": [0.1, 0.5, 1.0], "arms": {"hass": {"acceptance": [0.5, None], "drafts": [4, 0]}}}
    points = [{"arm": "hass", "run": "hass", "step": 5, "kl": 0.2, "acceptance": 0.5, "tau": 1.5}]
    path = tmp_path / "rcsd"
    write(path, 2.0, "demo", "pydocs")
    narrow = path.with_suffix(".png").read_bytes()
    write(path, 2.0, "qwen0.5", "humaneval", pace=pace, entropy=entropy, checkpoints=points)
    assert "| hass | 10.0 | 2.000x | 1.250x [1.100, 1.300] | NO |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").read_bytes()[16:24] > narrow[16:24]  # its width and height


def test_texts_that_part_are_told(tmp_path):
    arms = [Arm(name, [{3: [Measured(2.0, (1, text))]}]) for name, text in (("hass", 2), ("grpo", 3))]
    found = compare(arms, baseline="hass")
    assert (found["text_equal"], found["same_text"]) == ({"hass": 1.0, "grpo": 0.0}, False)
    assert compare(arms, baseline="hass", plain=[(1, 3)])["text_equal"] == {"hass": 0.0, "grpo": 1.0}
    write_report(tmp_path / "rcsd", found, model="demo", dataset="pydocs", about={"seeds": [0]})
    page = (tmp_path / "rcsd.md").read_text()
    assert "NOT the same in every arm. Answers that are the plain ones: hass 100.0%, grpo 0.0%." in page


@pytest.mark.parametrize("name", ["v1.5", "rcsd"])
def test_names_may_hold_dots(tmp_path, name):
    write_report(tmp_path / name, found_of(2.0), model="demo", dataset="pydocs", about={"seeds": [0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.{ending}" for ending in ("json", "md", "png")]
