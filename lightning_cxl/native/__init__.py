"""The compiled modules: kernels, pages of memory nodes, features of the CPU. Their sources are in `cython_ext/`."""

from importlib.util import find_spec
from pathlib import Path

if find_spec("lightning_cxl.native._numa") is None:
    raise ImportError(
        f"{Path(__file__).parents[1]} is source code without its compiled modules. Python finds it before an installed "
        "lightning_cxl where it is in the current folder (or in PYTHONPATH): run the command `lightning-cxl` in the "
        "place of `python -m lightning_cxl`, or start Python in another folder. Or compile it where it is: "
        "pip install -e ."
    )
