"""What a run tells while it goes on: numbers for loggers, and names in torch's profiler."""

import csv
import gc
import html
import json
import pickle
import re
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch.cuda import _memory_viz
from transformers import TrainerCallback

from lightning_cxl import CXLFabricStrategy, timing
from lightning_cxl.optim.cpu_adam import AdamStep
from lightning_cxl.text import format_bytes
from tests.integration import accelerate_loop, hf_trainer
from tests.integration.training import make_fabric, offload, run
from tests.models import Task, TinyTransformer, token_data

NAMES = {
    *("step_s", "update_s", "update_hidden_pct", "stall_update_s", "stall_gradients_s"),
    *("h2d_GBps", "d2h_GBps", "dram_bytes", "pinned_bytes"),
}
"""Of every run on a device apart; others depend on the machine and on the options."""


def logged(tmp_path, options, **given):
    given |= {"logger": CSVLogger(tmp_path), "log_every_n_steps": 2, "enable_checkpointing": True}
    _, trainer = run(options, lambda: Task(TinyTransformer(dropout=0.0)), 8, **given)
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    return {row["step"]: row for row in rows if "cxl/step_s" in row}, trainer


def numbers(row):
    return {name.removeprefix("cxl/"): value for name, value in row.items() if name.startswith("cxl/")}


def test_lightnings_loggers_get_numbers_of_the_steps_between_two_lines(tmp_path):
    before = timing.totals().get("h2d_bytes", 0.0)
    rows, trainer = logged(tmp_path, {})
    assert list(rows) == [1, 3, 5]  # the last steps are over when no batch comes any more
    for row in map(numbers, rows.values()):
        assert row.keys() >= NAMES
        assert 0 < row["update_s"] < row["step_s"] and row["dram_bytes"] > 0
    copied = sum(2 * row["step_s"] * row["h2d_GBps"] * 1e9 for row in map(numbers, rows.values()))
    assert 0.5 * (timing.totals()["h2d_bytes"] - before) < copied <= timing.totals()["h2d_bytes"] - before
    streamed = trainer.strategy.report()["streamed"]
    assert timing.totals()["h2d_bytes"] - before >= streamed["num_fetches"] * streamed["host_bytes"] / 3


def test_a_buffer_that_is_collected_while_totals_are_read_counts_itself():
    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            timing.add("save_s", 1.0)

    before, thresholds = timing.totals().get("save_s", 0.0), gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            Cycle()
            timing.totals()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert timing.totals()["save_s"] == before + 100


@pytest.mark.parametrize("overlap_step", [True, False])
def test_updates_count_as_hidden_where_the_training_does_not_wait_for_them(tmp_path, overlap_step, monkeypatch):
    apply = AdamStep._apply

    def slow(*args):
        time.sleep(0.01)
        apply(*args)

    monkeypatch.setattr(AdamStep, "_apply", slow)
    slow_data = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.2))
    rows, _ = logged(tmp_path, {"overlap_step": overlap_step}, callbacks=[slow_data])
    for row in map(numbers, rows.values()):
        assert row["update_s"] >= 0.01
        assert row["update_hidden_pct"] > 50 if overlap_step else row["update_hidden_pct"] < 20


def test_what_spills_is_counted(tmp_path):
    with pytest.warns(Warning, match="went to"):
        rows, _ = logged(tmp_path, offload(tiers={"dram": "1GiB", "cxl": "200KiB"}, tier_rules={"*": "cxl"}))
    assert numbers(rows[1])["spilled_bytes"] > 0


def test_the_trainer_of_transformers_logs_them_where_something_reports(tmp_path):
    class Listens(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs, **_):
            self.seen.append(set(logs))

    for report_to in ([], ["anything"]):
        listener = Listens()
        trainer = hf_trainer.make_trainer(tmp_path, {}, parts={"callbacks": [listener]}, logging_steps=2)
        trainer.args.report_to = report_to
        trainer.train()
        trainer.end()
        names = {f"cxl/{name}" for name in NAMES}
        assert [names <= seen for seen in listener.seen[:-1]] == [bool(report_to)] * 4


