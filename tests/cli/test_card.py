"""`specdec card` and `specdec publish`: valid metadata, measured figures only, one commit."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

import hf_specdec.hub.publish as publishing
from hf_specdec.cli import app
from hf_specdec.hub.card import render_card
from hf_specdec.hub.custom_generate import export_custom_generate
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.export import export_drafter
from hf_specdec.networks.target import weights_fingerprint
from tests.networks import drafter_for, small_target


FACTS = ("--base-model", "org/target", "--name", "org/drafter", "--license", "apache-2.0", "--language", "en")


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    """The report of a benchmark that was run: an exact arm, a relaxed one and two that are not this package's."""
    from typer.testing import CliRunner

    folder = tmp_path_factory.mktemp("bench")
    data = folder / "tasks.txt"
    data.write_text("w1 w2 w3 w4\n\nw5 w6 w7 w5 w6\n")
    options = ["--max-new-tokens", "6", "--arms", "plain,stock-assistant-2,model-2,easd", "--out", str(folder / "run")]
    result = CliRunner().invoke(app, ["bench", *pair.options, "--data", str(data), *options])
    assert result.exit_code == 0, result.output
    return folder / "run.json"


@pytest.fixture
def folder(pair, tmp_path):
    return Path(shutil.copytree(pair.draft, tmp_path / "drafter"))


@pytest.fixture
def carded(folder, measured, run):
    run("card", folder, "--results", measured, *FACTS, "--dataset", "openai/gsm8k")
    return folder


class Hub:
    """Stands in for huggingface_hub's client."""

    def __init__(self):
        self.repos, self.commits = [], []

    def create_repo(self, repo, *, private, exist_ok):
        self.repos.append((repo, private, exist_ok))

    def create_commit(self, repo, operations, *, commit_message):
        self.commits.append((repo, {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}))
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def hub(monkeypatch):
    client = Hub()
    monkeypatch.setattr(publishing, "HfApi", lambda: client)
    return client


def test_the_metadata(carded, measured):
    data, summary = ModelCard.load(carded / "README.md").data, json.loads(measured.read_text())["summary"]["tasks"]
    assert (data.base_model, data.base_model_relation) == ("org/target", "adapter")
    assert (data.library_name, data.pipeline_tag) == ("hf_specdec", "text-generation")
    assert (data.license, data.language, data.datasets) == ("apache-2.0", ["en"], ["openai/gsm8k"])
    assert data.metrics == ["acceptance_length", "speedup"]
    assert "speculative-decoding" in data.tags
    assert data.model_name == "org/drafter"
    found = {(each.metric_type, each.metric_name.partition(", ")[2]): each.metric_value for each in data.eval_results}
    assert found == {
        (metric, arm + ("" if arm == "model-2" else " (not lossless)")): round(summary[arm][figure], 4)
        for arm in ("model-2", "easd")
        for metric, figure in (("acceptance_length", "tokens_per_round"), ("speedup", "speedup"))
    }


def test_the_text(carded, measured):
    text = (carded / "README.md").read_text()
    assert measured.with_suffix(".md").read_text() in text
    assert (carded / "results.png").read_bytes() == measured.with_suffix(".png").read_bytes()
    assert "(results.png)" in text
    assert "keeps the target's distribution: `model-2`" in text
    assert "does **not** keep the target's distribution: `easd`" in text


def test_a_card_goes_elsewhere_and_keeps_its_prose_there(folder, measured, tmp_path, run):
    before = sorted(path.name for path in folder.iterdir())
    out = tmp_path / "cards" / "drafter"
    run("card", folder, "--results", measured, *FACTS, "--out", out)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "results.json", "results.png"]
    text = (out / "README.md").read_text().replace("## Use", "Trained in a morning.\n\n## Use")
    (out / "README.md").write_text(text)
    run("card", folder, "--results", out / "results.json", "--out", out)
    assert (out / "README.md").read_text() == text


def test_a_drafter_network_names_its_method_and_fingerprint(measured, tmp_path, run):
    drafter_for(small_target(), "eagle3").save_pretrained(tmp_path / "eagle3")
    run("card", tmp_path / "eagle3", "--results", measured, "--base-model", "org/target")
    card = ModelCard.load(tmp_path / "eagle3" / "README.md")
    assert {"eagle3", "arxiv:2503.01840"} <= set(card.data.tags)
    assert json.loads((tmp_path / "eagle3" / "config.json").read_text())["target_weights"] in card.text
    assert "AutoDrafter.from_pretrained" in card.text


