"""The table of continual learning on the demo target, at its smallest."""

import json

from hf_specdec.demo.pair import load_pair
from hf_specdec.quality.drafters.bundle import BUNDLED
from hf_specdec.quality.drafters.continual import MEANS, ContinualPlan, compare_means


PLAN = ContinualPlan(
    texts=2,
    prompt_tokens=8,
    new_tokens=8,
    steps=2,
    batch_size=2,
    held_out=2,
    measured_tokens=6,
    draft_length=2,
    seeds=(0, 1),
)


def test_both_domains_are_measured_before_and_after(tmp_path, corpus_file):
    pair, library, out = load_pair(), tmp_path / "library", tmp_path / "out"
    library.mkdir()
    second = [
        f"Tom has {number} apples and gives {number // 2} of them to Ann. How many are left?" for number in range(40)
    ]
    options = {
        "docs": corpus_file, "second": second, "start": BUNDLED / "hass", "out": out, "report": tmp_path / "continual",
        "plan": PLAN, "library": library,
    }  # fmt: skip
    seen = []
    found = compare_means(pair, **options, progress=lambda *each: seen.append(each))
    assert {domain: list(rows) for domain, rows in found.items()} == {
        domain: ["before", *MEANS] for domain in ("first", "second")
    }
    assert ("serving", 2, 2) in seen
    logs = {name: len((out / f"{name}-0" / "log.jsonl").read_text().splitlines()) for name in MEANS}
    assert logs == {"replay": 4, "neither": 2}  # as many steps on new texts
    content = json.loads((tmp_path / "continual.json").read_text())
    assert content["summary"]["demo"]["second"].keys() == found["second"].keys()
    assert (out / "first.jsonl").read_text() != (out / "second.jsonl").read_text()
    seen.clear()
    assert compare_means(pair, **options, progress=lambda *each: seen.append(each)) == found
    assert {part for part, *_ in seen} == {"measuring first", "measuring second"}
