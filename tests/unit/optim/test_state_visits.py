"""State on SSD is updated as state in memory is, bit for bit, through slots that never take more than their cap."""

import contextlib
import copy
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.state_records import StateRecord, taken_nbytes
from lightning_cxl.optim.state_visits import StateVisits
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.slots import HostSlots
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.system import System
from tests.faulty_system import FaultySystem

SHAPES = [(96, 64), (64,), (33, 130), (128, 64), (64, 128), (7,), (5000,)]
NUM_RECORDS = 3  # the parameters after those of the records are in memory


class OnSsd:
    """An optimizer whose state lies in records, two parameters in each; the rest of it in memory."""

    def __init__(
        self,
        folder: Path,
        parameters: list[torch.nn.Parameter],
        num_slots: float = 2,
        system: System | None = None,
        **options,
    ) -> None:
        self.parameters = parameters
        self.largest_bytes = 0
        self.allocated = 0
        self.store = Store([folder], budget_bytes=1 << 30, system=system)
        self.visits = StateVisits(self.store, HostSlots(self.allocate, int(num_slots * 120_000)))
        self.records = [self.visits.reserve(f"unit {index}", 200_000) for index in range(NUM_RECORDS)]
        self.optimizer = CPUAdam(parameters, allocate_state=self.flat, visits=self.visits, **options)

    def allocate(self, nbytes: int) -> Buffer:
        self.allocated += nbytes
        mapping = Mapping(nbytes)
        return Buffer(mapping.address, nbytes, (), None, mapping)

    def flat(self, parameter, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
        index = next(i for i, p in enumerate(self.parameters) if p is parameter) // 2
        if index >= NUM_RECORDS:
            return torch.empty(numel, dtype=dtype)
        return self.records[index].take(dtype, numel)

    def close(self) -> None:
        self.visits.close()
        self.store.close()


def make_parameters(dtype: torch.dtype, seed: int = 1) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: list[torch.nn.Parameter], step: int, leave_out: frozenset[int] = frozenset()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in leave_out else grad


def step_both(own: "OnSsd", plain: CPUAdam, plain_parameters: list[torch.nn.Parameter], step: int) -> None:
    give_gradients(own.parameters, step)
    give_gradients(plain_parameters, step)
    own.optimizer.step()
    plain.step()


def state_of(optimizer: CPUAdam) -> dict[int, dict[str, torch.Tensor]]:
    return {index: {k: v.clone() for k, v in entry.items()} for index, entry in optimizer.state_dict()["state"].items()}


def assert_equal_runs(own: OnSsd, plain: CPUAdam, plain_parameters: list[torch.nn.Parameter]) -> None:
    for ours, theirs in zip(own.parameters, plain_parameters, strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = state_of(own.optimizer), state_of(plain)
    assert ours.keys() == theirs.keys()
    for index in ours:
        assert ours[index].keys() == theirs[index].keys()
        for key in ours[index]:
            assert torch.equal(ours[index][key], theirs[index][key]), (index, key)


@pytest.fixture(params=[0.5, 1.1, 2.0, 9.0], ids=lambda factor: f"{factor} slots")
def num_slots(request):
    return request.param


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "split"])
def test_updates_are_those_of_state_in_memory(tmp_path, state, dtype, num_slots) -> None:
    own = OnSsd(tmp_path, make_parameters(dtype), num_slots, state=state)
    plain_parameters = make_parameters(dtype)
    plain = CPUAdam(plain_parameters, state=state)
    for step in range(4):
        left_out = frozenset({1, 2} if step == 1 else ())
        give_gradients(own.parameters, step, left_out)
        give_gradients(plain_parameters, step, left_out)
        own.optimizer.step()
        plain.step()
    assert_equal_runs(own, plain, plain_parameters)
    assert own.store.stats()["written_bytes"] > 0
    own.close()


def test_slots_never_take_more_than_their_cap(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=4)
    for step in range(3):
        give_gradients(own.parameters, step)
        own.optimizer.step()
    assert own.allocated == 480_000
    own.close()


def test_a_record_that_is_larger_than_the_cap_gets_the_memory_for_itself(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=0.1)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    assert own.allocated == own.records[0].record.padded_nbytes
    own.close()


