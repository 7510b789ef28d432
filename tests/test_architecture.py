"""What `lightning_cxl/README.md` promises: folders import in one direction, hardware and Lightning at their seams."""

import ast
import functools
import importlib
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lightning_cxl import torch_private

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cxl"
MODULES = sorted(PACKAGE.rglob("*.py"))

COMPILED = {
    "_numa": ("memory", "storage"),
    "_adam": ("optim",),
    "_grads": ("optim", "gradients"),
    "_cpu": ("optim", "machine", "commands"),
    "_membench": ("commands",),
}
# third-party packages that what a training run uses may import; the others are front ends and commands
OUTSIDE = {
    "errors": (), "config": (), "storage": ("xxhash",), "text": ("rich",),
    "torch_private": ("torch",), "timing": ("torch",),
    "weights": ("torch", "safetensors", "transformers", "huggingface_hub", "bitsandbytes", "peft"),
    "machine": ("torch", "yaml"), "placement": (), "devices": ("torch",), "memory": ("torch",),
    "streaming": ("torch",), "optim": ("torch",), "gradients": ("torch",),
    "inventory": ("torch",), "planning": ("torch",), "run": ("torch",), "sequences": ("torch", "transformers"),
    "sharding": ("torch",), "shards": ("torch",),
}  # fmt: skip
MAX_LINES = 1000


def folder_of(path):
    """Return the folder below the package, or the name of a module that lies in none."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) or parts[0]


@functools.cache
def imported_names(path):
    """Return the absolute dotted names a module imports anywhere, also inside functions and TYPE_CHECKING."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_of(path):
    """Return the dotted name of a module in the package; that of a folder for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


def module_named(name):
    """Return the module that an absolute name in the package is, or is something in."""
    parts = name.split(".")[1:]
    while parts and not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").exists()):
        parts.pop()
    return ".".join(parts) or "__init__"


def home_of(name):
    """Return the folder of what an absolute name in the package names: a module, or something in one."""
    module = module_named(name)
    path = PACKAGE.joinpath(*module.split("."))
    return module if path.is_dir() else folder_of(path.with_suffix(".py"))


def arrows(of, to):
    """Return which folder, or module, imports which."""
    found: dict[str, set[str]] = {of(path): set() for path in MODULES}
    for path in MODULES:
        for name in imported_names(path):
            parts = name.split(".")
            if parts[0] == "lightning_cxl":
                found[of(path)].add(to(name))
    for own, others in found.items():
        others.discard(own)
    return found


def circle(graph):
    """Return the nodes of one circle in their order, nothing where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize(("of", "to"), [(folder_of, home_of), (module_of, module_named)], ids=["folders", "modules"])
def test_imports_go_in_one_direction(of, to):
    found = circle(arrows(of, to))
    assert not found, " imports ".join(found)


def test_forward_and_update_do_not_know_each_other():
    graph = arrows(folder_of, home_of)
    assert not {"optim", "gradients"} & reached("streaming", graph) and "streaming" not in reached("optim", graph)
    of_gradients = reached("gradients.offload", arrows(module_of, module_named))
    assert not [each for each in of_gradients if each.startswith("streaming")]


def reached(start, graph):
    """Return what a folder imports, and what that imports in turn."""
    found, new = set(), {start}
    while new:
        found |= new
        new = set().union(*(graph.get(each, set()) for each in new)) - found
    return found - {start}


def test_compiled_modules_and_packages_only_where_they_belong():
    for path in MODULES:
        top = folder_of(path).partition(".")[0]
        for name in imported_names(path):
            first = name.partition(".")[0]
            if name.startswith("lightning_cxl.native."):
                compiled = name.split(".")[2]
                assert top in COMPILED[compiled], f"{path}: {name} is for {COMPILED[compiled]} only"
            elif top in OUTSIDE and first != "lightning_cxl" and first not in sys.stdlib_module_names:
                assert first in OUTSIDE[top], f"{path} imports {name}"


