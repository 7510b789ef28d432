"""State on SSD is updated as state in memory is, bit for bit, through buffers that never take more than their cap."""

import contextlib
import copy
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_cxl.errors import StorageError, UnsupportedError
from lightning_cxl.optim.cpu_adam import AdamStep, CPUAdam
from lightning_cxl.optim.swapped_state import OnSsd as StandIn
from lightning_cxl.optim.swapped_state import StateSwapper
from lightning_cxl.storage.drive import StorageTransfer
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from tests.faulty_system import FaultySystem
from tests.storage_cases import Fails, Gate, memory_of
from tests.unit.optim.adam_pairs import assert_equal

SHAPES = [(96, 64), (64,), (33, 130), (128, 64), (64, 128), (7,), (5000,)]
NUM_RECORDS = 3  # the parameters after those of the records are in memory


class OnSsd:
    """An optimizer whose state lies in records, two parameters in each; the rest of it in memory."""

    def __init__(self, folder, parameters, num_buffers=2, system=None, **options):
        self.parameters = parameters
        self.largest_bytes = 0
        self.allocated = 0
        self.store = Store([folder], budget_bytes=1 << 30, system=system)
        self.state = StateSwapper(Swapper(self.store, BufferPool(self.allocate, int(num_buffers * 120_000))))
        self.records = [self.state.reserve(f"unit {index}", 200_000) for index in range(NUM_RECORDS)]
        self.optimizer = CPUAdam(parameters, allocate_state=self.flat, swapper=self.state, **options)

    def allocate(self, nbytes):
        self.allocated += nbytes
        return memory_of(nbytes)

    def flat(self, parameter, role, dtype, numel):
        index = next(i for i, p in enumerate(self.parameters) if p is parameter) // 2
        if index >= NUM_RECORDS:
            return torch.empty(numel, dtype=dtype)
        return self.records[index].take(dtype, numel)

    def close(self):
        self.state.swapper.close()
        self.store.close()


def make_parameters(dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(parameters, step, leave_out=frozenset()):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in leave_out else grad


def stepped_beside(own, steps, **options):
    plain = CPUAdam(make_parameters(own.parameters[0].dtype), **options)
    for step in range(steps):
        take_step(step, own.optimizer, plain)
    return plain


def take_step(number, *optimizers, leave_out=frozenset()):
    for optimizer in optimizers:
        give_gradients(optimizer.param_groups[0]["params"], number, leave_out)
        optimizer.step()


def state_of(optimizer):
    return {index: {k: v.clone() for k, v in entry.items()} for index, entry in optimizer.state_dict()["state"].items()}


def assert_equal_runs(own, plain):
    assert_equal(own.parameters, plain.param_groups[0]["params"])
    assert_equal(state_of(own.optimizer), state_of(plain))


@pytest.fixture
def on_ssd(tmp_path):
    with contextlib.ExitStack() as closing:

        def make(num_buffers=2, *, dtype=torch.float32, steps=0, folder=tmp_path, **options):
            own = OnSsd(folder, make_parameters(dtype), num_buffers, **options)
            closing.callback(own.close)
            for step in range(steps):
                take_step(step, own.optimizer)
            return own

        yield make


@pytest.mark.parametrize("num_buffers", [0.5, 1.1, 2.0, 9.0])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "split"])
def test_updates_are_those_of_state_in_memory(on_ssd, state, dtype, num_buffers):
    own = on_ssd(num_buffers, dtype=dtype, state=state)
    plain = CPUAdam(make_parameters(dtype), state=state)
    for step in range(4):
        take_step(step, own.optimizer, plain, leave_out=frozenset({1, 2} if step == 1 else ()))
    assert_equal_runs(own, plain)
    assert own.store.stats()["written_bytes"] > 0


def test_buffers_take_no_more_than_their_cap_or_one_record_that_is_larger(on_ssd, tmp_path):
    assert on_ssd(4, steps=3).allocated == 480_000
    own = on_ssd(0.1, steps=1, folder=tmp_path / "other")
    assert own.allocated == own.records[0].record.padded_nbytes