def test_records_are_read_ahead_in_the_order_of_the_step_before(tmp_path) -> None:
    """Each unit by itself, as updates behind a backward come: only the first step does not know what comes next."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=6)
    order = [2, 0, 1]
    for step in range(3):
        give_gradients(own.parameters, step)
        made = own.optimizer.begin_step()
        work = made.collect()
        late = own.visits.num_late
        for index in order:
            made.apply([each for each in work if each.update.kept.record is own.records[index]], 1.0)
    assert own.visits.num_late == late == 1  # in the second step, the record that the first one began with
    own.close()


def test_two_threads_update_different_records(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=1.8)
    plain_parameters = make_parameters(torch.float32)
    plain = CPUAdam(plain_parameters)
    with ThreadPoolExecutor(3) as threads:
        for step in range(20):
            give_gradients(own.parameters, step)
            give_gradients(plain_parameters, step)
            made = own.optimizer.begin_step()
            work = made.collect()
            parts = [[w for w in work if w.update.kept.record is record] for record in [*own.records, None]]
            list(threads.map(lambda part, made=made: made.apply(part, 1.0), parts))
            plain.step()
    assert_equal_runs(own, plain, plain_parameters)
    own.close()


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_what_is_loaded_or_written_by_a_user_counts(tmp_path, state) -> None:
    plain_parameters = make_parameters(torch.bfloat16)
    plain = CPUAdam(plain_parameters, state=state)
    give_gradients(plain_parameters, 0)
    plain.step()
    own = OnSsd(tmp_path, make_parameters(torch.bfloat16), state=state)
    with torch.no_grad():
        for ours, theirs in zip(own.parameters, plain_parameters, strict=True):
            ours.copy_(theirs)
    own.optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_equal_runs(own, plain, plain_parameters)
    for optimizer, parameters in ((own.optimizer, own.parameters), (plain, plain_parameters)):
        with torch.no_grad():
            optimizer.state[parameters[2]]["remainder"].add_(3)
        give_gradients(parameters, 1)
        optimizer.step()
    assert_equal_runs(own, plain, plain_parameters)
    own.close()


def test_loading_keeps_little_in_memory(tmp_path) -> None:
    """Loaded state is written as it comes: private pages of all windows together stay under the cap."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=2)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    saved = copy.deepcopy(own.optimizer.state_dict())
    own.optimizer.load_state_dict(saved)
    assert own.optimizer.state_dict()["state"].keys() == saved["state"].keys()
    assert sum(_private_bytes(record) for record in own.records) == 0
    own.close()


def test_state_outlives_the_store_as_memory(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32))
    plain_parameters = make_parameters(torch.float32)
    plain = CPUAdam(plain_parameters)
    for step in range(2):
        step_both(own, plain, plain_parameters, step)
    own.optimizer.leave_run()
    own.close()
    assert os.listdir(tmp_path) == ["lightning_cxl.lock"]
    assert_equal_runs(own, plain, plain_parameters)
    copied = copy.deepcopy(own.optimizer)
    give_gradients(own.parameters, 2)
    give_gradients(plain_parameters, 2)
    own.optimizer.step()
    plain.step()
    assert_equal_runs(own, plain, plain_parameters)
    assert state_of(copied)[0]["step"] == 2


def _private_bytes(record: StateRecord) -> int:
    """Return the bytes of a window that are pages of this process alone."""
    inside, private = False, 0
    with open("/proc/self/smaps") as file:
        for line in file:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(number, 16) for number in head.split("-"))
                inside = record.window.address <= begin < record.window.address + record.window.nbytes
                inside = inside or begin <= record.window.address < end
            elif inside and head == "Anonymous:":
                private += int(line.split()[1]) * 1024
    return private


def test_what_a_tensor_takes_is_aligned() -> None:
    assert [taken_nbytes(nbytes) for nbytes in (1, 64, 65)] == [64, 64, 128]


