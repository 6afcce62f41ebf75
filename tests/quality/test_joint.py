"""Several measurements in one table and one plot."""

import copy
import json

import pytest

from hf_specdec import InvalidConfigError
from hf_specdec.quality.joint import join, main, markdown


def figures(speed, accuracy, difference=None):
    share = {"mean": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
    return {
        "num_questions": 20,
        "tokens_per_second": speed,
        "tokens_per_round": 4.0,
        "mean_step_tv": 0.0125,
        "max_step_tv": 0.75,
        "accuracy": share,
        "difference": {} if difference is None else {"exact": {"mean": difference, "low": -0.05, "high": 0.05}},
    }


def report(task=None, **settings):
    return {
        "summary": {"exact": figures(10.0, 0.6), "topk": figures(12.0, 0.5, -0.1), "bild": figures(9.0, 0.4, -0.2)},
        "settings": {"target": "large", "assistant": "small", **({"task": task} if task else {}), **settings},
        "environment": {"threads": 2},
        "answers": [{"arm": "exact", "correct": True}],
    }


def test_one_row_for_each_arm_and_the_front_of_each_task(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, task in zip(paths, (None, "humaneval"), strict=True):
        path.write_text(json.dumps(report(task)))
    main([*map(str, paths), "--out", str(tmp_path / "rules")])
    joint = json.loads((tmp_path / "rules.json").read_text())
    assert list(joint["summary"]) == ["gsm8k", "humaneval"]
    assert joint["summary"]["humaneval"]["topk"]["tokens_per_second"] == 12.0
    text = (tmp_path / "rules.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| topk"))
    assert row.count("50.0 [40.0, 60.0]") == row.count("-10.0 [-5.0, +5.0]") == row.count("0.0125") == 2
    assert "- humaneval: `topk`, `exact`" in text or "- humaneval: `exact`, `topk`" in text
    assert (tmp_path / "rules.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_one_task_lacks_leaves_its_cells_empty():
    other = report("humaneval")
    del other["summary"]["bild"]
    row = next(line for line in markdown(join([report(), other])).splitlines() if line.startswith("| bild"))
    assert row.endswith("|  |  |  |  |  |  |")


def test_reports_that_do_not_belong_together_are_refused():
    with pytest.raises(InvalidConfigError, match="one target"):
        join([report(), report("humaneval", target="larger")])
    with pytest.raises(InvalidConfigError, match="same arms"):
        join([report(), copy.deepcopy(report())])
    with pytest.raises(InvalidConfigError, match="differ in batch_size, dtype"):
        join([report(dtype="float32"), report(dtype="bfloat16", batch_size=4)])


def test_a_further_report_adds_what_was_learnt_before():
    more = report(memory="digest", policy="other", tv=True)
    more["summary"] = {"exact": figures(1.0, 0.1), "csd": figures(13.0, 0.55), "cospec": figures(14.0, 0.5)}
    more["answers"] = [{"arm": name, "correct": True} for name in more["summary"]]
    first = report()
    first["summary"]["csd"] = figures(11.0, 0.6)
    joint = join([first, more])
    summary = joint["summary"]["gsm8k"]
    assert list(summary) == ["exact", "topk", "bild", "csd", "csd-calibrated", "cospec"]
    assert summary["exact"]["tokens_per_second"] == 10.0
    assert (summary["csd"]["tokens_per_second"], summary["csd-calibrated"]["tokens_per_second"]) == (11.0, 13.0)
    assert [each["arm"] for each in joint["answers"]["gsm8k"]] == ["exact", "csd-calibrated", "cospec"]
    assert joint["settings"]["gsm8k"] == first["settings"] | {"memory": "digest", "policy": "other", "tv": True}


def test_a_procedure_is_not_compared_in_speed_and_notes_stand_below():
    given = report()
    given["summary"]["rsd-checks"] = figures(99.0, 0.99)
    text = markdown(join([given]), ["Measured in bfloat16."])
    assert "- gsm8k: `topk`, `exact`" in text
    assert "`rsd` answers one question at a time" in text
    assert "- Measured in bfloat16." in text
    assert "one question at a time" not in markdown(join([report()]))