def test_cuda_and_frameworks_only_at_their_seams():
    for path in MODULES:
        names, packages = imported_names(path), {name.split(".")[0] for name in imported_names(path)}
        uses = {
            "devices.py": "torch.cuda" in strip_docstrings(path.read_text()),
            "integrations/lightning.py": bool(packages & {"lightning", "pytorch_lightning", "lightning_fabric"}),
            "integrations/accelerate.py": "accelerate" in packages,
            "integrations/transformers.py": any(name.startswith("transformers.Trainer") for name in names),
        }
        uses.pop(str(path.relative_to(PACKAGE)), None)
        assert not any(uses.values()), f"{path}: what it uses is for {[seam for seam in uses if uses[seam]]}"


ACCELERATOR = ("devices.py", "commands/env.py")
ENGINE = "devices.py"
STREAM_METHODS = {"current_stream", "set_stream", "wait_stream", "wait_event", "record_event", "record_stream"}


def uses_of_streams(code):
    """Return where a module makes streams or events of torch, or asks for streams."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [alias.name for alias in node.names if alias.name in ("Stream", "Event")]
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path in ("torch.Stream", "torch.Event") or node.attr in STREAM_METHODS:
                found.append(path)
    return found


def test_the_accelerator_its_streams_and_events_only_at_their_seams():
    for path in MODULES:
        relative, code = str(path.relative_to(PACKAGE)), path.read_text()
        if relative not in ACCELERATOR:
            found = re.search(r"\btorch\.accelerator\b", strip_docstrings(code))
            assert not found, f"{path}: torch.accelerator is for {ACCELERATOR}"
        assert bool(uses_of_streams(code)) == (relative == ENGINE), f"{path}: {uses_of_streams(code)} is for {ENGINE}"


@functools.cache
def strip_docstrings(code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0].value.value = ""
    return ast.unparse(tree)


def test_files_stay_small():
    lines = {path: len(path.read_text().splitlines()) for path in (*MODULES, *(ROOT / "cython_ext").glob("*.pyx"))}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


# kept by torch, and used by everybody; see lightning_cxl/torch_private.py
KEPT_PRIVATE = {"_version", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


@functools.cache
def private_names_of_torch():
    """Return what torch's own objects have under names with one leading underscore."""
    parameter, modules = torch.nn.Parameter(torch.ones(1)), ("optim.optimizer", "utils._pytree", "_C")
    objects = (
        *(torch, *(importlib.import_module(f"torch.{name}") for name in modules)),
        *(parameter, parameter.untyped_storage(), torch.nn.Linear(1, 1), torch.ops.aten.empty.memory_format),
        *(torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu"), torch.autograd.Variable),
    )
    names = {name for each in objects for name in dir(each)} | {"_opt_called", "_wrapped_by_lr_sched", "_orig_mod"}
    return frozenset(name for name in names if is_private(name)) - KEPT_PRIVATE


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def uses_of_private_torch(code, known):
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


def is_set_on_self(node):
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def test_private_names_of_torch_are_in_one_module():
    for path in MODULES:
        found = uses_of_private_torch(path.read_text(), private_names_of_torch())
        assert bool(found) == (path.name == "torch_private.py"), f"{path}: gather {found} in torch_private.py"
    for code in ("from torch.utils._pytree import tree_map", "import torch._dynamo", "p._cdata", "getattr(p, '_base')"):
        assert uses_of_private_torch(code, private_names_of_torch())


def test_torch_is_declared_as_tested_and_versions_of_lightning_that_run_code_of_checkpoints_are_refused():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest, newest) = torch_private.OLDEST, torch_private.NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in requirements
    (lightning,) = (each for each in map(Requirement, requirements) if each.name == "lightning")
    assert not list(lightning.specifier.filter(["2.6.1", "2.6.4", "2.6.5"]))
    assert lightning.specifier.contains("2.6.6")


@pytest.mark.parametrize(
    ("words", "homes"),
    [
        ("weights_only=False", ()),
        ("gradient_clip_val", ("integrations/lightning.py", "commands/convert.py")),  # it writes YAML for Lightning
        ("max_grad_norm", ("integrations",)),
    ],
)
def test_users_are_told_words_of_their_front_end_and_never_to_run_code_of_checkpoints(words, homes):
    found = [path for path in MODULES if words in path.read_text()]
    assert [path for path in found if not any(path.is_relative_to(PACKAGE / home) for home in homes)] == []
