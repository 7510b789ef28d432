"""`Mutation`: one guard taken out of the code, found by file or folder, function and AST node.

`read_table` reads them from `mutations.txt`, whose first lines show its format.
"""

import ast
import builtins
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DELETE = "delete"  # a statement without a body becomes `new`, or goes
NEVER, ALWAYS = "never", "always"  # the condition of `if`, `while`, `a if b else c` or of a comprehension
WITHOUT = "without"  # an operand of `and` or `or` goes
ARGUMENT = "argument"  # of a call: "callee.keyword", or "callee.0"; becomes `new`, or goes
VALUE = "value"  # of an assignment, or of a "return"; becomes `new`
CALL = "call"  # of a function; becomes `new`
TEXT = "text"  # of a file of C++; becomes `new`, or goes

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Break, ast.Continue)
_NAMES = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg", ast.Constant: "value", ast.arg: "arg"}

Edit = tuple[ast.AST, str]


class Mutation(NamedTuple):
    """A change of one AST node.

    Args:
        guard: what the code does no more, in words; the mutation's name.
        where: a file (without ``.py``) or a folder of the package and a function in it: ``"storage: Store.commit"``,
            with ``=`` behind its name the setter of a property. Of ``TEXT`` a file of the repository.
        kind: one of the constants above.
        words: identifiers and strings, all of which the node mentions: better attributes and functions than locals.
            The first one of ``ARGUMENT`` and ``CALL`` is the callee. ``TEXT`` stands in the file as it is here.
        new: the source that takes the node's place; its names must be in the function.
        nth: which one, from 0, where the function has several such nodes.
    """

    guard: str
    where: str
    kind: str
    words: str
    new: str = ""
    nth: int | None = None

    def applied(self, root: Path) -> tuple[Path, str]:
        """Return the file, and its text without the guard.

        Raises:
            LookupError: the function or the node is not there exactly once: the table must follow the code.
        """
        if self.kind == TEXT:
            text = (root / self.where).read_text()
            if self.words not in text:
                raise self._error(f"`{self.words}` is not in {self.where}")
            return root / self.where, text.replace(self.words, self.new)
        path, function = self._function(root / "lightning_cxl")
        if self.new and (unknown := _names_in(ast.parse(self.new)) - _names_in(function) - set(dir(builtins))):
            raise self._error(f"{' and '.join(unknown)} of `{self.new}` is not in {function.name} of {path}")
        edits = _innermost(list(_edits(function, self.kind, self.words.split(), self.new)))
        if len(edits) != 1 if self.nth is None else self.nth >= len(edits):
            raise self._error(f"`{self.kind} {self.words}` is {len(edits)} times in {function.name} of {path}")
        text = path.read_text()
        changed = _replaced(text, *edits[self.nth or 0])
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            raise self._error(f"`{self.kind} {self.words}` changes nothing in {function.name} of {path}")
        return path, changed

    def _function(self, package: Path) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]:
        place, _, name = self.where.partition(": ")
        file = package / f"{place}.py"
        files = [file] if file.exists() else sorted((package / place).rglob("*.py"))
        found = [(path, each) for path in files for each in _functions(ast.parse(path.read_text()), name.split("."))]
        if len(found) != 1:
            raise self._error(f"function {name} is {len(found)} times in lightning_cxl/{place}")
        return found[0]

    def _error(self, text: str) -> LookupError:
        return LookupError(f"mutation `{self.guard}`: {text}")


def read_table(path: Path) -> dict[str, list[Mutation]]:
    """Return the mutations of a table by the tests of which one must notice."""
    table: dict[str, list[Mutation]] = {}
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith("  "):
            mutations = table.setdefault(line, [])
        elif not line.startswith("    "):
            where = line.strip()
        else:
            entry = re.fullmatch(
                r"(?P<guard>.+) \| (?P<kind>\w+) (?P<words>.+?)( #(?P<nth>\d+))?( -> (?P<new>.+))?", line.strip()
            )
            if entry is None:
                raise LookupError(f"{path}: `{line.strip()}` is not `guard | kind words [#nth] [-> new]`")
            nth = None if entry["nth"] is None else int(entry["nth"])
            mutations.append(Mutation(entry["guard"], where, entry["kind"], entry["words"], entry["new"] or "", nth))
    return table