def test_records_are_prefetched_in_the_order_of_the_step_before(on_ssd):
    """Each unit by itself, as updates behind a backward come: only the first step does not know what comes next."""
    own = on_ssd(6)
    order = [2, 0, 1]
    for step in range(3):
        give_gradients(own.parameters, step)
        made = AdamStep(own.optimizer)
        work = made.collect()
        late = own.state.swapper.num_late
        for index in order:
            made.apply([each for each in work if each.kept.record is own.records[index]], 1.0)
    assert own.state.swapper.num_late == late == 1  # in the second step, the record that the first one began with


def test_two_threads_update_different_records(on_ssd):
    own = on_ssd(1.8)
    plain = CPUAdam(make_parameters(torch.float32))
    with ThreadPoolExecutor(3) as threads:
        for step in range(20):
            give_gradients(own.parameters, step)
            made = AdamStep(own.optimizer)
            work = made.collect()
            parts = [[w for w in work if w.kept.record is record] for record in [*own.records, None]]
            list(threads.map(lambda part, made=made: made.apply(part, 1.0), parts))
            take_step(step, plain)
    assert_equal_runs(own, plain)


@pytest.mark.parametrize(("saved", "state"), [("fp32", "fp32"), ("8bit", "8bit"), ("fp32", "8bit")])
def test_what_is_loaded_counts(on_ssd, saved, state):
    """A kernel codes float32 state in 8 bits, and counts versions up as operations of torch do."""
    source = CPUAdam(make_parameters(torch.bfloat16), state=saved)
    take_step(0, source)
    own, plain = on_ssd(dtype=torch.bfloat16, state=state), CPUAdam(make_parameters(torch.bfloat16), state=state)
    for optimizer in (own.optimizer, plain):
        with torch.no_grad():
            torch._foreach_copy_(optimizer.param_groups[0]["params"], source.param_groups[0]["params"])
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_equal_runs(own, plain)
    remainder = plain.state[plain.param_groups[0]["params"][2]]["remainder"].add_(3)
    own.optimizer.load_remainder(own.parameters[2], remainder)
    take_step(1, own.optimizer, plain)
    assert_equal_runs(own, plain)


def test_loading_reads_and_writes_each_record_once(on_ssd):
    own = on_ssd(2, steps=1)
    saved = copy.deepcopy(own.optimizer.state_dict())
    before = own.store.stats()
    own.optimizer.load_state_dict(saved)
    own.state.wait()
    nbytes = sum(record.record.padded_nbytes for record in own.records)
    now = own.store.stats()
    assert now["written_bytes"] - before["written_bytes"] == nbytes
    prefetched = sum(record.record.padded_nbytes for record in own.records[:2])  # for the update that comes next
    assert nbytes <= now["read_bytes"] - before["read_bytes"] <= nbytes + prefetched
    assert_equal(own.optimizer.state_dict()["state"], saved["state"])


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state["exp_avg"].norm(),
        lambda state: state["exp_avg"].zero_(),
        lambda state: state["exp_avg"].data,
        lambda state: state["exp_avg"].data_ptr(),
        lambda state: state["exp_avg"].numpy(),
        lambda state: torch.zeros(96, 64).copy_(state["exp_avg"]),
        lambda state: torch._foreach_mul_([state["exp_avg"]], 2),
    ],
)
def test_direct_access_says_how_to_read_and_write_it(on_ssd, use):
    own = on_ssd(steps=1)
    with pytest.raises(UnsupportedError, match=r"tier `ssd`.*state_dict\(\)` reads it.*load_state_dict\(\)` writes it"):
        use(own.optimizer.state[own.parameters[0]])


def test_a_copy_of_a_tensor_is_in_memory(on_ssd) -> None:
    own = on_ssd(steps=1)
    entry = own.optimizer.state[own.parameters[0]]
    assert entry["step"] == 1
    assert_equal(copy.deepcopy(entry["exp_avg"]), state_of(own.optimizer)[0]["exp_avg"])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_an_optimizer_are_in_memory_and_go_on(on_ssd, tmp_path, how):
    own = on_ssd(folder=tmp_path / "ssd")
    plain = stepped_beside(own, 1)
    both = own.parameters, own.optimizer
    if how == "torch.save":
        torch.save(both, tmp_path / "it")
        parameters, copied = torch.load(tmp_path / "it", weights_only=False)
    else:
        parameters, copied = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    own.close()
    assert type(copied.state[parameters[0]]["exp_avg"]) is torch.Tensor
    take_step(1, copied, plain)
    assert_equal(state_of(copied), state_of(plain))
    assert all(map(torch.equal, parameters, plain.param_groups[0]["params"]))


