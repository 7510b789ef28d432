"""`python -m lightning_cxl plan` end to end: text, status, advice, JSON, errors."""

import json
import shlex
import subprocess
import sys

import pytest

from lightning_cxl.commands import plan as command
from lightning_cxl.commands.plan import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import load_machine
from lightning_cxl.machine.topology import Topology
from lightning_cxl.planning.policies import POLICIES
from lightning_cxl.weights.hf import model_on_meta
from tests.integration.llama import tiny_llama

MACHINE = """
name: test machine
tiers:
  - {{name: dram0, kind: dram, capacity_bytes: {dram}, adam_bytes_per_s: 200 GB/s,
     device_read_bytes_per_s: 200 GB/s, device_write_bytes_per_s: 200 GB/s}}
  - {{name: cxl0, kind: cxl, capacity_bytes: {cxl}, adam_bytes_per_s: 60 GB/s,
     device_read_bytes_per_s: 50 GB/s, device_write_bytes_per_s: 35 GB/s}}
device: {{name: test gpu, memory_bytes: {gpu}, flops: 1.0e+14, h2d_bytes_per_s: 55 GB/s, d2h_bytes_per_s: 55 GB/s,
         is_host: {is_host}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(
        4, vocab_size=2048, hidden_size=256, intermediate_size=768, max_position_embeddings=1 << 14
    ).config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep_model")
    tiny_llama(24, vocab_size=512, hidden_size=128, intermediate_size=384).config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def plan(model, tmp_path, capsys):
    """Runs the command on an invented machine; returns status, text and the JSON it wrote."""

    def run(*arguments, dram="1GiB", cxl="1GiB", gpu="1GiB", is_host="false", model=model):
        machine, data = tmp_path / "machine.yaml", tmp_path / "plan.json"
        machine.write_text(MACHINE.format(dram=dram, cxl=cxl, gpu=gpu, is_host=is_host))
        status = main(["--model", model, "--tiers", str(machine), "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    run.data = tmp_path / "plan.json"
    return run


def test_a_job_that_fits(plan):
    status, text, data = plan()
    assert status == 0 and data["fits"]
    assert text.rstrip().endswith("It fits.")
    lines = text.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 118
    for name in (*POLICIES, "predicted", "momentum", "activations", "test gpu at its peak", "tokens/s"):
        assert name in text
    assert "measured" not in text


def test_json_has_everything_and_adds_up(plan):
    _, _, data = plan("--accumulate-grad-batches", "2")
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
    assert overlaps == {"auto": "forward", "none": "none", "backward": "backward", "forward": "forward"}


def test_a_job_that_does_not_fit_the_host_says_what_would(plan):
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
            assert main(shlex.split(each["command"])[4:]) == 0
            found = json.loads(plan.data.read_text())
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


def test_a_sequence_that_is_longer_than_the_model_has_positions_for(plan):
    with pytest.raises(ConfigError, match=r"has positions for .* tokens .*give --seq "):
        plan("--seq", "100000")


@pytest.mark.parametrize("is_host", ["false", "true"])
def test_auto_is_what_a_run_takes(plan, is_host):
    assert plan("--policy", "auto", is_host=is_host)[2]["policy"] == "bandwidth"
    data = plan("--policy", "by_role", is_host=is_host)[2]
    on = {role: set(tiers) for role, tiers in data["policies"]["by_role"]["bytes"].items()}
    assert on["momentum"] == {"dram0"} and on["compute_weights"] == {"dram0" if is_host == "true" else "cxl0"}
    room = f"{data['roles']['momentum'] // 2}B"
    on = plan("--policy", "by_role", dram=room, is_host="false")[2]["policies"]["by_role"]["bytes"]
    assert sum(tiers.get("dram0", 0) for tiers in on.values()) == pytest.approx(int(room[:-1]), abs=20)


def test_nothing_helps(plan):
    status, text, data = plan(dram="1MiB", cxl="1MiB")
    assert status == 3 and data["what_fits"] == []
    assert "use a smaller model" in text
    assert "dram_only does not fit: cannot place" in text


def test_the_cpu_as_device(plan):
    status, text, data = plan(is_host="true")
    assert status == 0
    assert data["host_bytes"] == sum(data["roles"].values()) + data["device_bytes"]
    assert "that the CPU works in" in text and "at its peak" not in text
    assert data["overlap"] == "none"
    with pytest.raises(ConfigError, match="needs weights that stream"):
        plan("--overlap", "backward", is_host="true")
    assert plan("--overlap", "backward", "--stream-weights", is_host="true")[2]["overlap"] == "backward"


def test_a_picture_is_no_longer_drawn(plan, tmp_path):
    with pytest.raises(ConfigError, match=r"--plot was removed: write the plan with --json"):
        plan("--plot", str(tmp_path / "plan.png"))


def test_the_programme_exits_with_the_status_and_one_line_of_error(model, tmp_path):
    machine = tmp_path / "machine.yaml"
    machine.write_text(MACHINE.format(dram="1MiB", cxl="1MiB", gpu="1GiB", is_host="false"))
    command = [sys.executable, "-m", "lightning_cxl", "plan", "--tiers", str(machine), "--model"]
    done = subprocess.run([*command, model, "--seq", "64"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "It does not fit" in done.stdout
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("ConfigError: folder ") and "Traceback" not in failed.stderr


def test_unknown_names(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no known shape \(.*llama-3.1-8b.* and the hub cannot be asked"):
        plan(model="nobody/nothing")
    with pytest.raises(ConfigError, match=r"did you mean llama-3.1-8b \(meta-llama/Llama-3.1-8B\)"):
        plan(model="llama-3.1-8")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "not a model"}')
    with pytest.raises(ConfigError, match="cannot be used"):
        plan(model=str(tmp_path / "bad"))
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "llama", "quantization_config": {"bits": 4}}')
    with pytest.raises(ConfigError, match=r"the weights of .* are quantised, and `plan` quantises itself"):
        plan(model=str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match="no policy 'fastest'"):
        plan("--policy", "fastest")
    with pytest.raises(ConfigError, match="sequence must be at least 1"):
        plan("--seq", "0")
    with pytest.raises(ConfigError, match="cannot read the machine file"):
        main(["--model", "llama-3.1-8b", "--tiers", str(tmp_path / "none.yaml")])


def test_this_machine_is_planned_for_with_what_is_free_on_it(model, tmp_path, capsys, monkeypatch):
    asked = {}
    described = tmp_path / "machine.yaml"
    described.write_text(MACHINE.format(dram="1GiB", cxl="1GiB", gpu="0", is_host="true"))

    def known(topology, device, *, capacity_bytes):
        asked.update(device=device, **capacity_bytes)
        return load_machine(described)

    monkeypatch.setattr(command, "machine_of", known)
    monkeypatch.setattr(command.Topology, "detect", lambda: Topology.fake(("3GiB",), ("5GiB", "6GiB")))
    monkeypatch.setattr(command, "devices_apart", lambda: [])
    assert main(["--model", model, "--seq", "64"]) == 0
    assert asked == {"device": "cpu", "dram": 3 << 30, "cxl": 11 << 30}


def texts(data):
    return [each["text"] for each in data["what_fits"]]


SSD = "ssd: {{capacity_bytes: {size}, read_bytes_per_s: 1 GB/s, write_bytes_per_s: 0.5 GB/s}}\n"


@pytest.fixture
def small(model, tmp_path, capsys):
    """Runs the command where memory is one tier, too small for the job, with what a file says about the tier ssd."""

    def run(*arguments, dram, ssd=None, model=model):
        ssd = SSD.format(size="1GiB") if ssd is None else ssd
        machine, data = tmp_path / "machine.yaml", tmp_path / "plan.json"
        text = MACHINE.format(dram=dram, cxl="1GiB", gpu="1GiB", is_host="false")
        card = text.index("  - {name: cxl0")
        machine.write_text(text[:card] + text[text.index("device:") :] + ssd)
        status = main(["--model", model, "--tiers", str(machine), "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


def test_state_that_memory_cannot_hold_lies_on_the_tier_ssd(small):
    everything = small(dram="1GiB")[2]
    assert everything["ssd"]["used_bytes"] == everything["ssd"]["num_records"] == 0
    assert everything["ssd"]["written_bytes_per_step"] == 0
    dram = everything["host_bytes"] * 9 // 10
    status, text, data = small(dram=f"{dram}B")
    assert status == 0 and data["fits"]
    on_ssd = {role: tiers["ssd"] for role, tiers in data["policies"]["bandwidth"]["bytes"].items() if "ssd" in tiers}
    assert set(on_ssd) == {"momentum", "variance", "master_weights"}
    assert sum(on_ssd.values()) == data["ssd"]["used_bytes"] == data["ssd"]["written_bytes_per_step"] > 0
    in_memory = sum(tiers.get("dram0", 0) for tiers in data["policies"]["bandwidth"]["bytes"].values())
    assert in_memory == data["host_bytes"] <= dram
    assert data["host_bytes_left"] == dram - data["host_bytes"]
    predicted = data["policies"]["bandwidth"]["predicted"]
    assert predicted["seconds"] >= data["ssd"]["used_bytes"] / 0.5e9
    dram_only = data["predicted_dram_only_seconds"]
    assert predicted["ssd_seconds"] == pytest.approx(predicted["seconds"] - dram_only, rel=0.01)
    said = " ".join(text.split())
    written = f"{data['ssd']['written_bytes_per_step'] / 1e9:.3g} GB written per step"
    assert "memory left over" in said and written in said
    assert max(map(len, text.splitlines())) <= 118
    # every policy plans the same job
    assert all(each["fits"] for each in data["policies"].values())


def test_what_would_make_it_fit_names_the_tier_ssd(small):
    dram = f"{small(dram='1GiB')[2]['host_bytes'] * 9 // 10}B"
    status, _, data = small(dram=dram, ssd="")
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


def test_a_folder_of_this_machine_is_none_of_another(plan, tmp_path):
    with pytest.raises(ConfigError, match="--ssd is a folder of this machine"):
        plan("--ssd", str(tmp_path))


@pytest.fixture
def unknown_speeds(model, tmp_path, capsys, monkeypatch):
    """Runs the command on a machine whose speeds nobody knows; returns status, text and the JSON it wrote."""
    monkeypatch.setattr(command, "machine_of", lambda *_, **__: None)
    monkeypatch.setattr(command, "devices_apart", lambda: [])

    def run(*arguments, topology, together=None):
        monkeypatch.setattr(command.Topology, "detect", lambda: topology)
        if together is not None:
            monkeypatch.setattr(command.Topology, "host_available_bytes", lambda _: together)
        data = tmp_path / "plan.json"
        status = main(["--model", model, "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


def test_bytes_are_planned_where_speeds_are_not_known(unknown_speeds):
    status, text, data = unknown_speeds(topology=Topology.fake(("1GiB",), ("1GiB",)))
    assert status == 0 and data["fits"] and data["policy"] == "by_role"
    assert text.count("calibrate") == 1 and "not known" in text and text.rstrip().endswith("It fits.")
    assert not any(word in text for word in ("TFLOP", "tokens/s", "of DRAM only", "step s"))
    assert data["predicted_dram_only_seconds"] is None
    assert data["machine"]["has_speeds"] is False and data["machine"]["device"]["flops"] is None
    assert {name for name, each in data["policies"].items() if each["needs_speeds"]} == {"bandwidth"}
    for name, each in data["policies"].items():
        assert each["predicted"] is None
        assert each["fits"] is (None if name == "bandwidth" else True)
        held = sum(sum(tiers.values()) for tiers in each["bytes"].values())
        assert name == "bandwidth" or held == pytest.approx(sum(data["roles"].values()), abs=20)
    with pytest.raises(ConfigError, match=r"'bandwidth' needs the speeds.*calibrate"):
        unknown_speeds("--policy", "bandwidth", topology=Topology.fake())


def test_tiers_of_this_machine_that_share_memory_hold_it_once(unknown_speeds):
    emulated = Topology.fake(("1GiB",), ())
    _, _, data = unknown_speeds(topology=emulated)
    needed = data["host_bytes"]
    room = f"{needed + (1 << 20)}B"
    assert unknown_speeds("--policy", "interleave", topology=Topology.fake((room,), ()))[0] == 0
    room = f"{needed - (1 << 20)}B"
    assert unknown_speeds("--policy", "interleave", topology=Topology.fake((room,), ()))[0] == 3
    # a control group's limit counts once, not for every tier
    two = Topology.fake(("1GiB",), ("1GiB",))
    status, text, _ = unknown_speeds(topology=two, together=needed - (1 << 20))
    assert status == 3 and "together" in text
    assert unknown_speeds(topology=two, together=needed + (1 << 20))[0] == 0


PARAMETERS = {
    "qwen2.5-7b": 7_615_616_512,  # arXiv 2507.03305's authors, numa_allocation_patch.py
    # safetensors metadata on the Hugging Face hub
    "qwen2.5-0.5b": 494_032_768,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes_have_the_published_number_of_parameters(name):
    model = model_on_meta(name.upper())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
