"""The tables of `_compat` against the transformers release that is installed."""

import re
from pathlib import Path

import pytest
import transformers
from transformers.generation import logits_process, stopping_criteria

from hf_specdec import UnsupportedModelError, _compat
from hf_specdec.generation import check_model


def _classes():
    """Every class of the modelling files: its bases, and whether it defines `generate`."""
    found = {}
    for path in Path(transformers.__file__).parent.glob("models/*/*.py"):
        if path.name.startswith(("modeling_", "generation_")):
            pieces = re.split(r"^class (\w+)\(([^)]*)\):", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
            for name, bases, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
                found[name] = ([base.strip() for base in bases.split(",")], "\n    def generate(" in body)
    return found


def _ancestors(name, classes):
    yield name
    for base in classes.get(name, ([], False))[0]:
        yield from _ancestors(base, classes)


def test_every_class_with_its_own_generate_is_classified():
    classes = _classes()
    assert len(classes) > 1000
    own = set()
    for name in classes:
        lineage = list(_ancestors(name, classes))
        if "GenerationMixin" in lineage and any(classes.get(each, ([], False))[1] for each in lineage):
            own.add(name)
    own = {name for name in own if not name.endswith("Mixin")}
    assert len(own) >= 20
    assert own <= _compat.OWN_GENERATE_CLASSES | _compat.DELEGATING_CLASSES
    assert not _compat.OWN_GENERATE_CLASSES & _compat.DELEGATING_CLASSES


def test_such_a_class_is_refused_by_name():
    class WhisperForConditionalGeneration:
        pass

    with pytest.raises(UnsupportedModelError, match="WhisperForConditionalGeneration brings its own"):
        check_model(WhisperForConditionalGeneration())


def test_known_parts_exist_and_keep_no_state():
    assert len(_compat.POSITION_FREE_PROCESSORS) >= 10
    assert _compat.POSITION_FREE_PROCESSORS < _compat.ROW_INDEPENDENT_PROCESSORS
    assert len(_compat.ROW_INDEPENDENT_CRITERIA) == 4
    # these look at the batch, keep state, or run a model of their own
    for name in (
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
    ):
        assert getattr(logits_process, name) not in _compat.ROW_INDEPENDENT_PROCESSORS
    assert stopping_criteria.ConfidenceCriteria not in _compat.ROW_INDEPENDENT_CRITERIA