def test_what_is_written_to_a_state_dict_changes_no_state_until_it_is_loaded(on_ssd):
    own = on_ssd(steps=1)
    before, changed = state_of(own.optimizer), own.optimizer.state_dict()
    changed["state"][0]["exp_avg"].fill_(3)
    assert torch.equal(own.optimizer.state_dict()["state"][0]["exp_avg"], before[0]["exp_avg"])
    own.optimizer.load_state_dict(changed)
    assert own.optimizer.state_dict()["state"][0]["exp_avg"].unique().tolist() == [3]
    assert torch.equal(own.optimizer.state_dict()["state"][0]["exp_avg_sq"], before[0]["exp_avg_sq"])


def test_state_that_a_user_has_put_there_is_taken_over(on_ssd):
    own = on_ssd(steps=1)
    state = own.optimizer.state[own.parameters[0]]
    state["exp_avg"] = torch.full((96, 64), 2.0)
    own.parameters[0].grad = torch.zeros(96, 64)
    own.optimizer.step()
    saved = own.optimizer.state_dict()["state"][0]
    assert saved["exp_avg"].unique().tolist() == [pytest.approx(1.8)] and saved["exp_avg_sq"].any()


def test_state_outlives_the_store_as_memory(on_ssd, tmp_path):
    own = on_ssd()
    plain = stepped_beside(own, 2)
    own.optimizer.exit_run()
    own.close()
    assert os.listdir(tmp_path) == ["lightning_cxl.lock"]
    assert_equal_runs(own, plain)
    copied = copy.deepcopy(own.optimizer)
    take_step(2, own.optimizer, plain)
    assert_equal_runs(own, plain)
    assert state_of(copied)[0]["step"] == 2


def test_reads_behind_slow_writes_find_what_was_written(on_ssd):
    """Writes take so long that whatever does not wait for them comes first."""
    gate = Gate()
    gate.write_seconds = 0.02
    own = on_ssd(3.4, system=gate)
    plain = CPUAdam(make_parameters(torch.float32))
    for step in range(3):
        take_step(step, own.optimizer, plain)
        assert torch.equal(state_of(own.optimizer)[5]["exp_avg"], state_of(plain)[5]["exp_avg"])
    assert_equal_runs(own, plain)


def test_a_use_that_fails_changes_nothing(on_ssd):
    own = on_ssd(1.8, steps=1)
    before = state_of(own.optimizer)
    for _ in range(3):  # more often than there are buffers
        with pytest.raises(RuntimeError, match="in the middle"), own.state.use([own.records[0]]) as swapped:
            swapped.places[0][1].tensor((1000,), torch.uint8).fill_(77)
            raise RuntimeError("in the middle")
    assert_equal(state_of(own.optimizer), before)
    take_step(1, own.optimizer)
    assert state_of(own.optimizer)[0]["step"] == 2


def test_a_record_in_use_is_not_prefetched(on_ssd):
    own = on_ssd(9, steps=1)  # there is room for one more
    record = own.records[0]
    with own.state.use([record]) as swapped:
        own.store.wait()
        num_reads = own.store.stats()["num_reads"]
        own.state.swapper.expect([record.record])
        own.store.wait()
        assert own.store.stats()["num_reads"] == num_reads
        swapped.places[0][1].tensor((1000,), torch.uint8).fill_(77)
    with own.state.use([record]) as swapped:
        assert bool((swapped.places[0][1].tensor((1000,), torch.uint8) == 77).all())


class Counters:
    """A number in each record of an `OnSsd`: how often `count` has used it."""

    def __init__(self, own):
        self.state = own.state
        self.numbers = {record: record.take(torch.int64, 1) for record in own.records}
        for record, number in self.numbers.items():
            with record.use() as swapped:
                swapped.flat(number).zero_()

    def count(self, *records, times=1, inside=lambda: None):
        for _ in range(times):
            with self.state.use([*records]) as swapped:
                inside()
                for record in records:
                    swapped.flat(self.numbers[record]).add_(1)

    def counted(self):
        self.state.wait()
        return [int(StandIn.of(record, number).read()) for record, number in self.numbers.items()]


