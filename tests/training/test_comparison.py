"""Drafters side by side."""

import json

import pytest
import torch

from hf_specdec.quality.drafters import Arm, compare, compare_drafters, table, write_report
from hf_specdec.training.acceptance import Measured, acceptance_lengths, measure
from tests.networks import drafter_for, small_target


PROMPTS = [[3, 8, 5], [9, 4, 7], [2, 6, 1, 5]]


def arm(name, *seeds):
    return Arm(
        name,
        [
            {3: [Measured(tau, (1, 2)) for tau in taus], 6: [Measured(2 * tau, (1, 2)) for tau in taus]}
            for taus in seeds
        ],
    )


def test_gains_are_those_of_the_means_over_seeds_and_intervals_are_over_both():
    arms = [
        arm("hass", [1.0, 2.0, 3.0]),
        arm("grpo", [1.5, 3.0, 3.0], [1.5, 2.0, 4.0]),
        arm("control", [1.0, 2.0, 3.0]),
    ]
    found = compare(arms, baseline="hass", control="control")
    row = found["arms"]["grpo"]["3"]
    assert row["tau"] == pytest.approx((1.5 + 2.5 + 3.5) / 3)
    assert row["gain"] == pytest.approx(25.0)
    assert row["difference_from_control"]["mean"] == pytest.approx(0.5)
    assert row["difference_from_control"]["low"] < 0.3  # the seeds part on two of the prompts
    assert found["resampled"] == "seeds and prompts"
    assert found["by_seed"]["grpo"]["3"] == [2.5, 2.5]
    assert row["interval"]["low"] == pytest.approx(1.5)
    assert found["arms"]["grpo"]["6"]["tau"] == pytest.approx(5.0)
    assert "difference_from_control" not in found["arms"]["control"]["3"]
    assert (found["same_text"], found["num_prompts"]) == (True, 3)
    other = Arm("other", [{k: [Measured(1.0, (1, 3))] * 3 for k in (3, 6)}])
    assert not compare([*arms, other], baseline="hass")["same_text"]


def test_batches_measure_what_single_prompts_do():
    target = small_target()
    network = drafter_for(target, "eagle")
    options = {"steps": 3, "max_new_tokens": 12}
    alone = measure(target, network, PROMPTS, **options)
    assert measure(target, network, PROMPTS, batch_size=2, **options) == alone
    assert [each.tau for each in alone] == acceptance_lengths(target, network, PROMPTS, **options)
    plain = [
        target.generate(torch.tensor([each]), do_sample=False, max_new_tokens=12)[0, len(each) :].tolist()
        for each in PROMPTS
    ]
    assert [list(each.text) for each in alone] == plain


def test_sampled_prompts_have_dice_of_their_own():
    target = small_target()
    network = drafter_for(target, "eagle")
    options = {"steps": 3, "max_new_tokens": 12, "temperature": 1.0}
    alone = measure(target, network, PROMPTS, **options)
    assert measure(target, network, PROMPTS, batch_size=2, **options) == alone
    assert measure(target, network, PROMPTS[:1], **options) == alone[:1]
    other = measure(target, network, PROMPTS, seed=1, **options)
    assert all(first.text != second.text for first, second in zip(alone, other, strict=True))


def test_the_report_has_the_names_that_are_read(tmp_path):
    target = small_target()
    drafters = {name: [drafter_for(target, "eagle", seed=seed)] for seed, name in enumerate(("hass", "control"))}
    seen = []
    options = {"max_new_tokens": 8, "progress": lambda *done: seen.append(done)}
    arms = compare_drafters(target, drafters, PROMPTS, steps=(1, 2), **options)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    found = compare(arms, baseline="hass", control="control")
    write_report(tmp_path / "v1.5", found, model="demo", dataset="pydocs", about={"seeds": [0], "training": "none"})
    content = json.loads((tmp_path / "v1.5.json").read_text())
    assert content["seeds"] == [0]
    assert content["summary"]["demo"]["pydocs"]["hass"]["2"] == arms[0].lengths(2).mean()
    assert content["same_text"]
    page = (tmp_path / "v1.5.md").read_text()
    assert table(found) in page
    assert "training: none" in page
    assert (tmp_path / "v1.5.png").read_bytes().startswith(b"\x89PNG")
