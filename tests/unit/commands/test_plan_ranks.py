"""`plan` of several devices and machines: bytes, volumes, text, and what cannot be."""

import json

import pytest

from lightning_cxl.commands.plan import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.placement import TensorRole
from tests.integration.llama import tiny_llama

MACHINE = """
name: test machine
tiers:
  - {{name: dram0, kind: dram, capacity_bytes: {dram}, adam_bytes_per_s: 200 GB/s,
     device_read_bytes_per_s: 200 GB/s, device_write_bytes_per_s: 200 GB/s}}
device: {{name: test gpu, memory_bytes: 1GiB, flops: 1.0e+14, h2d_bytes_per_s: {link}, d2h_bytes_per_s: {link},
         count: {count}, is_host: {is_host}}}
links: {{{links}}}
"""
LINKS = "peer_bytes_per_s: 300 GB/s, network_bytes_per_s: 50 GB/s, sockets: 2, socket_bytes_per_s: 100 GB/s"
"""The last two were keys of earlier files, and say nothing any more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocab_size=2048, hidden_size=256, intermediate_size=768).config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def plan(model, tmp_path, capsys):
    """Runs the command on an invented machine of four devices; returns status, text and the JSON it wrote."""

    def run(*arguments, dram="1GiB", link="55 GB/s", links=LINKS, count=4, is_host="false"):
        machine, data = tmp_path / "machine.yaml", tmp_path / "plan.json"
        machine.write_text(MACHINE.format(dram=dram, link=link, links=links, count=count, is_host=is_host))
        status = main(["--model", model, "--tiers", str(machine), "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


def test_state_is_held_once_by_all_ranks_of_a_machine_and_inputs_by_each(plan):
    alone, four = (plan("--devices", count)[2] for count in ("1", "4"))
    for role in (TensorRole.MOMENTUM, TensorRole.VARIANCE):
        assert four["roles"][role.value] == alone["roles"][role.value]
    assert four["roles"]["activations"] == 4 * alone["roles"]["activations"]
    assert four["num_tokens"] == 4 * alone["num_tokens"]
    # weights outside of units are cut, too, and then lie on the host
    assert four["roles"]["compute_weights"] == 2 * four["num_parameters"]
    assert alone["roles"]["compute_weights"] < four["roles"]["compute_weights"]


def test_machines_that_replicate_hold_all_and_others_a_part(plan):
    one = plan()[2]
    replicas, parts = (plan("--num-nodes", "2", "--between-nodes", how)[2] for how in ("replicate", "shard"))
    assert replicas["roles"] == one["roles"]
    for role, nbytes in one["roles"].items():
        assert parts["roles"][role] == (nbytes if role == "activations" else nbytes / 2)
    assert replicas["num_tokens"] == parts["num_tokens"] == 2 * one["num_tokens"]
    bytes_of = [data["ranks"]["device_bytes_per_step"] for data in (one, replicas, parts)]
    assert [each["all-reduce between machines"] > 0 for each in bytes_of] == [False, True, False]
    assert bytes_of[0]["all-gather, forward"] == 3 / 4 * 2 * one["num_parameters"]
    assert bytes_of[2]["all-gather, forward"] == 7 / 8 * 2 * one["num_parameters"]
    assert bytes_of[1]["all-reduce between machines"] == 2 * 1 / 2 * 2 * one["num_parameters"] / 4
    assert parts["ranks"]["predicted_busy_seconds"]["network"] > replicas["ranks"]["predicted_busy_seconds"]["network"]


def test_gradients_that_wait_on_the_devices_are_reduced_once(plan):
    every, last = (plan("--accumulate-grad-batches", "3", *more)[2] for more in ((), ("--no-sync",)))
    moved = [data["ranks"]["device_bytes_per_step"] for data in (every, last)]
    assert moved[0]["reduce-scatter"] == 3 * moved[1]["reduce-scatter"]
    assert moved[0]["all-gather, forward"] == moved[1]["all-gather, forward"]
    waiting = last["device_parts"]["gradients that wait for the last micro-batch"]
    assert waiting == 2 * last["num_parameters"]
    assert last["roles"]["compute_grads"] < every["roles"]["compute_grads"]
    assert moved[1]["copies from the device"] < moved[0]["copies from the device"]


def test_links_that_are_not_known(plan):
    text = " ".join(plan(links="")[1].split())
    assert "links between devices are not known: what they exchange is counted as going through host memory" in text
    with pytest.raises(ConfigError, match="machines exchange data, and machine `test machine` does not say how fast"):
        plan("--num-nodes", "2", links="")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "5"], "has 4 x test gpu, got 5 devices: choose 1 to 4 .*, write `count: 5` under `device`"),
        (
            ["--devices", "0"],
            r"got 0 devices: choose 1 to 4 of each machine, .* \(--num-nodes\)$",
        ),
        (["--weights", "shared"], "--weights shared was removed"),
        (["--num-nodes", "0"], "num_nodes must be at least 1, got 0"),
        (["--lora", "4", "--quantize", "4bit"], "count its compute weights once for each"),
        (["--no-stream-weights"], "several devices keep their shards of weights on the host"),
    ],
)
def test_what_cannot_be_is_refused(plan, arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)


def test_what_does_not_fit_may_be_cut_over_the_machines(plan):
    needed = plan("--num-nodes", "2", "--between-nodes", "replicate")[2]["host_bytes"]
    status, _, data = plan("--num-nodes", "2", "--between-nodes", "replicate", dram=f"{needed * 3 // 4}B")
    assert status == 3 and "the model cut over all machines" in [each["text"] for each in data["what_fits"]]
    assert plan("--num-nodes", "2", "--between-nodes", "shard", dram=f"{needed * 3 // 4}B")[0] == 0


def test_of_several_devices_state_lies_on_drives_which_checkpoints_copy(plan):
    def of(count, **ssd):
        ssd = ", ".join(f"{name}: {value}" for name, value in {"capacity_bytes": "1GiB", **ssd}.items())
        return plan("--devices", count, links=f"{LINKS}}}\nssd: {{{ssd}", dram="54MiB")[2]

    alone, four = (of(count)["policies"]["dram_only"]["bytes"] for count in ("1", "4"))
    for found in (alone, four):
        assert found["momentum"]["ssd"] == found["variance"]["ssd"] > 0 and "ssd" not in found["compute_weights"]
    assert four["momentum"]["ssd"] >= alone["momentum"]["ssd"]  # the machine's memory also holds all inputs
    with pytest.raises(ConfigError, match="checkpoint 'reference' of the tier `ssd` serves one device"):
        of("4", versions=2)
