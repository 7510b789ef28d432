"""One training run under a limit on the memory of its control group, in a process of its own: test_memory_limits.py.

The limit is what the process uses before it makes the model, a part of the bytes that are planned, and some more.
"""

import json
import os
import warnings

import torch

from lightning_cxl import TierFullError
from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.dry_run import measure
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.planning.job import model_job
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

VOCAB, WIDTH, DEPTH, BATCH, LENGTH = 1024, 1024, 5, 2, 128


def make_model():
    """65 million parameters."""
    return TinyTransformer(VOCAB, WIDTH, DEPTH)


def planned():
    """Bytes of all roles, and of what the CPU works in."""
    with torch.device("meta"):
        model = make_model()
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    config, load = OffloadConfig(), Workload(batch=BATCH, sequence=LENGTH, computes_on_host=True)

    def loss():
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    measured = measure(model, config, load, loss)
    job = model_job("planned", list_tensors(model, None, config, load, measured=measured))
    return sum(job.bytes_of().values()), job.device_bytes


def take_the_checks_away():
    from lightning_cxl.machine.topology import Topology
    from lightning_cxl.planning import decide

    decide.check_fits = lambda *_, **__: None
    Topology.node_free_bytes = Topology.host_available_bytes = lambda *_: 1 << 50


def main(group, limit, usage, notes, part, extra, checked):
    """Note what is known before the run and, if it gets there, after it: one line of JSON each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def used():
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(lines.get(f"{name}_file", 0)) for name in ("active", "inactive"))
        return int((group / usage).read_text()) - cached

    def fit(model, vocab):
        data = token_data(num_batches=2, batch=BATCH, length=LENGTH, vocab=vocab)
        trainer = make_trainer(offload(), max_steps=2)
        trainer.fit(Task(model), data)
        return trainer.global_step

    def note(**found):
        with notes.open("a") as file:
            file.write(json.dumps(known | found) + "\n")

    fit(TinyTransformer(), 37)  # what libraries take at their first use
    roles, working = planned()
    base = used()
    allowed = base + int(part * roles) + extra
    (group / limit).write_text(str(allowed))
    model = make_model()
    known = {"roles": roles, "working": working, "base": base, "limit": allowed, "before": used()}
    note()
    if not checked:
        take_the_checks_away()
    num_steps, refusal = 0, ""
    try:
        num_steps = fit(model, VOCAB)
    except TierFullError as error:
        refusal = str(error)
    note(after=used(), refusal=refusal, num_steps=num_steps)
