"""Files of lines that a killed run may have left half a line in."""

import pytest

from hf_specdec.files import mended_lines, whole_lines, write_at_once


@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", []), (b"a\n", ["a"]), (b"a", []), ("ä\nb\n".encode(), ["ä", "b"]), ("ä\nö".encode()[:-1], ["ä"])],
)
def test_half_a_line_is_left_out_and_mended_away(tmp_path, content, lines):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    assert whole_lines(path) == lines
    assert path.read_bytes() == content
    assert mended_lines(path) == lines
    assert path.read_text(encoding="utf-8") == "".join(line + "\n" for line in lines)


def test_no_file_has_no_lines(tmp_path):
    assert whole_lines(tmp_path / "none") == mended_lines(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_file_and_its_folder_appear_whole(tmp_path):
    write_at_once(tmp_path / "folder" / "a.txt", b"content")
    assert [(each.name, each.read_bytes()) for each in (tmp_path / "folder").iterdir()] == [("a.txt", b"content")]