def test_reads_follow_writes_in_their_slots(tmp_path) -> None:
    """With two slots, one is updated while the other is written and then read: nobody waits for the write."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=3.4)
    plain_parameters = make_parameters(torch.float32)
    plain = CPUAdam(plain_parameters)
    for step in range(4):
        step_both(own, plain, plain_parameters, step)
    assert own.visits.num_late == 0
    assert_equal_runs(own, plain, plain_parameters)
    own.close()


class SlowWrites(System):
    """Writes take so long that whatever does not wait for them comes first."""

    def pwritev(self, *args):
        time.sleep(0.02)
        return super().pwritev(*args)


def test_reads_behind_slow_writes_find_what_was_written(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=3.4, system=SlowWrites())
    plain_parameters = make_parameters(torch.float32)
    plain = CPUAdam(plain_parameters)
    for step in range(3):
        step_both(own, plain, plain_parameters, step)
        assert torch.equal(
            own.optimizer.state[own.parameters[5]]["exp_avg"], plain.state[plain_parameters[5]]["exp_avg"]
        )
    assert_equal_runs(own, plain, plain_parameters)
    own.close()


def test_a_visit_that_fails_changes_nothing(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=1.8)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    before = state_of(own.optimizer)
    for _ in range(3):  # more often than there are slots
        with pytest.raises(RuntimeError, match="in the middle"), own.visits.visit([own.records[0]]) as visit:
            visit.places[0][1].tensor((1000,), torch.uint8).fill_(77)
            raise RuntimeError("in the middle")
    after = state_of(own.optimizer)
    assert all(torch.equal(after[index][key], before[index][key]) for index in before for key in before[index])
    give_gradients(own.parameters, 1)
    own.optimizer.step()
    assert state_of(own.optimizer)[0]["step"] == 2
    own.close()


def test_a_record_that_is_visited_is_not_read_ahead(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=9)  # there is room for one more
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    record = own.records[0]
    with own.visits.visit([record]) as visit:
        own.store.wait()
        num_reads = own.store.stats()["num_reads"]
        own.visits.expect([record])
        own.store.wait()
        assert own.store.stats()["num_reads"] == num_reads
        visit.places[0][1].tensor((1000,), torch.uint8).fill_(77)
    with own.visits.visit([record]) as visit:
        assert bool((visit.places[0][1].tensor((1000,), torch.uint8) == 77).all())
    own.close()


def test_visits_of_several_records_get_their_slots_together(tmp_path) -> None:
    """There are slots for one visit at a time: visits that each wait for a part of the other's would wait for ever."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=3.5)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    first, second, third = own.records
    counted = {record: record.take(torch.int64, 1) for record in own.records}
    for value in counted.values():
        value.zero_()

    def visit_often(records: list[StateRecord]) -> None:
        for _ in range(60):
            with own.visits.visit(records) as visit:
                for record in records:
                    visit.at_slot(counted[record]).add_(1)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(visit_often, [first, second]), threads.submit(visit_often, [third])]:
            done.result(60)
    own.visits.wait()
    assert [int(counted[record]) for record in own.records] == [60, 60, 60]
    own.close()


def test_a_visit_takes_the_slot_of_what_was_read_ahead(tmp_path) -> None:
    """As a wrong guess of the order makes it necessary: one slot, and another record is in it."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=1.8)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    own.visits.wait()
    own.visits.expect([own.records[1]])
    with own.visits.visit([own.records[0]]) as visit:
        assert visit.places[0][1].nbytes == own.records[0].record.padded_nbytes
    own.close()


def test_a_visit_takes_that_slot_also_while_another_thread_visits(tmp_path) -> None:
    """Two threads that each wait for the other's visit would wait for ever."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=3.5)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    own.visits.forget()
    first, second, third = own.records
    tensor = own.optimizer.kept.of(own.parameters[4]).momentum.flat
    with ThreadPoolExecutor(1) as threads, own.visits.visit([first]):
        own.visits.expect([second])
        threads.submit(visit_and_add, own.visits, third, tensor).result(30)
    own.close()


def visit_and_add(visits: StateVisits, record: StateRecord, tensor: torch.Tensor, inside=None) -> None:
    with visits.visit([record]) as visit:
        if inside is not None:
            inside()
        visit.at_slot(tensor).add_(1)


