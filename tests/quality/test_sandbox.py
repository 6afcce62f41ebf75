"""Programs in the sandbox: limits hold, nothing gets out, and nothing is left behind."""

import os
import time

import pytest

from hf_specdec import InvalidConfigError
from hf_specdec.quality import Problem, judge_code, read_problems, run_program
from hf_specdec.quality.humaneval import code_prompt, program_of
from hf_specdec.quality.sandbox import _PRELUDE


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("assert 1 + 1 == 2", "passed"),
        ("assert 1 + 1 == 3", "failed"),
        ("def f(:", "failed"),
        ("raise SystemExit(0)", "failed"),  # an early way out is no pass
        ("import os\nos._exit(0)", "failed"),
        ("import os\nos._exit(1)", "failed"),
        ("x = bytearray(1 << 30)", "failed"),
        ("import socket\nsocket.socket().connect(('127.0.0.1', 9))", "failed"),
        ("import subprocess\nsubprocess.run(['true'])", "failed"),
        ("import os\nos.system('true')", "failed"),
        ("import os\nos.fork()", "failed"),
        ("open('here.txt', 'w').write('x')\nassert open('here.txt').read() == 'x'", "passed"),
        ("import collections, math, re, itertools, heapq, random, functools, typing, hashlib", "passed"),
        ("import tempfile\ntempfile.TemporaryFile().write(b'x')", "passed"),
        ("if __name__ == '__main__':\n    raise ValueError", "failed"),
    ],
)
def test_outcomes(source, outcome):
    assert run_program(source, max_seconds=20, max_megabytes=512) == outcome


def test_files_elsewhere_are_safe(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for action in (
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.open({str(kept)!r}, os.O_WRONLY | os.O_TRUNC)",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import os; open('x', 'w').close(); os.replace('x', {str(kept)!r})",
        f"import os; open('x', 'w').close(); os.link('x', {str(tmp_path / 'new')!r})",
        f"import os; os.symlink('x', {str(tmp_path / 'new')!r})",
    ):
        assert run_program(action, max_seconds=20) == "failed"
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [kept]
    assert run_program("import os; open('x', 'w').close(); os.rename('x', 'y'); os.symlink('y', 'z')") == "passed"


def test_a_loop_ends_at_the_time_limit_and_nothing_is_left():
    before = time.monotonic()
    assert run_program("import time\nwhile True: time.sleep(1)", max_seconds=1) == "timeout"
    assert time.monotonic() - before < 15
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_limit_of_the_processor_is_a_timeout_too():
    assert run_program("import signal; signal.raise_signal(signal.SIGXCPU)", max_seconds=20) == "timeout"


def test_limits_of_nothing_are_refused():
    with pytest.raises(InvalidConfigError, match="at least 1"):
        run_program("", max_seconds=0)


def test_a_sandbox_that_cannot_be_set_up_is_no_failed_program(monkeypatch):
    monkeypatch.setattr(
        "hf_specdec.quality.sandbox._PRELUDE", _PRELUDE.replace("RLIMIT_AS", "RLIMIT_OF_ANOTHER_SYSTEM")
    )
    with pytest.raises(InvalidConfigError, match="cannot start"):
        run_program("")


# --- answers --------------------------------------------------------------------------------------------------------

PROBLEM = Problem(
    0,
    'import math\n\ndef double(x):\n    """Twice x.\n    >>> double(2)\n    4\n    """\n',
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0.5) == 1\n",
    "double",
)


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("    return 2 * x\n", True),
        ("    return 2 * x\n\ndef other():\n    syntax error here", True),
        ("    return 2 * x\n\nprint(double(undefined))", True),
        ("    return 3 * x\n", False),
        ("Here it is:\n```python\ndef double(x):\n    return math.ceil(x) + x if x == 2 else 2 * x\n```\nDone.", True),
        ("```python\ndef double(x):\n    return 1\n```\nBetter:\n```\ndef double(x):\n    return x + x\n```", True),
        ("```python\ndef double(x):\n    return x + x\n```\n```python\nprint(double(1))\n```", True),
        ("```python\ndef double(x):\n    return x + x", True),  # cut off after the function
        ("```python\ndef wrong(x):\n    return x + x\n```", False),
        ("", False),
    ],
)  # fmt: skip
def test_the_function_of_an_answer_is_found_and_tested(text, correct):
    found = judge_code(PROBLEM, text, max_seconds=20)
    assert (found.correct, found.answer) == (correct, "passed" if correct else "failed")


def test_a_program_keeps_the_imports_before_the_function():
    program = program_of("```python\ndef double(x):\n    return x\n```", PROBLEM)
    assert program.startswith("import math")
    assert program.count("def double") == 1
    assert code_prompt(PROBLEM, instructed=False) == PROBLEM.text
    assert PROBLEM.text in code_prompt(PROBLEM)


def test_problems_are_read_and_lines_of_another_form_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "test": "b", "entry_point": "c"}\n\n{"prompt": "d", "test": 1, "entry_point": "e"}\n'
    )
    assert read_problems(path, 1) == [Problem(0, "a", "b", "c")]
    with pytest.raises(InvalidConfigError, match="line 2"):
        read_problems(path)
    path.write_text("")
    with pytest.raises(InvalidConfigError, match="no problem"):
        read_problems(path)
