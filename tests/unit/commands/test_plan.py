"""python -m lightning_cxl plan end to end: text, status, advice, JSON, errors; one and several devices."""

import functools
import json
import shlex
import sys

import pytest

from lightning_cxl.__main__ import main as programme
from lightning_cxl.commands import plan as command
from lightning_cxl.commands.plan import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import POLICIES
from lightning_cxl.weights.hf import model_on_meta
from tests.integration.llama import tiny_llama

MACHINE = """
name: test machine
tiers:
  - {{name: dram0, kind: dram, capacity_bytes: {dram}, adam_bytes_per_s: 200 GB/s,
     device_read_bytes_per_s: 200 GB/s, device_write_bytes_per_s: 200 GB/s}}
{card}
device: {{name: test gpu, memory_bytes: {gpu}, flops: 1.0e+14, h2d_bytes_per_s: 55 GB/s, d2h_bytes_per_s: 55 GB/s,
         count: {count}, is_host: {is_host}}}
{more}
"""
CARD = """
  - {{name: cxl0, kind: cxl, capacity_bytes: {cxl}, adam_bytes_per_s: 60 GB/s,
     device_read_bytes_per_s: 50 GB/s, device_write_bytes_per_s: 35 GB/s}}
"""
SSD = "ssd: {capacity_bytes: 1GiB, read_bytes_per_s: 1 GB/s, write_bytes_per_s: 0.5 GB/s}"
# the last two were keys of earlier files, and say nothing any more
LINKS = "links: {peer_bytes_per_s: 300 GB/s, network_bytes_per_s: 50 GB/s, sockets: 2, socket_bytes_per_s: 100 GB/s}"


