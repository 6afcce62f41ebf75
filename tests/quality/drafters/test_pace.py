"""Timing in turn: what is finished is kept, and every text is compared with plain decoding's."""

import json

import pytest
import torch

from hf_specdec.networks.export import export_drafter
from hf_specdec.quality.drafters import pace
from hf_specdec.quality.drafters.pace import measure_pace
from tests.networks import drafter_for, small_target


PROMPTS = [[3, 8, 5], [9, 4, 7]]
OPTIONS = {"baseline": "one", "steps": 2, "max_new_tokens": 8, "repeats": 2}


@pytest.fixture
def folders(tmp_path):
    target = small_target()
    return {
        name: export_drafter(drafter_for(target, "eagle", seed=seed), tmp_path / name)
        for seed, name in enumerate(("one", "two"))
    }


def test_every_way_is_timed_in_turn_and_not_again(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(pace.time, "perf_counter", iter(range(1000)).__next__)  # each call of generate takes a second
    seen = []
    found = measure_pace(
        small_target(), folders, PROMPTS, tmp_path / "pace", progress=lambda *done: seen.append(done), **OPTIONS
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    (file,) = (tmp_path / "pace").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    forward = ["plain", "one", "two"]
    assert [row["arm"] for row in rows] == [*forward, *reversed(forward), *reversed(forward), *forward]
    assert [row["prompt"] for row in rows] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    plain = [
        small_target().generate(torch.tensor([each]), do_sample=False, max_new_tokens=8)[0, 3:].tolist()
        for each in PROMPTS
    ]
    assert all(row["answer"] == plain[row["prompt"]] for row in rows)
    assert list(found["arms"]) == forward
    assert all(row["tokens_per_second"] > 0 and row["same_text"] for row in found["arms"].values())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:7]) + '{"prompt": 1,')  # as a killed run leaves it
    seen.clear()
    again = measure_pace(
        small_target(), folders, PROMPTS, tmp_path / "pace", progress=lambda *done: seen.append(done), **OPTIONS
    )
    assert seen == [(3, 4), (4, 4)]
    assert [json.loads(line) for line in file.read_text().splitlines()][:6] == rows[:6]
    assert list(again["arms"]) == forward
    measure_pace(small_target(), {"one": folders["one"]}, PROMPTS, tmp_path / "pace", **OPTIONS)
    assert len(list((tmp_path / "pace").glob("*.jsonl"))) == 2


def test_figures_are_medians_over_prompts():
    seconds = {"plain": [8, 8, 8], "base": [4, 2, 8], "fast": [2, 2, 1]}
    rows = [
        {"prompt": number, "arm": name, "seconds": each, "answer": [1, 2, 3, 4]}
        for name, every in seconds.items()
        for number, each in enumerate(every)
    ]
    rows += [{**row, "seconds": 3 * row["seconds"]} for row in rows] + rows  # medians over repeats
    found = pace._figures(rows, "fast", "base")
    assert (found["tokens_per_second"], found["speedup"], found["speedup_over_baseline"]) == (2, 4, 2)
    assert found["interval_over_baseline"]["mean"] == pytest.approx(11 / 3)
    rows[-1] = {**rows[-1], "answer": [1, 2, 3, 5]}
    assert found["same_text"]
    assert not pace._figures(rows, "fast", "base")["same_text"]
