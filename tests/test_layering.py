"""Modules import only what stands below them, and a few never meet."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = "hf_specdec"
PUBLIC = "__init__"  # the package itself, as in `from hf_specdec import ExactConfig`
ORDER = [
    *"errors files _compat compatibility placement readback timing linear huge_pages records".split(),
    *"laws trees warping sequences live_rows cache_view".split(),
    *"prepared_layers layer_gate readout cache_rows cropping prefix_lm layered_lm".split(),
    *"tree_lm features verify tree_walk acceptance lengths networks drafters run loop stats configs".split(),
    *"easd_processor teacher_forcing calibration nucleus_calibration outputs".split(),
    *"reduced_head loading self_drafting drafting generation hook".split(),
    *"losslessness csd_calibration rendering trace".split(),
    PUBLIC,
    *"training bench cospec hub quality cli".split(),
]
RANK = {name: rank for rank, name in enumerate(ORDER)} | {"demo": ORDER.index("bench")}
FORBIDDEN = {  # although they stand below
    **{name: {"acceptance", "lengths", "networks", "drafters"} for name in ("run", "loop")},
    "drafters": {"acceptance", "lengths"},
    "lengths": {"acceptance"},
}


def imported_parts(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """The parts of the package that `tree`, a module of the (sub)package `package`, imports, at the top or anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            paths = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for path in paths:
            if path[0] == PACKAGE:
                yield path[1] if len(path) > 1 and path[1] in RANK else PUBLIC


def violations(root: Path) -> list[str]:
    """One line for each import in the package at `root` that breaks the order or a prohibition."""
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name, importer = file.relative_to(root), parts[0]
        if importer not in RANK:
            found.append(f"{name}: `{importer}` has no place in the import order")
            continue
        for part in imported_parts(ast.parse(file.read_text()), [PACKAGE, *parts[:-1]]):
            if part != importer and (RANK[part] >= RANK[importer] or part in FORBIDDEN.get(importer, ())):
                found.append(f"{name}: imports {part}")
    return found


def test_every_import_points_down(repo):
    assert violations(repo / PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("laws.py", "from hf_specdec.verify import draw"),
        ("laws.py", "from .verify import draw"),
        ("laws.py", "import hf_specdec.cli"),
        ("verify.py", "from hf_specdec import ExactConfig"),
        ("verify.py", "def late():\n    from . import loop"),
        ("loop.py", "from hf_specdec.drafters import prompt_lookup"),
        ("loop.py", "from hf_specdec.acceptance.exact import Exact"),
        ("drafters/hybrid.py", "from ..lengths import constant"),
        ("drafters/hybrid.py", "from hf_specdec.acceptance.exact import Exact"),
        ("lengths/goodput.py", "from ..acceptance import exact"),
        ("acceptance/easd.py", "from ..lengths import constant"),
        ("demo/show.py", "from hf_specdec.bench import runner"),
        ("__init__.py", "from .bench import run"),
        ("__init__.py", "import hf_specdec.training.trainers"),
        ("__init__.py", "from .cli import main"),
        ("novelty.py", "import torch"),
    ],
)
def test_a_violation_is_found(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("verify.py", "from .laws import residual\nimport torch"),
        ("loop.py", "from hf_specdec import records\nfrom hf_specdec.verify import verify"),
        ("drafters/hybrid.py", "from .prompt_lookup import PromptLookup\nfrom ..records import Draft"),
        ("__init__.py", "from .generation import generate\nfrom .configs import ExactConfig"),
        ("bench/runner.py", "from hf_specdec import ExactConfig\nfrom hf_specdec.loop import speculate"),
    ],
)
def test_an_import_that_points_down_is_allowed(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert violations(tmp_path) == []
