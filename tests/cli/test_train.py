"""`specdec train`."""

import json
import shutil
from collections import Counter
from itertools import pairwise

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from hf_specdec import AutoDrafter, RCSDConfig, SpeculativeConfig
from hf_specdec.cli.output import progress_bar
from hf_specdec.cli.train import RecipeName
from hf_specdec.cli.training_run import _follow
from hf_specdec.training.acceptance import acceptance_lengths
from hf_specdec.training.answers import is_held_out
from hf_specdec.training.curve import DrafterCurve, read_curve
from hf_specdec.training.rcsd import RCSDTraining, RoundRecorder
from hf_specdec.training.recipes import RECIPES, STAGES, followed_by, stages_of
from hf_specdec.training.trainer import StepLog
from tests.toys import prompts as ids_of


PROMPTS = [f"w{index} w{index + 3} w{index + 1}" for index in range(12)]


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


@pytest.fixture
def options(pair, data, tmp_path):
    short = ["--max-new-tokens", 8, "--batch-size", 2, "--held-out", 0.3, "--save-every", 2, "--dtype", "float32"]
    return ["train", "--target", pair.target, "--data", data, "--out", tmp_path / "drafter", *short]


@pytest.mark.parametrize("recipe", ["hass", "eagle3"])
def test_it_writes_a_drafter_that_loads(pair, options, run_json, tmp_path, recipe):
    found = run_json(*options, "--recipe", recipe, "--max-steps", 4)
    held_out = [prompt for prompt in PROMPTS if is_held_out(prompt, 0.3)]
    assert 0 < len(held_out) < len(PROMPTS)
    assert found["num_texts"] == len(PROMPTS) - len(held_out)
    assert found["tau"] >= 1
    answers = [json.loads(line) for line in (tmp_path / "drafter" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == found["num_texts"]
    network = AutoDrafter.from_pretrained(tmp_path / "drafter", target=pair.model)
    assert network.config.recipe == recipe
    inputs = ids_of()
    asked = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    config = RCSDConfig(steps=3, on_drafter_error="raise")
    drafted = pair.model.generate(**inputs, **asked, assistant_model=network, speculative_config=config)
    assert drafted.tolist() == pair.model.generate(**inputs, **asked).tolist()


def test_a_run_goes_on_from_another_drafter(pair, options, run_json, tmp_path):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    first = tmp_path / "drafter"
    again = [tmp_path / "second" if part == first else part for part in options]
    run_json(*again, "--recipe", "eal", "--max-steps", 2, "--start", first, "--learning-rate", 1e-20)
    one, two = (AutoDrafter.from_pretrained(path, target=pair.model) for path in (first, tmp_path / "second"))
    assert type(one) is type(two)
    assert two.config.recipe == "hass+eal"
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_drafter_of_another_tokenizer_is_not_gone_on_with(pair, options, run, run_json, tmp_path, monkeypatch):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    monkeypatch.setattr("hf_specdec.networks.target.saved_tokenizer", lambda name: None)  # nobody looks for another one
    config = tmp_path / "drafter" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_tokenizer": "0" * 64}))
    again = [tmp_path / "second" if part == tmp_path / "drafter" else part for part in options]
    stderr = run(*again, "--recipe", "hass", "--max-steps", 2, "--start", tmp_path / "drafter", code=2).stderr
    assert "whose tokenizer have the hash" in " ".join(stderr.split())


def test_a_run_is_resumed_with_its_own_start_only(pair, options, run, run_json, tmp_path):
    for seed, name in enumerate(("one", "two")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoDrafter.from_target(pair.model, "eagle").save_pretrained(tmp_path / name)
    asked = [*options, "--recipe", "eal", "--max-steps", 2]
    found = run_json(*asked, "--start", tmp_path / "one")
    for start in ([], ["--start", tmp_path / "two"]):
        refused = " ".join(run(*asked, *start, "--resume", code=2).stderr.split())
        assert "a run with other start: resume with the same" in refused
    assert run_json(*asked, "--start", tmp_path / "one", "--resume")["tau"] == found["tau"]
    (tmp_path / "drafter" / "run.json").unlink()  # a run of an earlier version
    assert run_json(*asked, "--start", tmp_path / "one", "--resume")["tau"] == found["tau"]


def test_answers_may_be_sampled(options, run, run_json, tmp_path):
    asked = [*options, "--recipe", "kl", "--max-steps", 2, "--answer-temperature", 1.0, "--answer-seed", 5]
    run_json(*asked)
    rows = [json.loads(line) for line in (tmp_path / "drafter" / "answers.jsonl").read_text().splitlines()]
    assert all((row["temperature"], row["seed"]) == (1.0, 5) for row in rows)
    greedy = [tmp_path / "greedy" if part == tmp_path / "drafter" else part for part in asked[:-4]]
    run_json(*greedy)
    others = [json.loads(line) for line in (tmp_path / "greedy" / "answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in others]
    assert [row["text"] for row in rows] != [row["text"] for row in others]
    assert "seed 5, not 0" in " ".join(run(*asked[:-2], "--resume", code=2).stderr.split())
    rcsd = [*options, "--recipe", "rcsd-dpo", "--max-steps", 2, "--start", tmp_path / "greedy"]
    assert "greedy answers" in run(*rcsd, "--answer-temperature", 1.0, code=2).stderr
    assert "--answer-temperature" in run(*greedy, "--answer-seed", 5, code=2).stderr


def test_a_run_that_goes_on_with_its_own_recipe_is_named_once():
    assert followed_by(None, "hass") == followed_by("hass", "hass") == "hass"
    assert followed_by("hass+rcsd-dpo", "rcsd-dpo") == "hass+rcsd-dpo"
    assert followed_by("xhass", "hass") == "xhass+hass"


def test_every_recipe_can_be_asked_for():
    """The names are written down once more, since the command line must not import what trains."""
    assert list(RecipeName) == [*RECIPES, *STAGES]


def test_checkpoints_are_not_overwritten_unasked(options, run, run_json):
    whole = run_json(*options, "--recipe", "hass", "--max-steps", 2)
    assert "--resume" in run(*options, "--recipe", "hass", "--max-steps", 2, code=2).stderr
    assert run_json(*options, "--recipe", "hass", "--max-steps", 2, "--resume")["tau"] == whole["tau"]


def test_prompts_on_one_side_only_are_refused(options, run):
    assert "held out" in run(*options, "--recipe", "hass", "--held-out", 0.0, code=2).stderr


def test_evaluate_measures_what_the_loop_accepts(pair, data, run_json, run, tmp_path):
    for seed, name in enumerate(("one", "two")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoDrafter.from_target(pair.model, "eagle").save_pretrained(tmp_path / name)
    options = ["--target", pair.target, "--data", data, "--drafter", tmp_path / "one", "--max-new-tokens", 8]
    options += ["--dtype", "float32", "--no-chat", "--limit", 4]
    found = run_json("evaluate", *options, "--baseline", tmp_path / "two", "--steps", "1,3")["tau"]
    prompts = [pair.tokenizer(text)["input_ids"] for text in PROMPTS[:4]]
    for role, name in (("drafter", "one"), ("baseline", "two")):
        network = AutoDrafter.from_pretrained(tmp_path / name, target=pair.model)
        for steps in (1, 3):
            expected = acceptance_lengths(pair.model, network, prompts, steps=steps, max_new_tokens=8)
            assert found[role][str(steps)]["values"] == expected
            assert found[role][str(steps)]["mean"] == pytest.approx(sum(expected) / 4)
            assert found[role][str(steps)]["low"] <= found[role][str(steps)]["mean"] <= found[role][str(steps)]["high"]
    assert "3,4,5,6" in run("evaluate", *options, "--steps", "three", code=2).stderr
    spaced = run_json("evaluate", *options, "--steps", 1, 3)
    assert spaced["tau"]["drafter"] == found["drafter"]
    assert "--steps" in run("evaluate", *options, 4, 5, code=2).stderr
    other = tmp_path / "other.txt"
    other.write_text("\n".join(PROMPTS[4:8]))
    both = run_json("evaluate", *options, "--data", other, "--steps", 1)["datasets"]
    assert both["prompts"]["tau"]["drafter"]["1"] == found["drafter"]["1"]
    prompts = [pair.tokenizer(text)["input_ids"] for text in PROMPTS[4:8]]
    network = AutoDrafter.from_pretrained(tmp_path / "one", target=pair.model)
    expected = acceptance_lengths(pair.model, network, prompts, steps=1, max_new_tokens=8)
    assert both["other"]["tau"]["drafter"]["1"]["values"] == expected
    assert "twice" in run("evaluate", *options, "--data", data, code=2).stderr


@pytest.mark.parametrize("recipe", ["rcsd-dpo", "rcsd-grpo", "wtv+grpo"])
def test_rcsd_goes_on_from_hass(pair, options, run, run_json, tmp_path, recipe):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    first, second = tmp_path / "drafter", tmp_path / "second"
    again = [second if part == first else part for part in options] + ["--recipe", recipe, "--max-steps", 4]
    if recipe != "wtv+grpo":
        assert "--start" in run(*again, code=2).stderr
    found = run_json(*again, "--start", first, "--group-size", 4, "--pairs", "literal", "--unmasked")
    assert found["tau"] >= 1
    one, two = (AutoDrafter.from_pretrained(path, target=pair.model) for path in (first, second))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert two.config.recipe == f"hass+{recipe}"
    stages = sorted(path.name for path in second.glob("stage-*"))
    assert stages == ([] if recipe == "rcsd-grpo" else ["stage-0", "stage-1"])
    assert [path.name for path in second.glob("stage-*/rounds/*.safetensors")] == (
        ["rounds-00000000.safetensors"] * 2 if recipe == "rcsd-dpo" else []
    )
    assert run_json(*again, "--start", first, "--resume", "--group-size", 4, "--pairs", "literal", "--unmasked")[
        "tau"
    ] == pytest.approx(found["tau"])


def test_several_drafters_stand_side_by_side(pair, data, run, run_json, tmp_path):
    for seed, name in enumerate(("one", "two")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoDrafter.from_target(pair.model, "eagle").save_pretrained(tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    options = ["--target", pair.target, "--data", data, "--steps", "1,3", "--max-new-tokens", 8, "--dtype", "float32"]
    options += ["--no-chat", "--limit", 4]
    arms = ["--arm", f"hass={one}", "--arm", f"other={two},{one}", "--control", "hass"]
    found = run_json("evaluate", *options, *arms, "--report", tmp_path / "rcsd")
    assert found["same_text"]
    assert found["seeds"] == [0, 1]
    prompts = [pair.tokenizer(text)["input_ids"] for text in PROMPTS[:4]]
    network = AutoDrafter.from_pretrained(one, target=pair.model)
    expected = acceptance_lengths(pair.model, network, prompts, steps=3, max_new_tokens=8)
    assert found["arms"]["hass"]["3"]["tau"] == pytest.approx(sum(expected) / 4)
    assert set(found["arms"]["other"]["1"]["difference_from_control"]) == {"mean", "low", "high"}
    written = json.loads((tmp_path / "rcsd.json").read_text())["summary"]
    assert written["target"]["prompts"]["hass"]["3"] == found["arms"]["hass"]["3"]["tau"]
    other = tmp_path / "other.txt"
    other.write_text("\n".join(PROMPTS[4:8]))
    named = ["--report", tmp_path / "rcsd", "--model-name", "tiny1.5"]
    several = run_json("evaluate", *options, "--data", other, *arms, *named)["datasets"]
    assert several["prompts"] == found
    written = json.loads((tmp_path / "rcsd.json").read_text())["summary"]
    assert {model: list(each) for model, each in written.items()} == {
        "target": ["prompts"],
        "tiny1.5": ["prompts", "other"],
    }
    assert written["tiny1.5"]["other"]["hass"]["3"] == several["other"]["arms"]["hass"]["3"]["tau"]
    assert "--report FILE" in run("evaluate", *options, *arms, "--model-name", "tiny1.5", code=2).stderr
    assert "--drafter" in run("evaluate", *options, code=2).stderr
    assert "NAME=FOLDER" in run("evaluate", *options, "--arm", "hass", code=2).stderr
    assert "one kind" in run("evaluate", *options, *arms, "--drafter", tmp_path, code=2).stderr
    assert "pass --arm" in run("evaluate", *options, "--drafter", tmp_path, "--control", "kl", code=2).stderr
    assert "one of the arms" in run("evaluate", *options, *arms[:2], "--control", "kl", code=2).stderr


def test_a_small_vocabulary_and_short_texts_in_bfloat16(pair, options, run, run_json, tmp_path):
    short = [*options, "--recipe", "eagle3", "--max-steps", 2, "--draft-vocab-size", 20, "--max-tokens", 6]
    found = run_json(*short, "--dtype", "bfloat16")
    assert found["tau"] >= 1
    network = AutoDrafter.from_pretrained(tmp_path / "drafter", target=pair.model)
    assert network.config.draft_vocab_size == 20
    answers = [json.loads(line) for line in (tmp_path / "drafter" / "answers.jsonl").read_text().splitlines()]
    counts = Counter(token for each in answers for token in each["text"][len(each["prompt"]) : 6])
    assert set(network.target_ids.tolist()) >= {token for token, _ in counts.most_common(5)}
    refused = run(*short, "--start", tmp_path / "drafter", "--resume", code=2).stderr
    assert "--draft-vocab-size" in refused
    AcceleratorState._reset_state(True)  # the run before was in bfloat16
    assert "max_tokens" in run(*options, "--recipe", "hass", "--max-tokens", 3, "--resume", code=2).stderr


def record(pair, folder, num_texts=8):
    """Rounds of live use, on prompts that are not those of the data."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoDrafter.from_target(pair.model, "eagle")
    recorder = RoundRecorder(folder, texts_per_shard=3)
    config = SpeculativeConfig(acceptance=recorder, drafting="model", length=3, on_drafter_error="raise")
    asked = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 10}
    for seed in range(num_texts):
        inputs = ids_of(1, columns=4, seed=seed)
        pair.model.generate(
            **inputs, **asked, assistant_model=network, speculative_config=config, round_callback=recorder
        )
    recorder.close()


@pytest.mark.parametrize("recipe", ["hass", "rcsd-dpo"])
def test_rounds_of_live_use_are_learnt(pair, options, run, run_json, tmp_path, recipe):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    first, second, live = tmp_path / "drafter", tmp_path / "second", tmp_path / "live"
    record(pair, live)
    again = [second if part == first else part for part in options] + ["--recipe", recipe, "--max-steps", 4]
    again += ["--continual", live]
    assert "--start" in run(*again, code=2).stderr
    found = run_json(*again, "--start", first)
    assert found["tau"] >= 1
    assert found["tau_recorded"] >= 1
    assert 0 < found["num_recorded"] < 8
    assert found["num_texts"] > 0
    one, two = (AutoDrafter.from_pretrained(path, target=pair.model) for path in (first, second))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    asked = [*again, "--start", first, "--resume"]
    assert run_json(*asked)["tau_recorded"] == pytest.approx(found["tau_recorded"])
    record(pair, live)  # the folder has grown since
    assert "other texts or rounds" in " ".join(run(*asked, code=2).stderr.split())


def test_live_use_that_cannot_be_learnt_is_refused(pair, options, run, tmp_path):
    live, start = tmp_path / "live", ["--start", tmp_path / "some"]
    hass = [*options, "--recipe", "hass", "--max-steps", 2]
    assert "--continual FOLDER" in run(*hass, *start, "--replay-share", 0.2, code=2).stderr
    live.mkdir()
    assert "RoundRecorder" in run(*hass, *start, "--continual", live, code=2).stderr
    record(pair, live, num_texts=1)
    assert "record more" in run(*hass, *start, "--continual", live, code=2).stderr
    assert "replay_share" in run(*hass, *start, "--continual", live, "--replay-share", 1.0, code=2).stderr
    stages = [*options, "--recipe", "eal+grpo", "--max-steps", 2, *start, "--continual", live]
    assert "one stage" in run(*stages, code=2).stderr
    assert not (tmp_path / "drafter").exists()


class Notes(GeneralTracker):
    """A tracker that remembers."""

    name, requires_logging_directory, written = "notes", False, []

    def __init__(self, run_name, **_):
        super().__init__()
        self.written.append(run_name)

    @property
    def tracker(self):
        return self.written

    def store_init_configuration(self, values):
        self.written.append(values)

    def log(self, values, step=None, **_):
        self.written.append((step, values))

    def finish(self):
        self.written.append("end")


def test_trackers_get_loss_its_parts_and_tau_of_every_stage(options, run, run_json, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notes", Notes)
    monkeypatch.setattr(Notes, "written", [])
    asked = [*options, "--recipe", "wtv+grpo", "--max-steps", 4, "--eval-every", 2, "--group-size", 4]
    found = run_json(*asked, "--trackers", "notes")
    name, values, *steps, end = Notes.written
    assert (name, values["max_steps"], end) == ("specdec-train", 4, "end")
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    of_losses = [{"missing", "kl"}] * 2 + [{"policy", "reward", "judged", "reference", "kl"}] * 2
    assert [each.keys() - {"loss", "tau"} for _, each in steps] == of_losses
    assert [each.keys() & {"loss", "tau"} for _, each in steps] == [{"loss"}, {"loss", "tau"}] * 2
    assert (steps[-1][1]["loss"], steps[-1][1]["tau"]) == (found["loss"], found["tau"])


@pytest.mark.parametrize("name", ["swanlab", "paper"])
def test_trackers_that_are_not_there_are_refused(options, run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    refused = run(*options, "--recipe", "hass", "--max-steps", 2, "--trackers", name, code=2).stderr
    assert name in refused
    assert not (tmp_path / "drafter").exists()


def test_each_step_is_shown_with_its_figures(monkeypatch, capsys, tmp_path):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    with progress_bar("Training") as show:
        follow = _follow(show, 4, DrafterCurve(tmp_path, [4], resume=False))
        follow(StepLog(1, 2.5, (0.5, 0.25), 123.4, {"step_0": 2.5}, {"tau": 1.5}))
        follow(StepLog(1, 2.5, (0.5, 0.25), 123.4, {"reward": 0.5, "kl": 1.25}))
    shown = capsys.readouterr().err
    assert "loss 2.5000 (reward 0.5000, kl 1.2500), agreement by position 0.50, 0.25, 123 tokens/s" in shown
    assert "step 1: loss 2.5000, agreement by position 0.50, 0.25, 123 tokens/s, tau 1.500" in shown
    assert "1/4" in shown


def test_every_evaluation_is_a_point_of_the_curve(options, run_json, tmp_path):
    asked = [*options, "--recipe", "eagle3", "--max-steps", 4, "--eval-every", 1]
    found = run_json(*asked)
    folder = tmp_path / "drafter"
    curve = read_curve(folder / "curve.jsonl")
    assert [each["step"] for each in curve] == [1, 2, 3, 4]
    assert (curve[-1]["tau"], curve[-1]["loss"]) == (found["tau"], found["loss"])
    lengths = [len(json.loads(line)["text"]) for line in (folder / "answers.jsonl").read_text().splitlines()]
    epochs, rest = divmod(4 * 2, len(lengths))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epochs))[:rest].tolist()
    assert curve[-1]["num_tokens"] == epochs * sum(lengths) + sum(lengths[index] for index in order)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    shutil.rmtree(folder / "checkpoint-00000004")  # killed after step 3
    run_json(*asked, "--resume")
    assert read_curve(folder / "curve.jsonl") == curve


def test_the_curve_goes_on_through_stages(options, run_json, tmp_path):
    asked = [*options, "--recipe", "wtv+grpo", "--max-steps", 4, "--eval-every", 1, "--group-size", 4]
    run_json(*asked)
    folder = tmp_path / "drafter"
    curve = read_curve(folder / "curve.jsonl")
    assert [each["step"] for each in curve] == [1, 2, 3, 4]
    assert all(before["num_tokens"] < after["num_tokens"] for before, after in pairwise(curve))
    steps = [after["num_tokens"] - before["num_tokens"] for before, after in pairwise([{"num_tokens": 0}, *curve])]
    assert steps[:2] == steps[2:], "both stages read the same texts first"
    shutil.rmtree(folder / "stage-1")  # killed in its first step
    run_json(*asked, "--resume")
    assert read_curve(folder / "curve.jsonl") == curve


def test_a_loss_that_does_not_fit_the_drafter_is_refused_before_anything_is_answered(options, run, run_json, tmp_path):
    run_json(*options, "--recipe", "eagle3", "--max-steps", 2)
    second = tmp_path / "second"
    again = [second if part == tmp_path / "drafter" else part for part in options]
    refused = run(*again, "--recipe", "hass", "--max-steps", 2, "--start", tmp_path / "drafter", code=2).stderr
    assert "EAGLE-1" in refused
    assert not (second / "answers.jsonl").exists()


def test_rcsd_is_a_command_of_its_own(pair, options, run, run_json, tmp_path):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    first, live = tmp_path / "drafter", tmp_path / "live"

    def asked(name):
        words = [tmp_path / name if part == first else part for part in options[1:]]
        return [*words, "--start", first, "--max-steps", 2]

    run_json("train", *asked("one"), "--recipe", "rcsd-dpo", "--refreshes", 1)
    assert run_json("train", "rcsd", *asked("two"), "--refreshes", 1)["recipe"] == "rcsd-dpo"
    one, two = (AutoDrafter.from_pretrained(tmp_path / name, target=pair.model) for name in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    record(pair, live)
    found = run_json("train", "rcsd", *asked("three"), "--method", "grpo", "--group-size", 4, "--continual", live)
    assert (found["recipe"], found["num_recorded"] > 0) == ("rcsd-grpo", True)
    assert "--start" in run("train", "rcsd", *options[1:], code=2).stderr


_DPO = {"pairs": "literal", "rejected": "first", "beta": 0.7, "anchor_weight": 0.2, "refreshes": 1}
_GRPO = {"group": "response", "group_size": 3, "credit": "window", "draft_temperature": 0.4, "kl_weight": 0.3}


@pytest.mark.parametrize(
    ("method", "chosen"), [("dpo", {"refreshes": 1}), ("dpo", _DPO), ("grpo", {}), ("grpo", _GRPO)]
)
def test_the_options_of_rcsd_are_those_of_its_losses(options, run_json, tmp_path, method, chosen):
    run_json(*options, "--recipe", "hass", "--max-steps", 2)
    words = [tmp_path / "second" if part == tmp_path / "drafter" else part for part in options[1:]]
    given = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    run_json("train", "rcsd", *words, "--start", tmp_path / "drafter", "--max-steps", 2, "--method", method, *given)
    state = json.loads((tmp_path / "second" / "checkpoint-00000002" / "state.json").read_text())
    (expected,) = stages_of(f"rcsd-{method}", RCSDTraining(**chosen))
    assert state["recipe"] == str(expected)


def test_features_are_written_first_if_a_folder_is_named(pair, options, run, run_json, tmp_path):
    asked = [*options, "--recipe", "eagle3", "--max-steps", 3]
    expected = run_json(*asked)
    again = [tmp_path / "second" if part == tmp_path / "drafter" else part for part in asked]
    shown = run(*again, "--features", tmp_path / "features").stderr
    assert f"features of {expected['num_texts']} texts take" in " ".join(shown.split())
    assert list((tmp_path / "features").glob("*.safetensors"))
    one, two = (AutoDrafter.from_pretrained(tmp_path / name, target=pair.model) for name in ("drafter", "second"))
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
