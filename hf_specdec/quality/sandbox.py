"""Running a program that a model wrote: in a process of its own, with limits, and killed as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hf_specdec.errors import InvalidConfigError


__all__ = ["Outcome", "run_program"]

Outcome = Literal["passed", "failed", "timeout"]

_PASSED, _FAILED, _UNPREPARED = 73, 74, 75

# Runs in the child: limits first, then the program, and statuses that no ordinary exit has. What the hook refuses is meant for
# accidents of a model, not for an attacker.
_PRELUDE = f"""
import os, sys
try:
    import resource
    path, seconds, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, folder = open(path, encoding="utf-8").read(), os.getcwd()
except BaseException:
    os._exit({_UNPREPARED})
refused = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.",
           "ctypes.", "os.kill")
changing = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
            "shutil.")
moving = ("os.rename", "os.link", "os.symlink")

def hook(event, arguments):
    if event.startswith(refused):
        raise PermissionError(event + " is not allowed here")
    if event.startswith(changing) or (event == "open" and writes(arguments)):
        for place in arguments[: 2 if event.startswith(moving) else 1]:
            if isinstance(place, int) or not (os.path.realpath(os.fsdecode(place)) + os.sep).startswith(folder + os.sep):
                raise PermissionError(event + " outside of the temporary folder")

def writes(arguments):
    mode, flags = arguments[1], arguments[2]
    return any(each in (mode or "") for each in "wax+") or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))

try:
    sys.argv = [path]
    sys.addaudithook(hook)
    exec(compile(source, path, "exec"), {{"__name__": "__main__"}})
except BaseException:
    os._exit({_FAILED})
os._exit({_PASSED})
"""


def run_program(source: str, *, max_seconds: int = 10, max_megabytes: int = 1024) -> Outcome:
    """Whether a Python program runs to its end without an exception.

    It runs in an isolated interpreter and an empty temporary folder, with bounded memory, CPU time and file size, and may
    neither open sockets, start processes, nor change files elsewhere. Its whole process group is killed at the end.

    Args:
        source (`str`): The program.
        max_seconds (`int`): Longest run, on the clock and of the processor.
        max_megabytes (`int`): Most address space.

    Returns:
        `"passed"`, `"timeout"` (of the clock or of the processor), or `"failed"`: an exception, an exit of its own, or
        another limit.

    Raises:
        [`InvalidConfigError`]: If a limit is below 1, or cannot be set here.
    """
    if max_seconds < 1 or max_megabytes < 1:
        raise InvalidConfigError(f"limits must be at least 1, got {max_seconds} s and {max_megabytes} MB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(source, encoding="utf-8")
        command = [sys.executable, "-I", "-B", "-c", _PRELUDE, str(path), str(max_seconds), str(max_megabytes)]
        process = subprocess.Popen(
            command, cwd=folder, env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=max_seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _kill_group(process)
    if status == _UNPREPARED:
        raise InvalidConfigError(
            f"the sandbox cannot start: its limits ({max_seconds} s, {max_megabytes} MB) are refused or too small, or this "
            "system has none"
        )
    if status == -signal.SIGXCPU:
        return "timeout"
    return "passed" if status == _PASSED else "failed"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it has ended and left nothing behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