@pytest.mark.parametrize(
    ("recipe", "papers", "title"),
    [
        (None, ["eagle", "arxiv:2401.15077"], "- method: eagle\n"),
        ("hass", ["eagle", "arxiv:2401.15077", "hass", "arxiv:2408.15766"], "- method: eagle, trained with hass\n"),
        (
            "hass+rcsd-dpo",
            ["eagle", "arxiv:2401.15077", "hass", "arxiv:2408.15766", "rcsd", "rcsd-dpo"],
            "- method: eagle, trained with hass, then rcsd-dpo\n",
        ),
    ],
)
def test_a_drafter_network_names_what_trained_it(recipe, papers, title, measured, tmp_path, run):
    network = drafter_for(small_target(), "eagle")
    network.config.recipe = recipe
    network.save_pretrained(tmp_path)
    run("card", tmp_path, "--results", measured, "--base-model", "org/target", "--name", "org/drafter")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["speculative-decoding", "draft-model", *papers]
    assert title in card.text
    assert (
        "specdec export org/drafter --format vllm --out eagle-vllm\ncd eagle-vllm\nvllm serve org/target " in card.text
    )


def test_a_field_of_that_name_may_be_somebody_elses(measured, tmp_path, run):
    drafter_for(small_target(), "eagle").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"recipe": {"stage": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run("card", tmp_path, "--results", measured, "--base-model", "org/target")
    assert "- method: eagle\n" in ModelCard.load(tmp_path / "README.md").text
    assert AutoDrafter.from_pretrained(tmp_path, target=small_target()).config.recipe is None


def test_a_served_folder_links_its_launch_lines(measured, tmp_path, run):
    network = drafter_for(small_target(), "eagle3")
    network.config.recipe = "eal"
    export_drafter(network, tmp_path / "out", "vllm")
    run("card", tmp_path / "out", "--results", measured, "--base-model", "org/target")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "[serve.md](serve.md)" in card.text
    assert {"eagle3", "eal", "arxiv:2609.24150"} <= set(card.data.tags)


def test_a_custom_generate_repository_stays_one(measured, tmp_path, hub, run):
    """It gains figures in the card that came with it, and is published with its code."""
    export_custom_generate(drafter_for(small_target(), "eagle3"), tmp_path, "org/drafter")
    run("card", tmp_path, "--results", measured, "--base-model", "org/target", "--license", "mit")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags.count("custom_generate") == 1
    assert measured.with_suffix(".md").read_text() in card.text
    assert "## Example usage" in card.text
    run("publish", tmp_path, "--repo", "org/drafter")
    assert {"README.md", "custom_generate/generate.py"} <= hub.commits[0][1].keys()


def test_a_card_renders_to_itself(carded):
    assert render_card(carded) == (carded / "README.md").read_text()


def test_prose_is_kept_and_figures_are_renewed(carded, measured, tmp_path, run):
    readme = carded / "README.md"
    readme.write_text(readme.read_text().replace("## Use", "Trained on a Tuesday.\n\n## Use"))
    values = json.loads(measured.read_text())
    values["summary"]["tasks"]["model-2"]["speedup"] = 7.25
    (tmp_path / "other.json").write_text(json.dumps(values))
    run("card", carded, "--results", tmp_path / "other.json")
    text, data = readme.read_text(), ModelCard.load(readme).data
    assert "Trained on a Tuesday." in text
    assert text.count("7.25x") == 1
    assert 7.25 in [each.metric_value for each in data.eval_results]
    assert data.license == "apache-2.0"
    assert not (carded / "results.png").exists()
    assert "(results.png)" not in text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda values: values["environment"].update(assistant=None), "without a drafter"),
        (lambda values: values["summary"].clear(), "must hold `summary`"),
        (lambda values: [values["summary"]["tasks"].pop(arm) for arm in ("model-2", "easd")], "no arm that drafts"),
    ],
)
def test_results_of_no_drafter(break_it, message, folder, measured, tmp_path, run):
    values = json.loads(measured.read_text())
    break_it(values)
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert message in run("card", folder, "--results", tmp_path / "results.json", *FACTS, code=2).stderr
    assert not (folder / "README.md").exists()
    assert not (folder / "results.json").exists()


@pytest.mark.parametrize("name", [None, "target", "/models/target", "../target"])
def test_a_target_that_is_no_hub_id(name, folder, measured, run):
    options = [] if name is None else ["--base-model", name]
    assert "--base-model ORG/NAME" in run("card", folder, "--results", measured, *options, code=2).stderr


def test_figures_of_another_drafter(measured, tmp_path, hub, run):
    """A format leaves them as they are; other weights do not."""
    networks = [drafter_for(small_target(), "eagle3", seed=seed) for seed in (0, 1)]
    folders = [export_drafter(each, tmp_path / f"{index}", "vllm") for index, each in enumerate(networks)]
    values = json.loads(measured.read_text())
    values["environment"]["drafter_weights"] = weights_fingerprint(networks[0])
    (folders[0] / "results.json").write_text(json.dumps(values))
    run("card", folders[0], "--base-model", "org/target")
    run("publish", folders[0], "--repo", "org/drafter")
    refused = run(
        "card", folders[1], "--results", folders[0] / "results.json", "--base-model", "org/target", code=2
    ).stderr
    assert "measured with draft, a drafter network with the weights" in refused
    assert not (folders[1] / "README.md").exists()
    shutil.copy(folders[1] / "model.safetensors", folders[0])
    assert "specdec bench --assistant" in run("publish", folders[0], "--repo", "org/drafter", code=2).stderr
    assert len(hub.commits) == 1