def test_accelerates_trackers_get_them_with_what_the_user_logs():
    seen = []
    accelerator = accelerate_loop.make_accelerator({})
    accelerator.trackers = [SimpleNamespace(log=lambda values, step: seen.append(values), name="seen")]
    for step, loss in enumerate(accelerate_loop.steps(accelerator, *accelerate_loop.prepared(accelerator))):
        accelerator.log({"loss": loss}, step=step)
        accelerator.log({"again": loss}, step=step)
    accelerator.free_memory()
    first, again = seen[2:4]
    assert first["loss"] > 0 and {f"cxl/{name}" for name in NAMES} <= first.keys()
    assert set(again) == {"again"}, "each step once"


def test_fabrics_strategy_returns_them():
    fabric = make_fabric(CXLFabricStrategy())
    model = TinyTransformer()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert fabric.strategy.metrics() == {}
    for batch in list(token_data())[:2]:
        fabric.backward(accelerate_loop.loss_of(model, fabric.to_device(batch)))
        optimizer.step()
        optimizer.zero_grad()
    assert {f"cxl/{name}" for name in NAMES} <= fabric.strategy.metrics().keys()
    assert fabric.strategy.metrics() == {}
    fabric.strategy.teardown()
    assert fabric.strategy.metrics() == {}, "of no run"


def rows_of(page):
    rows = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in page.split("<tr>")[1:])
    return [[html.unescape(cell).strip() for cell in row] for row in rows]


def test_a_page_about_the_run_has_the_numbers_of_its_report(tmp_path):
    options = {"report": str(tmp_path / "pages"), "tier_rules": {"model.blocks.0": "dram"}, "state": "bf16"}
    _, trainer = run(options, lambda: Task(TinyTransformer(dropout=0.0)), 8)
    report, text = trainer.strategy.report(), (tmp_path / "pages/run.html").read_text()
    rows = rows_of(text)
    for role, tiers in report["peak_roles"].items():
        planned = report["planned_roles"].get(role, {}).get("dram")
        sizes = ["-" if planned is None else format_bytes(planned), format_bytes(report["roles"][role]["dram"])]
        assert [role, "dram", *sizes, format_bytes(tiers["dram"])] in rows
    assert ["state", '"bf16"', "argument"] in rows
    assert [str(report["policy"])] in [row[1:] for row in rows if row[0] == "policy"]
    assert "<svg " in text and "<title>update: " in text
    assert "<th class=n>peak</th>" in text and "<td>20</td>" in text, "numbers are right where a column has no words"
    assert "Dummy" not in text, "threads of torch have names"
    assert set(re.findall(r"<(\w+)[^>]* (?:src|href)=", text)) == {"link"}, "nothing from elsewhere"
    events = json.loads((tmp_path / "pages/run.trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    for what in ("forward of", "recompute of", "fetch"):
        assert {f"{what} model.blocks.{index}" for index in range(3)} <= set(names)
    assert len(names) < 8192 and names.count("step") == 1 and all(event["dur"] >= 0 for event in events)
    json.dumps(report)
    check_snapshot((tmp_path / "pages/run.memory.pickle").read_bytes(), report)


def check_snapshot(pickled, report):
    """The functions of torch read it, and add up what the report has."""
    snapshot = pickle.loads(pickled)
    peak = {f"{tier}:{role}": size for role, tiers in report["peak_roles"].items() for tier, size in tiers.items()}
    found = {each["segment_type"]: each["total_size"] for each in snapshot["segments"]}
    assert found == {name: size for name, size in peak.items() if size}
    assert f"total_reserved: {_memory_viz.Bytes(sum(peak.values()))}\n" in _memory_viz.segsum(snapshot)
