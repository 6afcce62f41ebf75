"""The public surface: what is exported, documented and typed, and what importing it costs."""

import inspect
import subprocess
import sys

import pytest

import hf_specdec


MAX_LINES = 400
LATE = (
    "bitsandbytes",
    "datasets",
    "matplotlib",
    "typer",
    "hf_specdec.training",
    "hf_specdec.hub",
    "hf_specdec.bench",
)


def test_all_is_sorted_and_exists():
    assert list(hf_specdec.__all__) == sorted(hf_specdec.__all__)
    assert len(set(hf_specdec.__all__)) == len(hf_specdec.__all__)
    assert [name for name in hf_specdec.__all__ if not hasattr(hf_specdec, name)] == []


def test_the_documented_names_are_public():
    names = """AdditiveLength ConfidenceLength ConstantLength EASDConfig EASDLogitsProcessor ExactConfig
    SpeculativeConfig SpeculativeGenerationMixin SpeculativeStats generate install uninstall verify_lossless"""
    assert set(names.split()) <= set(hf_specdec.__all__)


@pytest.mark.parametrize("name", sorted(hf_specdec.__all__))
def test_every_public_name_has_a_docstring(name):
    value = getattr(hf_specdec, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        pytest.skip(f"{name} is neither a class nor a function")
    # A dataclass without a docstring is given one that repeats its signature.
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", sorted(hf_specdec.__all__))
def test_every_public_method_has_a_docstring(name):
    value = getattr(hf_specdec, name)
    if not inspect.isclass(value):
        return
    members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
    undocumented = [
        key
        for key, member in members.items()
        if (inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod))
        and not inspect.getdoc(getattr(value, key))
    ]
    assert undocumented == []


def test_the_package_is_typed(repo):
    assert (repo / "hf_specdec" / "py.typed").is_file()


def test_importing_loads_nothing_that_is_used_elsewhere():
    code = f"import sys, hf_specdec; print([name for name in {LATE!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_files_are_small(repo):
    sizes = {
        str(file.relative_to(repo)): len(file.read_text().splitlines())
        for file in repo.glob("hf_specdec/**/*.py")
    }
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_versions_agree(repo):
    from importlib.metadata import version

    assert f"\nversion: {version('hf_specdec')}\n" in (repo / "CITATION.cff").read_text()
    assert f"## {version('hf_specdec')}" in (repo / "docs" / "changelog.md").read_text()
