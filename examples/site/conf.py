"""The documentation site, made by `make docs` from the documents and docstrings of the repository.

No page repeats a text: the pages of the API and of errors are made from the code, that of the notebook from its cells.
"""

import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_cxl"
sys.path.insert(0, str(ROOT))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says on a CPU which kernels it has not found

project = "lightning_cxl"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
html_theme = "furo"
html_title = "lightning_cxl"
html_extra_path = ["index.html"]  # leads to the README
html_favicon = "favicon.svg"
html_show_copyright = html_copy_source = html_use_index = False
smartquotes_action = "D"  # dashes alone: quotes of messages stay as they are
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 4
highlight_language = "none"
default_role = "py:obj"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 90

_GUIDES = "examples/guides/"
NAVIGATION = {
    "Start": ["examples/site/notebook", *(_GUIDES + name for name in ("configuration", "migration", "support"))],
    "Frameworks": [_GUIDES + name for name in ("fabric", "accelerate", "transformers", "optimizer")],
    "Memory": [_GUIDES + name for name in ("policies", "gpu", "several_gpus", "scaling", "big_models")],
    "Training": [_GUIDES + name for name in ("long_contexts", "checkpoints", "failures", "monitoring")],
    "Reference": ["examples/site/api", "examples/site/errors", _GUIDES + "limits", "CHANGELOG"],
    "Measurements": [f"examples/{name}/README" for name in ("conformance", "bench", "lab")] + [_GUIDES + "tests"],
    "The code": ["lightning_cxl/README", "lightning_cxl/DECISIONS", "cython_ext/README"],
}
"""Documents by the caption of their part of the sidebar."""
include_patterns = ["README.md", *(f"{name}.md" for names in NAVIGATION.values() for name in names)]
exclude_patterns = [".*", "build", "tests"]

# ----------------------------------------------------------------------------------------------------
# Pages that are made from the code.

FRAMEWORKS = ("accelerate", "transformers")


def api() -> str:
    """Return the reference of all public names, in the order and under the purposes of the table in the map."""
    table = (PACKAGE / "README.md").read_text().partition("## Public names\n")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.MULTILINE)
    parts = [(purpose, [f"lightning_cxl.{name}" for name in re.findall(r"`(\w+)`", names)]) for names, purpose in rows]
    for each in FRAMEWORKS:
        module = f"lightning_cxl.{each}"
        parts.append((f"`{module}`", [f"{module}.{name}" for name in import_module(module).__all__]))
    return "\n".join(f"\n## {what[0].upper()}{what[1:]}\n\n{''.join(map(_directive, names))}" for what, names in parts)


def _directive(path: str) -> str:
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    kind, options = "class" if isinstance(value, type) else "function", ""
    if name.endswith("Strategy"):  # its own members: what a framework calls is not for users
        others = [each for each in value.__mro__ if not each.__module__.startswith("lightning_cxl")]
        options = f"\n   :exclude-members: {', '.join({*vars(value)} & set().union(*map(vars, others)))}"
    return f"```{{eval-rst}}\n.. auto{kind}:: {path}{options}\n```\n\n"


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every error or warning of this package that a file raises: its class and its text, with gaps for values."""
    import lightning_cxl.errors as errors

    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        names = [call.func, *call.args[1:2]] if ast.unparse(call.func) == "warnings.warn" else [call.func]
        name = ast.unparse(names[-1])
        if (isinstance(node, ast.Raise) or len(names) == 2) and hasattr(errors, name):
            text = " ".join(_text(call.args[0]).split())
            if len(re.sub(r"…|\W", "", text)) > 20:  # others are put together elsewhere
                yield name, text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def errors() -> str:
    """Return all messages by folder, under what its `__init__` says of it, and by class."""
    parts: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        about = path if path.parent == PACKAGE else path.with_name("__init__.py")
        title = re.split(r"[:.;]", ast.get_docstring(ast.parse(about.read_text())) or "")[0]
        parts.setdefault(title, set()).update(messages(path))
    lines = []
    for title, found in parts.items():
        lines += ["", f"## {title}"] if found else []
        for name, group in groupby(sorted(found), lambda each: each[0]):
            lines += ["", f"{{py:obj}}`~lightning_cxl.{name}`", ""]
            lines += [f"- {_escaped(text)}" for _, text in group]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return text as Markdown; what is between backticks stays code, and options become code."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = (re.sub(r"([\\`*_\[\]<>{}#$~])", r"\\\1", part) for part in parts[::2])
    parts[::2] = (re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", part) for part in parts[::2])
    return "".join(parts)


def notebook() -> str:
    """Return the cells of the notebook."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if is_code else text for text, is_code in texts)


def contents() -> str:
    """Return the sidebar."""
    parts = (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(f"/{name}" for name in names) + "\n```"
        for caption, names in NAVIGATION.items()
    )
    return "\n\n".join(parts)


MADE = {
    "README": contents,
    "examples/site/api": api,
    "examples/site/errors": errors,
    "examples/site/notebook": notebook,
}
"""What is added to documents."""


def setup(app) -> None:
    """Add what is made to the documents when they are read."""

    def add(_app, name: str, source: list[str]) -> None:
        source[0] += "\n\n" + MADE.get(name, str)()

    app.connect("source-read", add)
