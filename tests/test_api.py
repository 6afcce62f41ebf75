"""The public surface: what is exported, documented and typed, and what importing it costs."""

import inspect
import subprocess
import sys
import tomllib
from types import FunctionType

import pytest

import hf_specdec
from hf_specdec import records


PUBLIC = sorted(hf_specdec.__all__)
MAX_LINES = 400
LATE = (
    "bitsandbytes",
    "datasets",
    "matplotlib",
    "typer",
    "hf_specdec.training",
    "hf_specdec.hub",
    "hf_specdec.bench",
    "hf_specdec.quality",
)


def test_all_is_sorted_and_exists():
    assert list(hf_specdec.__all__) == sorted(hf_specdec.__all__)
    assert len(set(hf_specdec.__all__)) == len(hf_specdec.__all__)
    assert [name for name in hf_specdec.__all__ if not hasattr(hf_specdec, name)] == []


def test_the_documented_names_are_public():
    names = """AdditiveLength ConfidenceLength ConstantLength EASDConfig EASDLogitsProcessor ExactConfig
    SpeculativeConfig SpeculativeGenerationMixin SpeculativeStats generate install uninstall verify_lossless"""
    assert set(names.split()) <= set(hf_specdec.__all__)


@pytest.mark.parametrize("name", [name for name in PUBLIC if callable(getattr(hf_specdec, name))])
def test_every_public_class_and_function_has_a_docstring(name):
    docstring = getattr(hf_specdec, name).__doc__
    assert docstring
    assert not docstring.startswith(f"{name}("), (
        "a dataclass without a docstring is given one that repeats its signature"
    )


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(hf_specdec, name))])
def test_every_public_method_has_a_docstring(name):
    """What a protocol of the records documents need not be documented again by each class that follows it."""
    protocols = (records.AcceptanceRule, records.Drafter, records.LengthController, records.LengthSchedule)
    explained = {key for each in protocols for key, member in vars(each).items() if inspect.getdoc(member)}
    cls = getattr(hf_specdec, name)
    kinds = (FunctionType, property, classmethod, staticmethod)
    own = {key for key, member in vars(cls).items() if isinstance(member, kinds) and not key.startswith("_")}
    assert {key for key in own - explained if not inspect.getdoc(getattr(cls, key))} == set()


def test_the_package_is_typed(repo):
    assert (repo / "hf_specdec" / "py.typed").is_file()


def test_importing_loads_nothing_that_is_used_elsewhere():
    code = f"import sys, hf_specdec; print([name for name in {LATE!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_files_are_small(repo):
    sizes = {
        str(file.relative_to(repo)): len(file.read_text().splitlines()) for file in repo.glob("hf_specdec/**/*.py")
    }
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_versions_agree(repo):
    version = hf_specdec.__version__
    assert tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"] == version
    assert f"\nversion: {version}\n" in (repo / "docs" / "CITATION.cff").read_text()
    assert f"\n## {version}" in (repo / "docs" / "changelog.md").read_text()