def described(*, dram="1GiB", cxl="1GiB", gpu="1GiB", count=1, is_host="false", more=""):
    card = CARD.format(cxl=cxl) if cxl else ""
    return MACHINE.format(dram=dram, card=card, gpu=gpu, count=count, is_host=is_host, more=more)


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
    """Runs the command; returns status, text and the JSON it wrote."""

    def run(*arguments):
        data = tmp_path / "plan.json"
        status = main(["--model", model, "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


@pytest.fixture
def plan(run, tmp_path):
    """`run` on an invented machine."""

    def plan(*arguments, **machine):
        path = tmp_path / "machine.yaml"
        path.write_text(described(**machine))
        return run("--tiers", str(path), *arguments)

    return plan


@pytest.fixture
def small(plan):
    """`plan` with one tier of memory, and drives."""
    return lambda *arguments, **machine: plan(*arguments, **{"cxl": None, "more": SSD, **machine})


@pytest.fixture
def ranks(plan):
    """`plan` on a machine of four devices, with one tier of memory."""
    return lambda *arguments, **machine: plan(*arguments, **{"cxl": None, "count": 4, "more": LINKS, **machine})


def texts(data):
    return [each["text"] for each in data["what_fits"]]


def test_a_job_that_fits(plan):
    status, text, data = plan("--accumulate-grad-batches", "2")
    assert status == 0 and data["fits"] and "\nIt fits.\nnote: state_on_device: true" in text
    lines = text.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 118
    for name in (*POLICIES, "predicted", "momentum", "activations", "test gpu at its peak", "tokens/s"):
        assert name in text
    # JSON has everything, and adds up
    assert data["num_tokens"] == 1024
    assert data["device_bytes"] == sum(data["device_parts"].values())
    assert data["host_bytes"] == sum(data["roles"].values())
    assert list(data["policies"]) == list(POLICIES) and data["policy"] == "bandwidth"
    for each in data["policies"].values():
        for role, nbytes in data["roles"].items():
            assert sum(each["bytes"][role].values()) == pytest.approx(nbytes, abs=len(each["bytes"][role]))
            assert each["reasons"][role]
        predicted = each["predicted"]
        assert predicted["seconds"] == pytest.approx(sum(phase["seconds"] for phase in predicted["phases"].values()))
        assert predicted["tokens_per_s"] == pytest.approx(1024 / predicted["seconds"])
        assert predicted["of_dram_only"] == pytest.approx(data["predicted_dram_only_seconds"] / predicted["seconds"])
    assert data["policies"]["dram_only"]["predicted"]["of_dram_only"] == pytest.approx(1)


def test_options_change_the_bytes(plan):
    def roles(*arguments):
        return plan(*arguments)[2]["roles"]

    base, wide, small = roles(), roles("--precision", "32-true"), roles("--state", "8bit")
    assert wide["compute_weights"] == 2 * base["compute_weights"]
    assert small["momentum"] < 0.6 * base["momentum"]
    assert roles("--master", "fp32")["master_weights"] > 1.5 * base["master_weights"]
    assert roles("--seq", "1024")["activations"] == 2 * base["activations"]
    assert roles("--batch", "2")["activations"] == 2 * base["activations"]
    assert roles("--precision", "bf16-mixed")["activations"] == 2 * base["activations"]
    summed = roles("--accumulate-grad-batches", "2")["compute_grads"]
    assert 2 * base["compute_grads"] <= summed < 2.5 * base["compute_grads"]
    assert roles("--accumulate-grad-batches", "2", "--accumulate", "bf16")["compute_grads"] == base["compute_grads"]
    assert "compute_weights" not in roles("--no-stream-weights")
    assert "activations" not in roles("--no-activation-offload")
    long = ["--seq", "8192"]
    assert plan(*long, "--loss", "chunked")[2]["device_bytes"] < plan(*long)[2]["device_bytes"]
    overlaps = {name: plan("--overlap", name)[2]["overlap"] for name in ("auto", "none", "backward", "forward")}
    assert overlaps == {"auto": "forward", "none": "none", "backward": "both", "forward": "forward"}


def test_as_many_units_stay_on_the_device_as_have_room(plan):
    parts = [plan("--units-on-device", str(count))[2]["device_bytes"] for count in range(5)]
    assert parts[1] < parts[2] < parts[3]  # with the first one that streams, slots go as well
    for count in range(5):
        _, text, data = plan("--units-on-device", "auto", gpu=f"{int(parts[count] / 0.95) + 1}B")
        most = max(each for each in range(5) if parts[each] <= parts[count])
        assert data["device_bytes"] == parts[most]
        assert (f"{most} of 4 units stay there (`units_on_device: {most}`)" in " ".join(text.split())) == (most > 0)
    assert plan("--units-on-device", "auto", gpu="1MiB")[2]["device_bytes"] == parts[0]
    for option in (["--units-on-device", "1"], ["--state-on-device"]):
        with pytest.raises(ConfigError, match="is for one process"):
            plan(*option, count=2, cxl=None, more=LINKS)


def test_state_on_the_device_is_planned_and_its_gain_is_said(plan):
    _, _, data = plan()
    _, _, there = plan("--state-on-device")
    outside = 2 * 2048 * 256 + 256  # embedding, head and norm
    assert data["roles"]["momentum"] - there["roles"]["momentum"] == 4 * outside
    assert there["device_parts"]["optimizer state that stays on the device"] == 12 * outside
    assert there["device_parts"]["gradients that stay on the device"] == 2 * outside
    before, after = (each["policies"][each["policy"]]["predicted"]["seconds"] for each in (data, there))
    assert after < 0.99 * before
    assert f"the step {after:.3f} s instead of {before:.3f} s" in data["notes"][-1] and not there["notes"]
    full = f"{int(there['device_bytes'] / 0.95) - 1}B"
    assert not plan(gpu=full)[2]["notes"], "there is no room"
    _, _, both = plan("--state-on-device", "--units-on-device", "1")
    unit = (data["num_parameters"] - outside) // 4
    assert both["device_parts"]["optimizer state that stays on the device"] == 12 * (outside + unit)


def test_a_job_that_does_not_fit_the_host_says_what_would(plan, run):
    _, _, data = plan()
    room = f"{sum(data['roles'].values()) // 2 - (8 << 20)}B"
    status, text, data = plan(dram=room, cxl=room)
    assert status == 3 and not data["fits"] and data["fits_device"]
    assert "It does not fit host memory (policy bandwidth)." in text
    ways = texts(data)
    assert ways.index('state="bf16"') < ways.index("another card like the last one")
    assert all(f"  {each}:" in text for each in ways if len(each) < 80)
    # what is said is true, and what is said to be typed does it
    for each in data["what_fits"]:
        assert "--state 8bit" not in each["command"], "more than is needed"
        if each["command"] and "--ssd" not in each["command"]:
            assert f"    {each['command']}\n" in text
            status, _, found = run(*shlex.split(each["command"])[4:])
            assert status == 0
            assert (found["host_bytes"], found["device_bytes"]) == (each["host_bytes"], each["device_bytes"])
    assert plan("--seq", "256", dram=room, cxl=room)[0] == 3 or "sequence 256" in ways


def test_a_device_that_is_too_small(plan):
    _, _, data = plan()
    status, text, data = plan(gpu=f"{data['device_bytes'] - 1}B")
    assert status == 3 and not data["fits_device"]
    assert "DOES NOT FIT" in text and "It does not fit test gpu's memory." in text
    assert "sequence 256" in texts(data)
    assert not any("card" in each for each in texts(data))


def test_several_changes_where_no_single_one_helps(plan):
    """Device and host are too small: what is cheapest for each, and nothing that is not needed."""
    _, _, data = plan("--lora", "4")
    _, _, narrow = plan("--state", "8bit")
    chunked = plan("--loss", "chunked")[2]["device_bytes"]
    room = f"{sum(narrow['roles'].values()) // 2 + (1 << 20)}B"
    status, _, data = plan(dram=room, cxl=room, gpu=f"{chunked + (1 << 20)}B")
    assert status == 3
    first = data["what_fits"][0]["text"]
    assert 'state="8bit"' in first and "never holds all logits" in first and first.count(", ") == 1
    assert shlex.split(data["what_fits"][0]["command"])[-4:] == ["--loss", "chunked", "--state", "8bit"]
    assert any('lora={"r": 16}' in each for each in texts(data)[1:])


@pytest.mark.parametrize("is_host", ["false", "true"])
def test_auto_is_what_a_run_takes(plan, is_host):
    assert plan("--policy", "auto", is_host=is_host)[2]["policy"] == "bandwidth"
    data = plan("--policy", "by_role", is_host=is_host)[2]
    on = {role: set(tiers) for role, tiers in data["policies"]["by_role"]["bytes"].items()}
    assert on["momentum"] == {"dram0"} and on["compute_weights"] == {"dram0" if is_host == "true" else "cxl0"}
    room = f"{data['roles']['momentum'] // 2}B"
    on = plan("--policy", "by_role", dram=room, is_host="false")[2]["policies"]["by_role"]["bytes"]
    assert sum(tiers.get("dram0", 0) for tiers in on.values()) == pytest.approx(int(room[:-1]), abs=20)


def test_the_cpu_as_device(plan):
    status, text, data = plan(is_host="true")
    assert status == 0
    assert data["host_bytes"] == sum(data["roles"].values()) + data["device_bytes"]
    assert "that the CPU works in" in text and "at its peak" not in text
    assert data["overlap"] == "none"
    with pytest.raises(ConfigError, match="needs weights that stream"):
        plan("--overlap", "backward", is_host="true")
    assert plan("--overlap", "backward", "--stream-weights", is_host="true")[2]["overlap"] == "both"


def test_the_programme_exits_with_the_status_and_one_line_of_error(model, tmp_path, monkeypatch, capsys):
    def ended(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning_cxl", "plan", "--tiers", str(machine), "--model", *arguments])
        with pytest.raises(SystemExit) as end:
            programme()
        return end.value.code

    machine = tmp_path / "machine.yaml"
    machine.write_text(described(dram="1MiB", cxl="1MiB"))
    assert ended(model, "--seq", "64") == 3
    shown = capsys.readouterr().out
    for text in ("It does not fit", "Nothing helps: use a smaller model", "dram_only does not fit: cannot place"):
        assert text in shown
    assert ended(str(tmp_path)).startswith("ConfigError: folder ")


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("nobody/nothing", "", r"no known shape \(.*llama-3.1-8b.* and the hub cannot be asked"),
        ("llama-3.1-8", "", r"did you mean llama-3.1-8b \(meta-llama/Llama-3.1-8B\)"),
        (".", '{"model_type": "not a model"}', "cannot be used"),
        (".", '{"model_type": "llama", "quantization_config": {"bits": 4}}', "are quantised, and `plan` quantises"),
    ],
)
def test_models_that_cannot_be_planned(plan, tmp_path, monkeypatch, model, config, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        plan("--model", model)


def test_state_that_memory_cannot_hold_lies_on_the_tier_ssd(small):
    everything = small(dram="1GiB")[2]
    assert everything["ssd"]["used_bytes"] == everything["ssd"]["num_records"] == 0
    assert everything["ssd"]["written_bytes_per_step"] == 0
    dram = everything["host_bytes"] * 9 // 10
    status, text, data = small(dram=f"{dram}B")
    assert status == 0 and data["fits"] and all(each["fits"] for each in data["policies"].values())
    held, predicted = data["policies"]["bandwidth"]["bytes"], data["policies"]["bandwidth"]["predicted"]
    on_ssd = {role: tiers["ssd"] for role, tiers in held.items() if "ssd" in tiers}
    assert set(on_ssd) == {"momentum", "variance", "master_weights"}
    assert sum(on_ssd.values()) == data["ssd"]["used_bytes"] == data["ssd"]["written_bytes_per_step"] > 0
    assert sum(tiers.get("dram0", 0) for tiers in held.values()) == data["host_bytes"] <= dram
    assert data["host_bytes_left"] == dram - data["host_bytes"]
    assert predicted["seconds"] >= data["ssd"]["used_bytes"] / 0.5e9
    dram_only = data["predicted_dram_only_seconds"]
    assert predicted["ssd_seconds"] == pytest.approx(predicted["seconds"] - dram_only, rel=0.01)
    assert f"{data['ssd']['written_bytes_per_step'] / 1e9:.3g} GB written per step" in " ".join(text.split())
    # without drives these are advised
    status, _, data = small(dram=f"{dram}B", more="")
    assert status == 3 and data["ssd"] is None
    assert any("on a drive" in each for each in texts(data))
    assert not any("--ssd" in each["command"] for each in data["what_fits"]), "the machine is that of a file"


def test_a_folder_of_this_machine(unknown_speeds, tmp_path):
    needed = unknown_speeds(topology=Topology.fake())[2]["host_bytes"]
    few = Topology.fake((f"{needed * 9 // 10}B",), ())
    ssd = ("--ssd", str(tmp_path / "drive"), "--ssd-budget", "1GiB")
    status, text, data = unknown_speeds(*ssd, topology=few)
    assert status == 0 and data["ssd"]["capacity_bytes"] == 1 << 30 and data["ssd"]["used_bytes"] > 0
    assert "GB written per step" in text
    data = unknown_speeds(*ssd, "--ssd-checkpoint", "reference", topology=few)[2]
    assert data["ssd"]["versions"] == 2
    with pytest.raises(ConfigError, match="--ssd-budget needs --ssd"):
        unknown_speeds("--ssd-budget", "1GiB", topology=few)


@pytest.fixture
def unknown_speeds(run, monkeypatch):
    """`run` on this machine, whose speeds nobody knows."""
    asked = []
    monkeypatch.setattr(command, "machine_of", lambda topology, device: asked.append(device))
    monkeypatch.setattr(command, "devices_apart", lambda: [])

    def plan(*arguments, topology, together=None):
        monkeypatch.setattr(command.Topology, "detect", lambda: topology)
        if together is not None:
            monkeypatch.setattr(command.Topology, "host_available_bytes", lambda _: together)
        return run(*arguments)

    yield plan
    assert set(asked) == {"cpu"}


def test_bytes_are_planned_with_what_is_free_where_speeds_are_not_known(unknown_speeds):
    status, text, data = unknown_speeds(topology=Topology.fake(("1GiB",), ("2GiB", "3GiB")))
    assert [tier["capacity_bytes"] >> 30 for tier in data["machine"]["tiers"].values()] == [1, 5]
    assert data["host_bytes"] + data["host_bytes_left"] == 6 << 30
    assert status == 0 and data["fits"] and data["policy"] == "by_role"
    assert text.count("calibrate") == 1 and not any(word in text for word in ("TFLOP", "tokens/s", "step s"))
    assert data["predicted_dram_only_seconds"] is data["machine"]["device"]["flops"] is None
    assert {name for name, each in data["policies"].items() if each["needs_speeds"]} == {"bandwidth"}
    for name, each in data["policies"].items():
        assert each["predicted"] is None
        assert each["fits"] is (None if name == "bandwidth" else True)
        held = sum(sum(tiers.values()) for tiers in each["bytes"].values())
        assert name == "bandwidth" or held == pytest.approx(sum(data["roles"].values()), abs=20)
    with pytest.raises(ConfigError, match=r"'bandwidth' needs the speeds.*calibrate"):
        unknown_speeds("--policy", "bandwidth", topology=Topology.fake())


def test_tiers_of_this_machine_that_share_memory_hold_it_once(unknown_speeds):
    needed = unknown_speeds(topology=Topology.fake(("1GiB",), ()))[2]["host_bytes"]
    for room, expected in ((needed + (1 << 20), 0), (needed - (1 << 20), 3)):
        assert unknown_speeds("--policy", "interleave", topology=Topology.fake((f"{room}B",), ()))[0] == expected
        # a control group's limit counts once, not for every tier
        status, text, _ = unknown_speeds(topology=Topology.fake(("1GiB",), ("1GiB",)), together=room)
        assert status == expected and "together" in text


def test_a_published_shape_has_the_published_number_of_parameters():
    """The safetensors metadata of mistral-7b on the hub; sizes of others are in tests/unit/lab/test_pools.py."""
    model = model_on_meta("MISTRAL-7B")
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_248_023_552
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_state_is_held_once_by_all_ranks_of_a_machine_and_inputs_by_each(ranks):
    alone, four = (ranks("--devices", count)[2] for count in ("1", "4"))
    for role in (TensorRole.MOMENTUM, TensorRole.VARIANCE):
        assert four["roles"][role.value] == alone["roles"][role.value]
    assert four["roles"]["activations"] == 4 * alone["roles"]["activations"]
    assert four["num_tokens"] == 4 * alone["num_tokens"]
    # weights outside of units are cut, too, and then lie on the host
    assert four["roles"]["compute_weights"] == 2 * four["num_parameters"]
    assert alone["roles"]["compute_weights"] < four["roles"]["compute_weights"]


def test_machines_that_replicate_hold_all_and_others_a_part(ranks):
    one = ranks()[2]
    replicas, parts = (ranks("--num-nodes", "2", "--between-nodes", how)[2] for how in ("replicate", "shard"))
    assert replicas["roles"] == one["roles"]
    for role, nbytes in one["roles"].items():
        assert parts["roles"][role] == (nbytes if role == "activations" else nbytes / 2)
    assert replicas["num_tokens"] == parts["num_tokens"] == 2 * one["num_tokens"]
    moved = [data["ranks"]["device_bytes_per_step"] for data in (one, replicas, parts)]
    weights = 2 * one["num_parameters"]
    assert [each["all-reduce between machines"] for each in moved] == [0, 2 * 1 / 2 * weights / 4, 0]
    assert parts["ranks"]["predicted_busy_seconds"]["network"] > replicas["ranks"]["predicted_busy_seconds"]["network"]


def test_gradients_that_wait_on_the_devices_are_reduced_once(ranks):
    every, last = (ranks("--accumulate-grad-batches", "3", *more)[2] for more in ((), ("--no-sync",)))
    moved = [data["ranks"]["device_bytes_per_step"] for data in (every, last)]
    assert moved[0]["reduce-scatter"] == 3 * moved[1]["reduce-scatter"]
    assert last["device_parts"]["gradients that wait for the last micro-batch"] == 2 * last["num_parameters"]
    assert last["roles"]["compute_grads"] < every["roles"]["compute_grads"]
    assert moved[1]["copies from the device"] < moved[0]["copies from the device"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "5"], "has 4 x test gpu, got 5 devices: choose 1 to 4 .*, write `count: 5` under `device`"),
        (["--devices", "0"], r"got 0 devices: choose 1 to 4 of each machine, .* \(--num-nodes\)$"),
        (["--ssd", "."], "--ssd is a folder of this machine"),
        (["--seq", "100000"], "has positions for .* tokens .*give --seq "),
        (["--seq", "0"], "sequence must be at least 1"),
        (["--tiers", "none.yaml"], "cannot read the machine file"),
        (["--policy", "fastest"], "no policy 'fastest'"),
        (["--num-nodes", "0"], "num_nodes must be at least 1, got 0"),
        (["--lora", "4", "--quantize", "4bit"], "count its compute weights once for each"),
        (["--no-stream-weights"], "several devices keep shards of weights on the host"),
    ],
)
def test_what_cannot_be_is_refused(ranks, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ranks(*arguments)


def test_links_that_are_not_known(ranks):
    text = " ".join(ranks(more="")[1].split())
    assert "links between devices are not known: what they exchange is counted as going through host memory" in text
    with pytest.raises(ConfigError, match="machines exchange data, and machine `test machine` does not say how fast"):
        ranks("--num-nodes", "2", more="")


def test_what_does_not_fit_may_be_cut_over_the_machines(ranks):
    needed = ranks("--num-nodes", "2", "--between-nodes", "replicate")[2]["host_bytes"]
    status, _, data = ranks("--num-nodes", "2", "--between-nodes", "replicate", dram=f"{needed * 3 // 4}B")
    assert status == 3 and "the model cut over all machines" in [each["text"] for each in data["what_fits"]]
    assert ranks("--num-nodes", "2", "--between-nodes", "shard", dram=f"{needed * 3 // 4}B")[0] == 0


def test_of_several_devices_state_lies_on_drives_which_checkpoints_copy(ranks):
    def of(count, **ssd):
        ssd = ", ".join(f"{name}: {value}" for name, value in {"capacity_bytes": "1GiB", **ssd}.items())
        return ranks("--devices", count, more=f"{LINKS}\nssd: {{{ssd}}}", dram="54MiB")[2]

    alone, four = (of(count)["policies"]["dram_only"]["bytes"] for count in ("1", "4"))
    for found in (alone, four):
        assert found["momentum"]["ssd"] == found["variance"]["ssd"] > 0 and "ssd" not in found["compute_weights"]
    assert four["momentum"]["ssd"] >= alone["momentum"]["ssd"]  # the machine's memory also holds all inputs
    with pytest.raises(ConfigError, match="checkpoint 'reference' of the tier `ssd` serves one device"):
        of("4", versions=2)
