"""Which functions of a compiled module use AVX."""

import re
import subprocess
from types import ModuleType


def functions_with_avx(module: ModuleType, kernels: str) -> tuple[set[str], set[str]]:
    """Return the functions with an AVX instruction: those whose name matches `kernels`, and all others."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", module.__file__], capture_output=True, text=True, check=True
    ).stdout
    function, expected, others = "", set(), set()
    for line in listing.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            function = header[1]
        elif re.search(r"\t\s*v[a-z0-9]+\s|%[yz]mm|%k[0-7]", line):
            (expected if re.search(kernels, function) else others).add(function)
    return expected, others
