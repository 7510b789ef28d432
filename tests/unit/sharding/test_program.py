"""How a program ends, as the watch of its ranks hears it: each case is a process of its own."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.on_cpu
BEGIN = """
import sys, threading
from multiprocessing.util import Finalize
from lightning_cxl.sharding.program import _Program

class Heard:
    def tell(self, error):
        print("told", repr(error), *error.__notes__)
    def close(self):
        print("closed")

program = _Program(Heard())
sys.excepthook, sys.exit = program.fail, program.exit
Finalize(None, program.end, exitpriority=0)

def main(status):
    sys.exit(status)

def caught(status):
    try:
        main(status)
    except SystemExit:
        pass
"""


def heard(body: str) -> tuple[int, str]:
    code = textwrap.dedent(BEGIN) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


FAILED = {
    "at the end": ("main(3)", 3, "told SystemExit(3)"),
    "a message": ("main('no data')", 1, "told SystemExit('no data')"),
    "no message": ("main('')", 1, "told SystemExit('')"),
    "on its way something is done": ("try:\n    main(3)\nfinally:\n    print('done')", 3, "told SystemExit(3)"),
    "raised again": ("try:\n    main(3)\nexcept SystemExit:\n    raise", 3, "told SystemExit(3)"),
}
DONE = {
    "at the end": ("main(0)", 0),
    "without a status": ("sys.exit()", 0),
    "regularly": ("", 0),
    "what was caught": ("caught(3)", 0),
    "what was caught first": ("caught(3)\nmain(0)", 0),
    "a thread": ("each = threading.Thread(target=main, args=[3]); each.start(); each.join(); raise SystemExit", 0),
}


@pytest.mark.parametrize(("body", "code", "expected"), FAILED.values(), ids=FAILED)
def test_a_status_is_told(body, code, expected):
    found, said = heard(body)
    assert found == code
    assert expected in said and "`sys.exit` was called in <string>, line " in said and "closed" not in said


@pytest.mark.parametrize(("body", "code"), DONE.values(), ids=DONE)
def test_what_is_no_failure_is_the_end(body, code):
    assert heard(body) == (code, "closed\n")
