"""Encrypted state on SSD: updates are those of state in memory; tensors show right values or none, never wrong ones."""

import copy
import secrets

import pytest
import torch

from lightning_cxl.errors import LightningCXLWarning, StorageError, TierFullError
from lightning_cxl.optim import state_records
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.storage.window import files_shown_at
from tests.unit.optim.test_state_visits import (
    OnSsd,
    SlowWrites,
    _private_bytes,
    assert_equal_runs,
    give_gradients,
    make_parameters,
    state_of,
    step_both,
)

KEY = secrets.token_bytes(64)


@pytest.fixture
def pair(tmp_path):
    """Makes an optimizer with encrypted state, and one with state in memory, after two steps of each."""
    made = []

    def make(dtype=torch.bfloat16, system=None, **options):
        own = OnSsd(tmp_path / f"ssd{len(made)}", make_parameters(dtype), system=system, key=KEY, **options)
        plain_parameters = make_parameters(dtype)
        plain = CPUAdam(plain_parameters, **options)
        for step in range(2):
            step_both(own, plain, plain_parameters, step)
        made.append(own)
        return own, plain, plain_parameters

    yield make
    for own in made:
        own.close()


def no_memory(monkeypatch):
    monkeypatch.setattr(state_records, "host_available_bytes", lambda root: 300_000)


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "split"])
def test_updates_are_those_of_state_in_memory(pair, state, dtype):
    own, plain, plain_parameters = pair(dtype, state=state)
    assert_equal_runs(own, plain, plain_parameters)
    step_both(own, plain, plain_parameters, 2)  # also after someone has looked
    assert_equal_runs(own, plain, plain_parameters)


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "plain"])
def test_state_that_an_interrupted_first_step_has_not_reached_is_zero(tmp_path, key, monkeypatch):
    """And lies on the drive: a checkpoint may refer to it."""
    own = OnSsd(tmp_path, make_parameters(torch.float32), key=key)
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


def test_tensors_that_someone_holds_show_no_number_from_the_next_update_on(pair):
    """Also while it is still written."""
    own, plain, plain_parameters = pair(system=SlowWrites())
    mine, theirs = own.parameters[4], plain_parameters[4]  # of the record that is written last
    held = own.optimizer.state[mine]["exp_avg"]
    assert torch.equal(held, plain.state[theirs]["exp_avg"])
    give_gradients(own.parameters, 2)
    own.optimizer.step()
    assert held.isnan().all()
    give_gradients(plain_parameters, 2)
    plain.step()
    assert torch.equal(own.optimizer.state[mine]["exp_avg"], plain.state[theirs]["exp_avg"])
    assert not held.isnan().any()


def test_state_takes_memory_only_from_a_look_to_the_next_update(pair):
    own, plain, plain_parameters = pair()
    own.visits.wait()
    assert sum(map(_private_bytes, own.records)) == 0
    own.optimizer.state_dict()
    assert sum(map(_private_bytes, own.records)) == sum(each.record.padded_nbytes for each in own.records)
    step_both(own, plain, plain_parameters, 2)
    own.visits.wait()
    assert sum(map(_private_bytes, own.records)) == 0


def test_what_a_user_writes_counts_and_the_rest_of_the_record_stays(pair):
    own, plain, plain_parameters = pair()
    held = own.optimizer.state[own.parameters[0]]["exp_avg_sq"]
    for optimizer, parameters in ((own.optimizer, own.parameters), (plain, plain_parameters)):
        with torch.no_grad():
            optimizer.state[parameters[2]]["remainder"][:5].add_(3)  # a part: the rest must have its values
    step_both(own, plain, plain_parameters, 2)
    own.visits.wait()
    assert held.isnan().all()
    with torch.no_grad():  # the whole of a tensor, without a look
        held.fill_(2)
        plain.state[plain_parameters[0]]["exp_avg_sq"].fill_(2)
    assert_equal_runs(own, plain, plain_parameters)
    step_both(own, plain, plain_parameters, 3)
    assert_equal_runs(own, plain, plain_parameters)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_what_is_loaded_counts_and_takes_no_memory(pair, state):
    own, plain, plain_parameters = pair(state=state)
    saved = copy.deepcopy(plain.state_dict())
    for step in (2, 3):
        step_both(own, plain, plain_parameters, step)
    weights = [parameter.detach().clone() for parameter in plain_parameters]
    own.optimizer.load_state_dict(copy.deepcopy(saved))
    own.visits.wait()
    assert sum(map(_private_bytes, own.records)) == 0
    plain.load_state_dict(saved)
    assert all(map(torch.equal, own.parameters, weights))
    assert_equal_runs(own, plain, plain_parameters)
    step_both(own, plain, plain_parameters, 4)
    assert_equal_runs(own, plain, plain_parameters)


