"""A pytest plugin for machines as they are: notes every test that has ended, and does without pytest-timeout."""

import importlib.util
import json
import os

LOG = os.environ.get("LIGHTNING_CXL_TEST_LOG", os.devnull)
TAIL_CHARS = 2000


def pytest_addoption(parser):
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "what pytest-timeout would read")


def pytest_collectreport(report):
    if report.failed:
        _note(report.nodeid, "failed", 0.0, report.longreprtext)


def pytest_runtest_logreport(report):
    if report.failed:
        _note(f"{report.nodeid} ({report.when})", "failed", report.duration, report.longreprtext)
    elif report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _note(report.nodeid, "skipped", report.duration, text)
    elif report.when == "call":
        _note(report.nodeid, "passed", report.duration, "")


def _note(test, state, seconds, text):
    with open(LOG, "a") as log:
        line = {"test": test, "state": state, "seconds": round(seconds, 3), "error": text[-TAIL_CHARS:]}
        log.write(json.dumps(line) + "\n")
