"""What a user sees when something goes wrong: one line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from hf_specdec.errors import SpeculativeError


__all__ = ["CommandError", "reports_errors"]

EXIT_CODE = 2


class CommandError(Exception):
    """An error of the command line itself, with a message for the user."""


def reports_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns expected errors of a command into one line on standard error; `--debug` lets them through."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (CommandError, SpeculativeError, OSError) as error:
            if kwargs.get("debug") or isinstance(error, BrokenPipeError):
                raise
            typer.secho(f"Error: {_one_line(error)}", fg="red", err=True)
            raise typer.Exit(EXIT_CODE) from None

    return guarded


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
