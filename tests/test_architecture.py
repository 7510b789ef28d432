"""The layers of `lightning_cxl/README.md`: a module imports from its own layer or below, hardware from three seams."""

import ast
import functools
import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from lightning_cxl import torch_private

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cxl"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "config": 0, "errors": 0, "units": 0, "cache": 0,
    "tiers": 1,
    "devices": 2, "memory": 2, "torch_private": 2,
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


# kept by torch, and used by everybody; see lightning_cxl/torch_private.py
KEPT_PRIVATE = {"_version", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


@functools.cache
def private_names_of_torch() -> frozenset[str]:
    """Return what torch's own objects have under names with one leading underscore."""
    parameter, modules = torch.nn.Parameter(torch.ones(1)), ("optim.optimizer", "utils._pytree", "_C")
    objects = (
        *(torch, *(importlib.import_module(f"torch.{name}") for name in modules)),
        *(parameter, parameter.untyped_storage(), torch.nn.Linear(1, 1), torch.ops.aten.empty.memory_format),
        *(torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu"), torch.autograd.Variable),
    )
    names = {name for each in objects for name in dir(each)} | {"_opt_called", "_wrapped_by_lr_sched", "_orig_mod"}
    return frozenset(name for name in names if is_private(name)) - KEPT_PRIVATE


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def uses_of_private_torch(code: str, known: frozenset[str]) -> list[str]:
    """Return what a module takes from torch under private names: by import, attribute, or name in a string."""
    tree = ast.parse(code)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_set_on_self(node)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            if path.startswith("torch.") or (node.attr in known and node.attr not in own):
                found.append(path)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known - own:
            found.append(node.value)
    return [path for path in found if any(map(is_private, path.split(".")))]


def is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "torch_private.py"], ids=lambda p: p.name)
def test_private_names_of_torch_are_in_one_module(path):
    assert not uses_of_private_torch(path.read_text(), private_names_of_torch()), "gather them in torch_private.py"


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.optim.optimizer import _global_optimizer_pre_hooks",
        "import torch._dynamo",
        "torch._foreach_add_(a, b)",
        "storage._cdata",
        "getattr(parameter, '_post_accumulate_grad_hooks')",
        "optimizer._opt_called = True",
    ],
)
def test_a_private_name_of_torch_is_found(code):
    assert uses_of_private_torch(code, private_names_of_torch())


def test_versions_of_torch_are_declared_as_tested():
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    (oldest, newest) = torch_private.OLDEST, torch_private.NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in requirements