def test_what_is_visited_is_not_read_ahead(tmp_path) -> None:
    """One thread updates a record; another one's record is followed by it, and must not read it yet."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=9)
    first, second = own.records[:2]
    tensors = [own.optimizer.kept.of(own.parameters[index]).momentum.flat for index in (0, 2)]
    for _ in range(2):
        for record, tensor in zip((first, second), tensors, strict=True):
            with own.visits.visit([record]) as visit:
                visit.at_slot(tensor).fill_(0)

    def other_thread():
        thread = threading.Thread(target=visit_and_add, args=(own.visits, second, tensors[1]))
        thread.start()
        thread.join()

    visit_and_add(own.visits, first, tensors[0], inside=other_thread)
    visit_and_add(own.visits, first, tensors[0])
    own.visits.wait()
    assert tensors[0].unique().tolist() == [2]
    own.close()


def test_two_threads_visit_one_record_one_after_the_other(tmp_path) -> None:
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=9)
    tensor = own.optimizer.kept.of(own.parameters[0]).momentum.flat
    with own.visits.visit([own.records[0]]) as visit:
        visit.at_slot(tensor).fill_(0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: visit_and_add(own.visits, own.records[0], tensor), range(40)))
    own.visits.wait()
    assert tensor.unique().tolist() == [40]
    own.close()


class SlowReads(System):
    def preadv(self, *args):
        time.sleep(0.1)
        return super().preadv(*args)


def test_a_slot_is_not_given_away_while_it_is_read_into(tmp_path, monkeypatch) -> None:
    """A visit is interrupted while it waits for its read; another record then needs the slot."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=1.8, system=SlowReads())
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    own.visits.wait()

    def interrupted(transfer):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StorageTransfer, "wait_host", interrupted)
    with pytest.raises(KeyboardInterrupt), own.visits.visit([own.records[0]]):
        pass
    with own.visits.visit([own.visits.reserve("new", 200_000)]) as visit:
        memory = visit.places[0][1].tensor((200_000,), torch.uint8).fill_(9)
        time.sleep(0.2)
        assert memory.unique().tolist() == [9]
    own.close()


def test_state_whose_write_failed_is_refused_from_then_on(tmp_path) -> None:
    system = FaultySystem()
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=1.8, system=system)
    give_gradients(own.parameters, 0)
    own.optimizer.step()
    own.visits.wait()
    system.fault, system.at = "EIO", len(system.calls) + 1  # of the first record's write: its read comes before
    with pytest.raises(StorageError):
        own.optimizer.step()
        own.visits.wait()
    for _ in range(2):
        with pytest.raises(StorageError, match="not whole"):
            own.optimizer.state_dict()
    with pytest.raises(StorageError, match="not whole"):
        own.optimizer.leave_run()
    own.close()
    for use in (own.optimizer.state_dict, own.optimizer.step):
        with pytest.raises(StorageError, match="lost with its run"):
            use()


def test_float32_state_that_is_loaded_into_8_bit_counts(tmp_path) -> None:
    """It is coded by a kernel, which counts versions up as operations of torch do."""
    plain_parameters = make_parameters(torch.float32)
    source = torch.optim.AdamW(plain_parameters)
    give_gradients(plain_parameters, 0)
    source.step()
    own = OnSsd(tmp_path, make_parameters(torch.float32), state="8bit")
    plain = CPUAdam(plain_parameters, state="8bit")
    with torch.no_grad():
        for ours, theirs in zip(own.parameters, plain_parameters, strict=True):
            ours.copy_(theirs)
    for optimizer in (own.optimizer, plain):
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        give_gradients(optimizer.param_groups[0]["params"], 1)
        optimizer.step()
    assert_equal_runs(own, plain, plain_parameters)
    own.close()


class FailingWrites(System):
    fails = False

    def pwritev(self, *args):
        if not self.fails:
            return super().pwritev(*args)
        time.sleep(0.05)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_closing_after_several_failed_writes_raises_the_first_error(tmp_path) -> None:
    system = FailingWrites()
    own = OnSsd(tmp_path, make_parameters(torch.float32), num_slots=9, system=system)
    system.fails = True
    for record in own.records[:2]:
        with own.visits.visit([record]):
            pass
    with pytest.raises(StorageError, match="EIO"):
        own.visits.close()
    with contextlib.suppress(StorageError):
        own.store.close()


def test_state_that_an_interrupted_first_step_has_not_reached_is_zero(tmp_path, monkeypatch):
    """And lies on the drive: a checkpoint may refer to it."""
    own = OnSsd(tmp_path, make_parameters(torch.float32))
    give_gradients(own.parameters, 0)
    visit, visited = own.visits.visit, []

    def interrupted(records):
        if visited:
            raise KeyboardInterrupt
        visited.extend(records)
        return visit(records)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own.visits, "visit", interrupted)
        own.optimizer.step()
    assert not visited[0].is_dirty()
    state, records = own.optimizer.state, set()
    for parameter in own.parameters:
        record = own.optimizer.kept.of(parameter).record
        records |= {record} - {None, *visited}
        if record in records:
            assert not state[parameter]["exp_avg"].any() and not state[parameter]["exp_avg_sq"].any()
    assert records and all(record.record.is_written for record in records)
    own.close()
