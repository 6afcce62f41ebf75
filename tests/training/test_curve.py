"""The learning curve of a run."""

from hf_specdec.training.curve import DrafterCurve, add_to_curve, read_curve
from hf_specdec.training.curve_plot import plot_curve
from hf_specdec.training.trainer import StepLog


def log(step, num_tokens, tau=1.5):
    evaluation = {} if tau is None else {"tau": tau}
    return StepLog(step, 2.0, (0.5,), 9.0, evaluation=evaluation, num_tokens=num_tokens)


def test_what_is_done_again_stands_there_once(tmp_path):
    file = tmp_path / "curve.jsonl"
    for step, tau in ((1, 1.1), (3, 1.2), (5, 1.3), (3, 1.4)):
        add_to_curve(file, {"step": step, "tau": tau}, lambda each: each["step"])
    with file.open("a") as lines:
        lines.write('{"step": 4')  # as a killed run of something else may leave it
    assert read_curve(file) == [{"step": 1, "tau": 1.1}, {"step": 3, "tau": 1.4}]
    assert read_curve(tmp_path / "none.jsonl") == []


def test_tokens_are_counted_through_stages_also_after_an_interruption(tmp_path):
    first = DrafterCurve(tmp_path, [4, 8], resume=False)
    for each in (log(2, 20), log(3, 30, tau=None), log(4, 40), log(6, 15)):
        first.add(each)
    DrafterCurve(tmp_path, [4, 8], resume=True).add(log(8, 35))
    points = read_curve(tmp_path / "curve.jsonl")
    assert [(each["step"], each["num_tokens"]) for each in points] == [(2, 20), (4, 40), (6, 55), (8, 75)]
    assert points[0] == {"step": 2, "num_tokens": 20, "loss": 2.0, "acceptance": [0.5], "tau": 1.5}
    assert plot_curve(points, steps=5).startswith(b"\x89PNG")


def test_a_run_that_did_not_count_its_first_stage_says_so(tmp_path):
    DrafterCurve(tmp_path, [4, 8], resume=True).add(log(8, 35))
    (point,) = read_curve(tmp_path / "curve.jsonl")
    assert point["num_tokens"] is None
    assert plot_curve([point], steps=5).startswith(b"\x89PNG")
    DrafterCurve(tmp_path, [4], resume=False)
    assert read_curve(tmp_path / "curve.jsonl") == []