def test_figures_of_a_network_in_float16_are_taken(measured, tmp_path, run):
    """Its weights may have been rounded twice, so that nothing is known of them."""
    folder = export_drafter(drafter_for(small_target(), "eagle3").half(), tmp_path / "half")
    values = json.loads(measured.read_text())
    values["environment"]["drafter_weights"] = "those in float32"
    (folder / "results.json").write_text(json.dumps(values))
    run("card", folder, "--base-model", "org/target")
    assert (folder / "README.md").exists()


def test_figures_of_a_network_beside_a_small_model(folder, measured, run, tmp_path):
    values = json.loads(measured.read_text())
    values["environment"]["drafter_weights"] = "some"
    (tmp_path / "results.json").write_text(json.dumps(values))
    error = run("card", folder, "--results", tmp_path / "results.json", *FACTS, code=2).stderr
    assert "another kind of drafter" in error


def test_a_card_without_a_place_for_results(folder, measured, run):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\nMine.\n")
    assert "no place for results" in run("card", folder, "--results", measured, *FACTS, code=2).stderr
    assert (folder / "README.md").read_text().endswith("Mine.\n")


def test_one_commit_holds_everything(carded, hub, run):
    (carded / "pytorch_model.bin").write_bytes(b"pickle")
    (carded / "notes").mkdir()
    (carded / "notes" / "plot.png").write_bytes(b"")
    assert "https://hub/commit" in run("publish", carded, "--repo", "org/drafter", "--private").stderr
    assert hub.repos == [("org/drafter", True, True)]
    [(repo, files)] = hub.commits
    assert repo == "org/drafter"
    assert {"README.md", "config.json", "model.safetensors", "results.json", "results.png"} <= files.keys()
    assert not {"pytorch_model.bin", "notes/plot.png"} & files.keys()
    assert files["model.safetensors"] == (carded / "model.safetensors").read_bytes()


def test_a_dry_run_sends_nothing(carded, hub, run):
    result = run("publish", carded, "--repo", "org/drafter", "--dry-run")
    assert "model.safetensors" in result.stdout.split()
    assert "nothing was sent" in result.stderr
    assert (hub.repos, hub.commits) == ([], [])


def _edit_card(folder, old, new):
    text = (folder / "README.md").read_text()
    assert old in text
    (folder / "README.md").write_text(text.replace(old, new, 1))


def _edit_results(folder):
    values = json.loads((folder / "results.json").read_text())
    values["summary"]["tasks"]["model-2"]["tokens_per_round"] += 0.5
    (folder / "results.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda folder: _edit_card(folder, "      value: ", "      value: 1"), "model-index"),
        (lambda folder: _edit_card(folder, "| model-2 | ", "| model-2 | 1"), "section of its text"),
        (_edit_results, "model-index of its metadata and the section of its text"),
    ],
)
def test_other_figures_are_refused(tamper, named, carded, hub, run):
    tamper(carded)
    error = run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert "does not match results.json" in error
    assert named in error
    assert (hub.repos, hub.commits) == ([], [])


@pytest.mark.parametrize("missing", ["README.md", "config.json", "model.safetensors", "results.json"])
def test_incomplete_folders_are_refused(missing, carded, hub, run):
    (carded / missing).unlink()
    assert missing.replace("model.", "model*.") in run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert hub.commits == []


@pytest.mark.parametrize("repo_id", ["drafter", "a/b/c", "org/..", ""])
def test_repositories_that_are_none(repo_id, carded, hub, run):
    assert "--repo must be ORG/NAME" in run("publish", carded, "--repo", repo_id, code=2).stderr
    assert hub.repos == []


def test_both_commands_speak_json(folder, measured, hub, run_json):
    written = run_json("card", folder, "--results", measured, *FACTS)
    assert written == {
        "drafter": str(folder), "out": str(folder), "files": ["README.md", "results.json", "results.png"],
    }  # fmt: skip
    dry = run_json("publish", folder, "--repo", "org/drafter", "--dry-run")
    assert dry["commit"] is None
    assert hub.commits == []
    sent = run_json("publish", folder, "--repo", "org/drafter")
    assert sent["commit"] == "https://hub/commit"
    assert set(sent["files"]) == set(dry["files"]) == hub.commits[0][1].keys()
    assert sent["num_bytes"] == sum(len(content) for content in hub.commits[0][1].values())


def test_every_command_has_help_and_json():
    """As the page of the command line says."""
    from typer.main import get_command

    def leaves(command, name):
        if not hasattr(command, "commands"):
            yield name, {option for each in command.params for option in each.opts}
        for child, each in getattr(command, "commands", {}).items():
            yield from leaves(each, f"{name} {child}")

    commands = dict(leaves(get_command(app), "specdec"))
    assert len(commands) > 12
    assert [name for name, options in commands.items() if "--json" not in options] == []
