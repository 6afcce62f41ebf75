"""RCSD's table on the demo target, at its smallest: it runs, it resumes, and the report has what is read from it."""

import json
from dataclasses import replace

import pytest

from hf_specdec import InvalidConfigError
from hf_specdec.demo.pair import load_pair
from hf_specdec.quality.drafters import reproduction
from hf_specdec.quality.drafters.reproduction import Plan, reproduce, train_arms
from hf_specdec.quality.drafters.variants import VARIANTS, Variant


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
    timed_prompts=1,
    timed_steps=2,
    timed_repeats=1,
)
CORE = {name: VARIANTS[name] for name in ("rcsd-dpo", "rcsd-grpo", "control")}


def test_everything_is_trained_measured_and_reported_and_then_not_again(tmp_path, corpus_file, monkeypatch):
    pair, report, library = load_pair(), tmp_path / "rcsd", tmp_path / "library"
    library.mkdir()
    seen = []
    found = reproduce(
        pair, corpus_file, tmp_path / "out", report, PLAN, library=library, progress=lambda *each: seen.append(each)
    )
    arms = ["hass", *VARIANTS]
    trained = ["hass", *(f"{name}-0" for name in VARIANTS)]
    parts = ["held-out texts", "texts", *trained, "measuring", "timing"]
    assert list(dict.fromkeys(part for part, *_ in seen)) == parts
    counts = [[2, 2], [3, 3], *[[2, 2]] * len(trained), [2 * len(arms)] * 2, [1, 1]]
    assert {part: count for part, *count in seen} == dict(zip(parts, counts, strict=True))
    content = json.loads(report.with_suffix(".json").read_text())
    assert list(content["summary"]["demo"]["pydocs"]) == arms
    assert content["seeds"] == [0]
    told = content["found"]["demo"]["pydocs"]
    assert [row["step"] for row in told["hass_history"]] == [2]
    assert told["variants"]["rcsd-dpo-literal"]["changes"] == {"pairs": "literal", "masked": True}
    evaluated = dict.fromkeys((each["arm"], each["run"]) for each in told["checkpoints"])  # DPO's both stages are
    assert list(evaluated) == list(zip(arms, trained, strict=True))
    assert all({"kl", "acceptance", "tau"} <= each.keys() for each in told["checkpoints"])
    assert list(told["entropy"]["arms"]) == arms
    assert list(told["pace"]["arms"]) == ["plain", "hass", *CORE]
    assert found["same_text"]
    assert found["text_equal"] == dict.fromkeys(arms, 1.0)
    assert all(rows["2"]["tau"] >= 1 for rows in found["arms"].values())
    logs = sorted((tmp_path / "out").glob("*/log.jsonl"))
    assert [log.parent.name for log in logs] == sorted(trained)
    sizes = [len(log.read_text().splitlines()) for log in logs]
    texts = (tmp_path / "out" / "texts.jsonl").read_text()
    with (tmp_path / "out" / "texts.jsonl").open("a") as lines:
        lines.write("[1, 2")  # as a killed run may leave it
    monkeypatch.setattr("hf_specdec.quality.drafters.kept.measure", None)  # nothing is measured again
    assert reproduce(pair, corpus_file, tmp_path / "out", report, PLAN, library=library) == found
    assert sizes == [len(log.read_text().splitlines()) for log in logs] == [2] * len(trained)
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
            pair,
            corpus_file,
            tmp_path / each.hass_on,
            tmp_path / f"{each.hass_on}-report",
            each,
            variants={"control": VARIANTS["control"]},
            library=library,
        )
    texts, weights = (
        [(tmp_path / place / name).read_bytes() for place in ("target", "corpus")]
        for name in ("texts.jsonl", "hass/model.safetensors")
    )
    assert texts[0] == texts[1]
    assert weights[0] != weights[1]
    with pytest.raises(InvalidConfigError, match="hass_on"):
        Plan(hass_on="elsewhere")


def test_processes_may_share_the_arms_and_an_arm_stays_what_it_is(tmp_path, corpus_file):
    library, out, pair = tmp_path / "library", tmp_path / "out", load_pair()
    library.mkdir()
    options = {"docs": corpus_file, "out": out, "plan": PLAN, "library": library}
    further = {"larger": Variant(recipe="rcsd-grpo", changes={"group_size": 4}, rate=1e-2)}
    for variants in ({"control": VARIANTS["control"]}, further):
        train_arms(pair, variants=variants, **options)
    assert not (out / "measured").exists()
    written = (out / "control-0" / "log.jsonl").read_text()
    both = {"control": VARIANTS["control"], **further}
    found = reproduce(pair, report=tmp_path / "rcsd", variants=both, **options)
    assert list(found["arms"]) == ["hass", "control", "larger"]
    assert (out / "control-0" / "log.jsonl").read_text() == written
    with pytest.raises(InvalidConfigError, match=r"larger-0 was trained with changes \{'group_size': 4\}"):
        train_arms(pair, variants={"larger": Variant(recipe="rcsd-grpo", rate=1e-2)}, **options)


def test_arms_are_chosen_by_name():
    assert list(reproduction._chosen(None, ())) == list(VARIANTS)
    chosen = reproduction._chosen(["control", "wide"], ["wide=rcsd-grpo,group_size=16", "other=ce"])
    assert list(chosen) == ["control", "wide"]
    with pytest.raises(InvalidConfigError, match="got nothing"):
        reproduction._chosen(["nothing"], ())