def _functions(scope: ast.AST, names: list[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return functions of this path of names, also under `if` and `with`."""
    for each in ast.iter_child_nodes(scope):
        if not isinstance(each, (*_FUNCTION, ast.ClassDef)):
            yield from _functions(each, names)
        elif len(names) > 1 and each.name == names[0]:
            yield from _functions(each, names[1:])
        elif isinstance(each, _FUNCTION):
            of_property = {"setter": "=", "deleter": " deleted"}
            ends = [of_property.get(of.attr, "") for of in each.decorator_list if isinstance(of, ast.Attribute)]
            if names == ["".join([each.name, *ends])]:
                yield each


def _edits(function: ast.AST, kind: str, words: list[str], new: str) -> Iterator[Edit]:
    """Return all nodes that may be meant, in the order of the source, with what takes their place."""
    for node in _in_order(function):
        if kind == DELETE and isinstance(node, _SIMPLE) and _mentions(node, words):
            yield node, new or "pass"
        elif kind in (NEVER, ALWAYS) and isinstance(node, (ast.If, ast.While, ast.IfExp, ast.comprehension)):
            tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
            yield from ((test, str(kind == ALWAYS)) for test in tests if _mentions(test, words))
        elif kind == WITHOUT and isinstance(node, ast.BoolOp):
            neutral = str(isinstance(node.op, ast.And))
            yield from ((operand, neutral) for operand in node.values if _mentions(operand, words))
        elif kind == VALUE and isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)) and node.value is not None:
            rest = [word for word in words if word != "return"]
            if isinstance(node, ast.Return) == ("return" in words) and _mentions(node, rest):
                yield node.value, f"({new})"
        elif isinstance(node, ast.Call) and kind in (ARGUMENT, CALL):
            callee, _, argument = words[0].partition(".")
            if _name(node.func) == callee and _mentions(node, words[1:]):
                if kind == CALL:
                    yield node, f"({new})"
                elif (changed := _with_argument(node, argument, new)) is not None:
                    yield node, changed


def _with_argument(call: ast.Call, argument: str, new: str) -> str | None:
    """Return the source of the call with another argument, or without it; None if it has no such argument."""
    changed = copy.deepcopy(call)
    value = ast.parse(new, mode="eval").body if new else None
    if argument.isdigit():
        if int(argument) >= len(changed.args):
            return None
        changed.args[int(argument) : int(argument) + 1] = [value] if value else []
    else:
        found = [each for each in changed.keywords if each.arg == argument]
        if not found:
            return None
        if value:
            found[0].value = value
        else:
            changed.keywords.remove(found[0])
    return ast.unparse(changed)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        yield each
        yield from _in_order(each)


def _name(node: ast.AST) -> object:
    """Return what a word says of a node: an identifier, or the value of a constant."""
    return getattr(node, _NAMES.get(type(node), ""), None)


def _mentions(node: ast.AST, words: list[str]) -> bool:
    return set(words) <= {str(_name(each)) for each in ast.walk(node) if type(each) in _NAMES}


def _names_in(node: ast.AST) -> set[str]:
    return {str(_name(each)) for each in ast.walk(node) if isinstance(each, (ast.Name, ast.arg))}


def _innermost(edits: list[Edit]) -> list[Edit]:
    nodes = {id(node) for node, _ in edits}
    return [(node, new) for node, new in edits if not any(id(each) in nodes for each in _in_order(node))]


def _replaced(text: str, node: ast.AST, new: str) -> str:
    """Return the text with other source in the place of a node; columns of `ast` count bytes."""
    lines = text.encode().splitlines(keepends=True)
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None and node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + after).decode()
