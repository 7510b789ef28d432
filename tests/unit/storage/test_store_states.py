"""A store against a dict, through random sequences of calls and of runs that end in order or not."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_cxl.errors import StorageError
from lightning_cxl.storage.store import Store
from tests.faulty_system import FaultySystem
from tests.storage_cases import BLOCK, BUDGET, bytes_of, folders, get, put

SIZES = (1, BLOCK - 1, BLOCK, 3 * BLOCK + 1, 9 * BLOCK)


class StoreMachine(RuleBasedStateMachine):
    """`now` is what records hold, `kept` what generations hold, `found` whether an earlier run left some."""

    names = Bundle("names")

    @initialize(count=st.sampled_from([1, 3]))
    def start(self, count):
        self.path = Path(tempfile.mkdtemp())
        self.count = count
        self.kept: dict[int, dict[str, tuple[bytes, int]]] = {}
        self.sizes: dict[str, int] = {}
        self.number = self.seed = 0
        self.open()

    def open(self):
        options = {"keeps": True, "system": FaultySystem(), "chunk_bytes": 2 * BLOCK}
        self.store = Store(folders(self.path, self.count), budget_bytes=BUDGET, **options)
        self.number = max([0, *self.kept]) if self.kept else 0
        self.sizes = {name: size for name, size in self.sizes.items() if self.kept}
        self.records = {name: self.store.reserve(name, size) for name, size in self.sizes.items()}
        self.now: dict[str, bytes] = {}

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.path)

    @precondition(lambda self: len(self.records) < 4)
    @rule(size=st.sampled_from(SIZES))
    def reserve(self, size):
        name = f"record {len(self.records)}"
        self.records[name] = self.store.reserve(name, size)
        self.sizes[name] = size

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def write(self, data):
        name = data.draw(st.sampled_from(sorted(self.records)))
        self.seed += 1
        versions = {kept[name][1] for kept in self.kept.values() if name in kept}
        if len(versions) == 2:
            with pytest.raises(StorageError, match="all its versions"):
                put(self.store, self.records[name], self.seed)
        else:
            self.now[name] = put(self.store, self.records[name], self.seed)
            assert self.records[name].present not in versions

    @rule()
    def commit(self):
        if len(self.kept) == 2:
            with pytest.raises(StorageError, match="settle one"):
                self.store.commit({})
            return
        self.number = self.store.commit({"seed": self.seed})
        assert self.number > max([0, *self.kept])
        self.kept[self.number] = {name: (held, self.records[name].present) for name, held in self.now.items()}

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def settle(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        self.store.settle(number)
        self.kept = {number: self.kept[number]}

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        if set(self.records) - set(next(g.records for g in self.store.generations() if g.number == number)):
            return  # reserved after that generation
        self.store.restore(number)
        self.now = {name: held for name, (held, _) in self.kept[number].items()}

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @invariant()
    def everything_is_as_it_should_be(self):
        for name, record in self.records.items():
            assert record.is_written == (name in self.now)
            expected = self.now.get(name, bytes(record.padded_nbytes))
            assert bytes_of(self.store.window(record)) == expected
            if record.is_written:
                assert get(self.store, record) == expected
        assert [generation.number for generation in self.store.generations()] == sorted(self.kept)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestStore = StoreMachine.TestCase
