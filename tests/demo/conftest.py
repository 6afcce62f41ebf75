"""Shared by the demonstration's tests."""

import json

import pytest


@pytest.fixture
def corpus_file(tmp_path):
    """Ninety small documents, some of which are held out."""
    file = tmp_path / "docs.jsonl"
    text = "The list is a sequence of objects, and a tuple is one that does not change. " * 4
    file.write_text(
        "".join(json.dumps({"id": f"page{number}", "text": text + str(number)}) + "\n" for number in range(90))
    )
    return file
