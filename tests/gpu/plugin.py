"""A pytest plugin for machines as they are: notes every test that has ended, and does without pytest-timeout.

Processes of pytest-xdist get CPUs of their own: each would run kernels on all of them.
"""

import importlib.util
import json
import os

LOG = os.environ.get("LIGHTNING_CXL_TEST_LOG", os.devnull)
TAIL_CHARS = 2000
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

if WORKER:
    cpus = sorted(os.sched_getaffinity(0))
    each = max(1, len(cpus) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    first = int(WORKER.removeprefix("gw")) * each % len(cpus)
    os.sched_setaffinity(0, cpus[first : first + each])


def pytest_addoption(parser):
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "what pytest-timeout would read")


def pytest_collectreport(report):
    if report.failed:
        _note(report.nodeid, "failed", 0.0, report.longreprtext)


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _note(f"{report.nodeid} ({report.when})", report.outcome, report.duration, reason)


def _note(test, state, seconds, text):
    if not WORKER:  # the process that gave it the test notes it
        with open(LOG, "a") as log:
            line = {"test": test, "state": state, "seconds": round(seconds, 3), "error": text[-TAIL_CHARS:]}
            log.write(json.dumps(line) + "\n")
