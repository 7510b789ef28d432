import functools
import json
import shlex

import pytest

from lightning_cxl.commands import plan as command
from lightning_cxl.commands.plan import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import POLICIES
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
    def run(*arguments):
        data = tmp_path / "plan.json"
        status = main(["--model", model, "--seq", "512", "--json", str(data), *arguments])
        return status, capsys.readouterr().out, json.loads(data.read_text())

    return run


@pytest.fixture
def plan(run, tmp_path):
    def plan(*arguments, **machine):
        path = tmp_path / "machine.yaml"
        path.write_text(described(**machine))
        return run("--tiers", str(path), *arguments)

    return plan


@pytest.fixture
def ranks(plan):
    """`plan` on a machine of four devices, with one tier of memory."""
    return lambda *arguments, **machine: plan(*arguments, **{"cxl": None, "count": 4, "more": LINKS, **machine})


def texts(data):
    return [each["text"] for each in data["what_fits"]]


def test_a_job_that_fits(plan):
    status, text, data = plan("--accumulate-grad-batches", "2")
    assert status == 0 and data["fits"] and "\nIt fits.\nnote: state_on_device: true" in text
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


def test_state_is_held_once_by_all_ranks_of_a_machine_and_inputs_by_each(ranks):
    alone, four = (ranks("--devices", count)[2] for count in ("1", "4"))
    for role in (TensorRole.MOMENTUM, TensorRole.VARIANCE):
        assert four["roles"][role.value] == alone["roles"][role.value]
    assert four["roles"]["activations"] == 4 * alone["roles"]["activations"]
    assert four["num_tokens"] == 4 * alone["num_tokens"]
    # weights outside of units are cut, too, and then lie on the host
    assert four["roles"]["compute_weights"] == 2 * four["num_parameters"]
    assert alone["roles"]["compute_weights"] < four["roles"]["compute_weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody/nothing"], r"no known shape \(.*llama-3.1-8b.* and the hub cannot be asked"),
        (["--model", "quantised"], "are quantised, and `plan` quantises"),
        (["--devices", "5"], "has 4 x test gpu, got 5 devices: choose 1 to 4 .*, write `count: 5` under `device`"),
        (["--ssd", "."], "--ssd is a folder of this machine"),
        (["--seq", "100000"], "has positions for .* tokens .*give --seq "),
        (["--lora", "4", "--quantize", "4bit"], "count its compute weights once for each"),
        (["--no-stream-weights"], "several devices keep shards of weights on the host"),
    ],
)
def test_what_cannot_be_is_refused(ranks, arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quantised").mkdir()
    config = '{"model_type": "llama", "quantization_config": {"bits": 4}}'
    (tmp_path / "quantised" / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        ranks(*arguments)