def test_state_follows_the_new_memory_format_of_a_parameter(pair):
    own, plain, plain_parameters = pair()
    for parameters in (own.parameters, plain_parameters):
        parameters[2].data = parameters[2].data.t().contiguous().t()
    step_both(own, plain, plain_parameters, 2)
    assert_equal_runs(own, plain, plain_parameters)


def test_looking_keeps_what_was_written_and_not_updated_yet(pair):
    own, plain, plain_parameters = pair(torch.float32)
    first, second = (own.optimizer.kept.of(parameter).momentum.values for parameter in own.parameters[:2])
    with torch.no_grad():
        first.fill_(7)
    own.records[0].look()
    assert first.unique().tolist() == [7]
    assert torch.equal(second, plain.state[plain_parameters[1]]["exp_avg"])


def test_copies_have_values(pair):
    own, plain, plain_parameters = pair()
    copied = copy.deepcopy(own.optimizer)
    step_both(own, plain, plain_parameters, 2)
    own.visits.wait()
    plain_state = state_of(plain)
    for index, entry in state_of(copied).items():
        assert entry["step"] == plain_state[index]["step"] - 1
        assert all(not value.float().isnan().any() for value in entry.values())


def test_state_outlives_the_run_as_memory(pair):
    own, plain, plain_parameters = pair()
    own.optimizer.leave_run()
    own.close()
    assert_equal_runs(own, plain, plain_parameters)
    step_both(own, plain, plain_parameters, 2)
    assert_equal_runs(own, plain, plain_parameters)


def test_without_memory_for_it_state_is_refused_and_training_goes_on(pair, monkeypatch):
    own, plain, plain_parameters = pair()
    no_memory(monkeypatch)
    for use in (own.optimizer.state_dict, lambda: own.optimizer.state):
        with pytest.raises(TierFullError, match=r"takes 588\.0 KiB of memory: 293\.0 KiB are available.*'reference'"):
            use()
    step_both(own, plain, plain_parameters, 2)
    with own.optimizer.kept.unseen():
        assert own.optimizer.state[own.parameters[0]]["exp_avg"].isnan().all()
    monkeypatch.undo()
    assert_equal_runs(own, plain, plain_parameters)


def test_without_memory_for_it_the_end_of_a_run_takes_state_away_and_warns(pair, monkeypatch):
    own, *_ = pair()
    no_memory(monkeypatch)
    with pytest.warns(LightningCXLWarning, match="is not in memory: its run is over"):
        own.optimizer.leave_run()
    assert not own.optimizer.plain_state
    for use in (own.optimizer.state_dict, own.optimizer.step):
        with pytest.raises(StorageError, match="Save checkpoints during the run"):
            use()


def test_state_that_cannot_be_read_at_the_end_is_lost(pair):
    own, *_ = pair()
    own.visits.wait()
    (data,) = own.store._drives[0].path.parent.glob("*.data")
    with open(data, "r+b") as file:
        file.seek(own.records[1].record.versions[0])
        file.write(b"damage")
    with pytest.raises(StorageError, match="is damaged"):
        own.optimizer.leave_run()
    with pytest.raises(StorageError, match="lost with its run"):
        own.optimizer.state_dict()


def test_the_state_of_a_run_that_is_over_is_in_no_file(pair):
    """So the next run in the same folder may take it over while it writes there."""
    own, *_ = pair()
    own.optimizer.leave_run()
    assert not any(files_shown_at(record.window.address) for record in own.records)
