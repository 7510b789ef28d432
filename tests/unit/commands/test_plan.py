import functools
import json
import re
import shlex

import pytest

from lightning_cxl.commands import plan as command
from lightning_cxl.commands.plan import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.planning.policies import POLICIES
from tests.integration.llama import tiny_llama

MACHINE = """
name: test machine
tiers:
  - {{name: dram0, kind: dram, capacity_bytes: {dram}, adam_bytes_per_s: 200 GB/s,
     device_read_bytes_per_s: 200 GB/s, device_write_bytes_per_s: 200 GB/s}}
  - {{name: cxl0, kind: cxl, capacity_bytes: {cxl}, adam_bytes_per_s: 60 GB/s,
     device_read_bytes_per_s: 50 GB/s, device_write_bytes_per_s: 35 GB/s}}
device: {{name: test gpu, count: {count}, memory_bytes: 1GiB, flops: 1.0e+14,
  h2d_bytes_per_s: 55 GB/s, d2h_bytes_per_s: 55 GB/s}}
links: {{peer_bytes_per_s: 300 GB/s, sockets: 2}}  # sockets were a key of earlier files, and say nothing any more
"""


@pytest.fixture(scope="module", autouse=True)
def _dry_runs_are_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PlannedModel", functools.cache(command.PlannedModel))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 1 << 14}
    tiny_llama(4, **shape).config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(model, tmp_path, capsys):
    def run(*arguments):
        data = tmp_path / "plan.json"
        status = main(["--model", model, "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


@pytest.fixture
def plan(run, tmp_path):
    def plan(*arguments, dram="1GiB", cxl="1GiB", count=1):
        path = tmp_path / "machine.yaml"
        path.write_text(MACHINE.format(dram=dram, cxl=cxl, count=count))
        return run("--tiers", str(path), *arguments)

    return plan


def test_a_job_that_fits(plan):
    status, text, data = plan("--accumulate-grad-batches", "2")
    assert status == 0 and data["fits"] and "\nIt fits.\n" in text
    # JSON adds up
    assert data["num_tokens"] == 1024
    assert data["device_bytes"] == sum(data["device_parts"].values())
    assert data["host_bytes"] == sum(data["roles"].values())
    assert list(data["policies"]) == list(POLICIES) and data["policy"] == "bandwidth"
    for each in data["policies"].values():
        for role, nbytes in data["roles"].items():
            assert sum(each["bytes"][role].values()) == pytest.approx(nbytes, abs=len(each["bytes"][role]))
            assert each["reasons"][role]
        assert each["predicted"]["tokens_per_s"] == pytest.approx(1024 / each["predicted"]["seconds"])
    assert data["policies"]["dram_only"]["predicted"]["of_dram_only"] == pytest.approx(1)


def test_a_job_that_does_not_fit_the_host_says_what_would(plan, run):
    _, _, data = plan()
    room = f"{sum(data['roles'].values()) // 2 - (8 << 20)}B"
    status, text, data = plan(dram=room, cxl=room)
    assert status == 3 and not data["fits"] and data["fits_device"]
    assert "It does not fit host memory (policy bandwidth)." in text
    assert {'state="bf16"', "another card like the last one"} <= {each["text"] for each in data["what_fits"]}
    # what is said is true, and what is said to be typed does it
    for each in data["what_fits"]:
        assert "--state 8bit" not in each["command"], "more than is needed"
        if each["command"] and "--ssd" not in each["command"]:
            assert f"    {each['command']}\n" in text
            status, _, found = run(*shlex.split(each["command"])[4:])
            assert status == 0
            assert (found["host_bytes"], found["device_bytes"]) == (each["host_bytes"], each["device_bytes"])


def test_a_setting_that_is_said_to_save_time_does(run, tmp_path):
    slow = MACHINE.replace("GB/s", "MB/s").replace("e+14", "e+11").format(dram="1GiB", cxl="1GiB", count=1)
    (tmp_path / "slow.yaml").write_text(slow)

    def planned(*flags):
        data = run("--tiers", str(tmp_path / "slow.yaml"), *flags)[2]
        return f"{data['policies']['bandwidth']['predicted']['seconds']:.3f}", str(data["notes"])

    seconds, notes = planned()
    said = re.findall(r"\((--[\w -]+)\) would take .*? the step ([\d.]+) s instead of ([\d.]+) s", notes)
    assert [flags for flags, _, _ in said] == ["--state-on-device", "--overlap backward"]
    for flags, after, before in said:
        assert planned(*flags.split())[0] == after < before == seconds
    assert "--overlap" not in planned("--no-stream-weights")[1]  # which cannot go together


def test_state_is_held_once_by_all_ranks_of_a_machine_and_inputs_by_each(plan):
    alone, four = (plan("--devices", str(count), count=4)[2] for count in (1, 4))
    for role in ("momentum", "variance"):
        assert four["roles"][role] == alone["roles"][role]
    assert four["roles"]["activations"] == 4 * alone["roles"]["activations"]
    # weights outside of units are cut, too, and then lie on the host
    assert four["roles"]["compute_weights"] == 2 * four["num_parameters"] > alone["roles"]["compute_weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody/nothing"], r"no known shape \(.*llama-3.1-8b.* and the hub cannot be asked"),
        (["--devices", "5"], "has 1 x test gpu, got 5 devices: choose 1 .*, write `count: 5` under `device`"),
        (["--ssd", "."], "--ssd is a folder of this machine"),
        (["--seq", "100000"], "has positions for .* tokens .*give --seq "),
    ],
)
def test_what_cannot_be_is_refused(plan, arguments, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)
