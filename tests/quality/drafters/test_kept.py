"""Measurements are kept by what they are of."""

from hf_specdec.quality.drafters import kept
from hf_specdec.quality.drafters.kept import KeptMeasures
from tests.networks import drafter_for, small_target


PROMPTS = [[3, 8, 5], [9, 4, 7]]


def test_nothing_is_measured_twice_and_nothing_else_is_taken_for_it(tmp_path, monkeypatch):
    calls, real = [], kept.measure
    monkeypatch.setattr(kept, "measure", lambda *args, **options: calls.append(options) or real(*args, **options))
    target, options = small_target(), {"steps": 2, "max_new_tokens": 6}
    first = KeptMeasures(target, tmp_path)(drafter_for(target, "eagle"), PROMPTS, **options)
    assert KeptMeasures(target, tmp_path)(drafter_for(target, "eagle"), PROMPTS, **options) == first
    assert len(calls) == 1
    others = [
        (target, drafter_for(target, "eagle", seed=1), PROMPTS, options),
        (target, drafter_for(target, "eagle"), PROMPTS[:1], options),
        (target, drafter_for(target, "eagle"), PROMPTS, options | {"steps": 3}),
    ]
    another = small_target(seed=1)
    others.append((another, drafter_for(another, "eagle"), PROMPTS, options))
    for number, (model, network, prompts, given) in enumerate(others, start=2):
        KeptMeasures(model, tmp_path)(network, prompts, **given)
        assert len(calls) == number
    assert KeptMeasures(target, None)(drafter_for(target, "eagle"), PROMPTS, **options) == first
    assert len(calls) == 6