def test_uses_of_several_records_get_their_buffers_together(on_ssd):
    """There are buffers for one use at a time: uses that each wait for a part of the other's would wait for ever."""
    own = on_ssd(3.5, steps=1)
    counters, (first, second, third) = Counters(own), own.records
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(counters.count, *uses, times=60) for uses in ([first, second], [third])]:
            done.result(60)
    assert counters.counted() == [60, 60, 60]


def test_a_use_evicts_also_while_another_thread_has_a_buffer(on_ssd):
    """Two threads that each wait for the other would wait for ever."""
    own = on_ssd(3.5, steps=1)
    counters, (first, second, third) = Counters(own), own.records
    own.state.drop_prefetched()
    with ThreadPoolExecutor(1) as threads, own.state.use([first]):
        own.state.swapper.expect([second.record])
        threads.submit(counters.count, third).result(30)


def test_what_another_thread_uses_is_not_prefetched(on_ssd):
    """One thread updates a record; another one's record is followed by it, and must not read it yet."""
    own = on_ssd(9)
    counters, (first, second, _) = Counters(own), own.records
    for record in (first, second):
        counters.count(record)

    def other_thread():
        thread = threading.Thread(target=counters.count, args=(second,))
        thread.start()
        thread.join()

    counters.count(first, inside=other_thread)
    counters.count(first)
    assert counters.counted() == [3, 2, 0]


def test_two_threads_use_one_record_one_after_the_other(on_ssd):
    own = on_ssd(9)
    counters = Counters(own)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: counters.count(own.records[0]), range(40)))
    assert counters.counted() == [40, 0, 0]


def test_a_buffer_is_not_given_away_while_it_is_read_into(on_ssd, monkeypatch):
    """A use is interrupted while it waits for its read; another record then needs the buffer."""
    own = on_ssd(1.8, system=Fails("preadv", lambda *_: time.sleep(0.1)), steps=1)
    own.state.wait()

    def interrupted(transfer):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StorageTransfer, "wait_host", interrupted)
    with pytest.raises(KeyboardInterrupt), own.state.use([own.records[0]]):
        pass
    with own.state.use([own.state.reserve("new", 200_000)]) as swapped:
        memory = swapped.places[0][1].tensor((200_000,), torch.uint8).fill_(9)
        time.sleep(0.2)
        assert memory.unique().tolist() == [9]


def test_state_whose_write_failed_is_refused_from_then_on(tmp_path):
    system = FaultySystem()
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_buffers=1.8, system=system)
    take_step(0, own.optimizer)
    own.state.wait()
    system.fault, system.at = "EIO", len(system.calls) + 1  # of the first record's write: its read comes before
    with pytest.raises(StorageError):
        own.optimizer.step()
        own.state.wait()
    for _ in range(2):
        with pytest.raises(StorageError, match="not whole"):
            own.optimizer.state_dict()
    with pytest.raises(StorageError, match="not whole"):
        own.optimizer.exit_run()
    own.close()
    for use in (own.optimizer.state_dict, own.optimizer.step):
        with pytest.raises(StorageError, match="lost with its run"):
            use()


def test_closing_after_several_failed_writes_raises_the_first_error(tmp_path):
    gate = Gate()
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_buffers=9, system=gate)
    gate.fails, gate.write_seconds = "write", 0.05
    for record in own.records[:2]:
        with own.state.use([record]):
            pass
    with pytest.raises(StorageError, match="EIO"):
        own.state.swapper.close()
    with contextlib.suppress(StorageError):
        own.store.close()


def test_state_that_an_interrupted_first_step_has_not_reached_is_zero(on_ssd, monkeypatch):
    """And lies on the drive: a checkpoint may refer to it."""
    own = on_ssd()
    give_gradients(own.parameters, 0)
    use, used = own.state.use, []

    def interrupted(records):
        if used:
            raise KeyboardInterrupt
        used.extend(records)
        return use(records)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own.state, "use", interrupted)
        own.optimizer.step()
    assert not used[0].blanks
    state, records = own.optimizer.state_dict()["state"], set()
    for index, parameter in enumerate(own.parameters):
        record = own.optimizer.kept.of(parameter).record
        records |= {record} - {None, *used}
        if record in records:
            assert not state[index]["exp_avg"].any() and not state[index]["exp_avg_sq"].any()
    assert records and all(record.record.is_written for record in records)
