"""What `specdec` says about itself, `specdec demo`, and what listing the commands costs."""

import subprocess
import sys
import types

import pytest

import hf_specdec


def test_help_lists_every_command(run):
    text = run("--help").stdout
    assert [name for name in ("demo", "generate", "verify", "calibrate", "info") if name not in text] == []


@pytest.mark.parametrize(
    "command", [["demo"], ["generate"], ["verify"], ["calibrate"], ["calibrate", "easd"], ["info"]]
)
def test_every_command_has_help(run, command):
    assert "Usage:" in run(*command, "--help").stdout


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "hf_specdec.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"hf_specdec {hf_specdec.__version__}\n"


def test_the_command_line_itself_imports_nothing_heavy(repo):
    """Beyond what `import hf_specdec` costs; here that import is left out."""
    code = f"""
import sys, types
package = types.ModuleType("hf_specdec")
package.__path__ = [{str(repo / "hf_specdec")!r}]
sys.modules["hf_specdec"] = package
import hf_specdec.cli
print([name for name in ("torch", "transformers", "huggingface_hub", "matplotlib") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_version(run):
    assert run("--version").stdout == f"hf_specdec {hf_specdec.__version__}\n"


def test_info(run, run_json):
    values = run_json("info")
    assert values["versions"]["hf_specdec"] == hf_specdec.__version__
    assert set(values["presets"]) == {"cospec", "csd", "easd", "exact", "nucleus", "rcsd", "self_draft", "speculative"}
    assert "cpu" in values["devices"]
    text = run("info").stdout
    assert all(f"{name} " in text for name in values["versions"])


def test_demo_passes_its_options_on_and_prints_the_figures(run, run_json, monkeypatch):
    calls = []

    def run_demo(console, **options):
        calls.append(options)
        console.print("shown while it runs")
        return {"same_text": True, "speedup": 1.5, "stats": {"rate": float("inf")}}

    module = types.ModuleType("hf_specdec.demo.run")
    module.run_demo = run_demo
    monkeypatch.setitem(sys.modules, "hf_specdec.demo.run", module)
    assert "shown while it runs" in run("demo", "--max-new-tokens", 8).stdout
    assert run_json("demo") == {"same_text": True, "speedup": 1.5, "stats": {"rate": None}}
    assert calls == [{"max_new_tokens": 8, "as_json": False}, {"max_new_tokens": 96, "as_json": True}]
