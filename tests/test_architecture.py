"""The layers of `lightning_cxl/README.md`: a module imports from its own layer or below, hardware from three seams."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cxl"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "config": 0, "errors": 0, "units": 0, "cache": 0,
    "tiers": 1,
    "devices": 2, "memory": 2,
    "transfer": 3, "storage": 3,
    "streaming": 4, "optim": 4,
    "placements": 5, "placed_memory": 5, "residence": 5, "updates": 5, "runtime": 5, "checkpoint": 5, "planner": 5,
    "weights": 5, "policies": 5,
    "_lightning": 6, "checkpoint_io": 6, "precision": 6, "one_process": 6, "strategy": 6, "callbacks": 6, "cli": 6,
    "finetune": 6, "bench": 6, "calibrate": 6, "hf": 6, "plan": 6,
    "__init__": 6, "__main__": 6,
}  # fmt: skip
COMPILED = {
    "_numa": ("memory",),
    "_adam": ("optim",),
    "_grads": ("optim",),
    "_cpu": ("optim", "planner", "bench", "calibrate"),
    "_membench": ("bench", "calibrate"),
}
# third-party packages a layer may import
OUTSIDE = {0: (), 1: (), 2: ("torch",), 3: ("torch",), 4: ("torch",), 5: ("torch",)}
MAX_LINES = 350


def part_of(path: Path) -> str:
    """Return the first component below the package: the folder or module that a layer is assigned to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_names(path: Path) -> list[str]:
    """Return the absolute dotted names a module imports anywhere, also inside functions and TYPE_CHECKING."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_no_layer_above(path):
    own = part_of(path)
    layer = LAYERS[own]
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] == "lightning_cxl":
            other = parts[1] if len(parts) > 1 and parts[1] in {*LAYERS, *COMPILED} else "__init__"
            if other in COMPILED:
                assert own in COMPILED[other], f"{name} is for {COMPILED[other]} only"
            elif other != own:
                assert LAYERS[other] <= layer, f"{path.name} (layer {layer}) imports {name} (layer {LAYERS[other]})"
                assert {own, other} != {"streaming", "optim"}, "they meet in runtime"
        elif layer in OUTSIDE and not is_standard_library(parts[0]):
            allowed = OUTSIDE[layer] + (("psutil", "yaml", "lightning_cxl") if own == "planner" else ())
            assert parts[0] in allowed, f"{path.name} (layer {layer}) imports {name}"


def is_standard_library(name: str) -> bool:
    return name in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_hardware_and_lightning_only_at_their_seams(path):
    relative = str(path.relative_to(PACKAGE))
    text = path.read_text()
    if relative not in ("devices/cuda.py", "planner/environment.py"):
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        assert "torch.cuda" not in strip_docstrings(code), "torch.cuda belongs in devices/cuda.py"
    if relative != "_lightning.py":
        for name in imported_names(path):
            assert name.split(".")[0] not in ("lightning", "pytorch_lightning", "lightning_fabric"), (
                "import through _lightning.py"
            )


def strip_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                first.value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "cython_ext").glob("*.pyx"))], ids=lambda p: p.name)
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_every_module_has_a_layer():
    assert {part_of(path) for path in MODULES} == set(LAYERS)
