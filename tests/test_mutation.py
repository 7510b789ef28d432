import pytest

from tests.mutants.mutation import ALWAYS, ARGUMENT, CALL, DELETE, NEVER, TEXT, VALUE, WITHOUT, Mutation

SOURCE = """
class Store:
    def write(self, record, after=()):  # ö is two bytes: {"ö"}
        if record.is_whole and self.is_open:
            write = self._start(record.views, after=after)
            self._open.add(write); self._count += 1
        return [each for each in self._open if each.done()]
"""


@pytest.fixture
def changed(tmp_path):
    (tmp_path / "lightning_cxl" / "storage").mkdir(parents=True)
    (tmp_path / "lightning_cxl" / "storage" / "store.py").write_text(SOURCE)

    def change(kind, words, new="", where="storage: Store.write", nth=None):
        return Mutation("it", where, kind, words, new, nth).applied(tmp_path)[1]

    return change


def test_a_kind_changes_its_node_alone(changed):
    for kind, words, new, old, there in (
        (DELETE, "add", "", "self._open.add(write)", "pass"),
        (NEVER, "is_whole", "", "record.is_whole and self.is_open", "False"),
        (ALWAYS, "done", "", "each.done()", "True"),
        (WITHOUT, "is_open", "", "self.is_open", "True"),
        (ARGUMENT, "_start.after", "", ", after=after)", ")"),
        (VALUE, "_start", "self", "self._start(record.views, after=after)", "(self)"),
        (VALUE, "return", "[]", "[each for each in self._open if each.done()]", "([])"),
        (CALL, "done", "True", "each.done()", "(True)"),
        (TEXT, "if record", "while record", "if record", "while record"),
    ):
        where = "lightning_cxl/storage/store.py" if kind == TEXT else "storage: Store.write"
        assert changed(kind, words, new, where) == SOURCE.replace(old, there)


def test_what_is_not_there_once_is_an_error(changed):
    for where in ("storage: Store.read", "memory: Store.write", "storage: write"):
        with pytest.raises(LookupError, match=r"mutation `it`: function .* is 0 times in lightning_cxl"):
            changed(DELETE, "add", where=where)
    with pytest.raises(LookupError, match=r"`delete _open sync` is 0 times in write of .*store.py"):
        changed(DELETE, "_open sync")
    with pytest.raises(LookupError, match=r"renamed of `renamed` is not in write of"):
        changed(VALUE, "_start", "renamed")
    assert "pass; self._count" in changed(DELETE, "self", nth=1)
