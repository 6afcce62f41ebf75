"""The losses' table on the demo target, at its smallest."""

import json

import pytest

from hf_specdec.demo.pair import load_pair
from hf_specdec.quality.drafters.acceptance_losses import MODES, LossPlan, compare_losses
from hf_specdec.quality.drafters.bundle import BUNDLED


PLAN = LossPlan(
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


def test_every_loss_goes_on_from_the_same_drafter_and_is_compared_with_kl(tmp_path, corpus_file):
    pair, report, library, out = load_pair(), tmp_path / "losses", tmp_path / "library", tmp_path / "out"
    library.mkdir()
    options = {
        "docs": corpus_file,
        "start": BUNDLED / "hass",
        "out": out,
        "report": report,
        "plan": PLAN,
        "library": library,
    }
    found = compare_losses(pair, **options)
    assert {mode: list(rows) for mode, rows in found.items()} == {
        mode: ["start", *losses] for mode, (_, losses) in MODES.items()
    }
    assert all(row["tau"] >= 1 for rows in found.values() for row in rows.values())
    assert all(rows["kl"]["difference"]["mean"] == rows["kl"]["gain"] == 0 for rows in found.values())
    content = json.loads(report.with_suffix(".json").read_text())
    assert content["summary"]["demo"]["sampled"].keys() == found["sampled"].keys()
    assert content["seeds"] == [0, 1]
    assert f"| wtv | {found['sampled']['wtv']['tau']:.3f} [" in report.with_suffix(".md").read_text()
    greedy, sampled = ((out / f"{mode}.jsonl").read_text() for mode in ("greedy", "sampled"))
    assert greedy != sampled
    weights = {folder.name: folder.stat().st_mtime_ns for folder in out.glob("*/model.safetensors")}
    assert compare_losses(pair, **options) == found
    assert weights == {folder.name: folder.stat().st_mtime_ns for folder in out.glob("*/model.safetensors")}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_the_baseline(mode):
    assert MODES[mode][1][0] == "kl"
