"""Tests marked `own_process` run in a child of the process that runs the others, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
from _pytest.runner import runtestprotocol


__all__ = ["run"]

_FORK = multiprocessing.get_context("fork")


def run(item: pytest.Item) -> None:
    """Runs the test in a child and reports here what it reports there."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_run, args=(item, theirs))
    child.start()
    theirs.close()
    try:
        reports = [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=each) for each in ours.recv()
        ]
    except EOFError:
        child.join()
        reports = [_death(item, child.exitcode)]
    child.join()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run(item: pytest.Item, parent: Connection) -> None:
    # without a next item all fixtures would be torn down, also those that the parent goes on with
    reports = runtestprotocol(item, nextitem=item, log=False)
    serialize = item.config.hook.pytest_report_to_serializable
    parent.send([serialize(config=item.config, report=each) for each in reports])
    parent.close()
    os._exit(0)


def _death(item: pytest.Item, code: Any) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", f"its process ended with {code}", "call"
    )
