"""Seconds per training step and peak host memory: plain Lightning, `cxl_offload`, and peers that can be imported.

The job: a Llama model of 57 M parameters (random weights), byte tokens of the standard library's sources, sequence 512,
batch 2, float32, AdamW, on the CPU. Every contender is a process of its own, so that its peak memory is its own; the
parent lets them take one step in turn, in a new random order each round, so that a noisy machine disturbs all alike.
CPU seconds are what all threads of a contender took, in user code and in the kernel. On a busy machine they say more
than seconds, if all run on one core (``taskset -c 0``): threads that wait for each other spin.

    python examples/bench/step.py [--steps 12] [--only NAME ...] [--json FILE]
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

WARM_UP = 2
BASELINE = {"cxl_offload_optimizer": "lightning", "cxl_offload": "lightning, checkpointed"}
GOALS = {"cxl_offload_optimizer": 1.03, "cxl_offload": 1.0}
PEAK_GOAL = 20.0


# -- the child: one contender ------------------------------------------------------------------------------------------


def make_model(checkpointed: bool, size: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"57M": (768, 2048, 8, 12), "tiny": (64, 128, 2, 4)}[size]
    config = LlamaConfig(
        vocab_size=256, hidden_size=shape[0], intermediate_size=shape[1], num_hidden_layers=shape[2],
        num_attention_heads=shape[3], num_key_value_heads=shape[3], max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batches(length: int = 512, batch: int = 2):
    import torch

    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = tokens[: len(tokens) // length * length].view(-1, length).long()
    for step in itertools.count():
        yield rows[[(step * batch + i) % len(rows) for i in range(batch)]]


class Turn:
    """Waits for the parent's word before each step and reports the step's seconds and loss after it."""

    def wait(self) -> None:
        """Wait for the parent's word."""
        sys.stdin.readline()
        self.start = time.perf_counter()
        self.start_cpu = time.process_time()

    def report(self, loss: float) -> None:
        """Tell the parent how long the step took."""
        seconds, cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.start_cpu
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}), file=sys.stderr, flush=True)


def run_lightning(strategy, checkpointed: bool, steps: int, size: str, turn: Turn) -> None:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Job(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model(checkpointed, size)

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

        def train_dataloader(self):
            return batches()

    class Baton(Callback):
        def on_train_batch_start(self, *_):
            turn.wait()

        def on_train_batch_end(self, trainer, module, outputs, *_):
            turn.report(float(outputs["loss"]))

    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Baton()],
    )  # fmt: skip
    trainer.fit(Job())


def run_loop(model, optimizer, steps: int, turn: Turn, backward=None, step=None) -> None:
    for tokens in itertools.islice(batches(), steps):
        turn.wait()
        loss = model(input_ids=tokens, labels=tokens).loss
        (backward or (lambda value: value.backward()))(loss)
        if step is not None:
            step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        turn.report(float(loss.detach()))


def set_rendezvous(**more: str) -> None:
    port = str(random.randint(20000, 40000))
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", **more})


def run_fsdp2(steps: int, size: str, turn: Turn) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    set_rendezvous()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model = make_model(True, size)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    run_loop(model, torch.optim.AdamW(model.parameters(), lr=3e-4), steps, turn)
    dist.destroy_process_group()


def run_deepspeed(steps: int, size: str, turn: Turn) -> None:
    import deepspeed

    set_rendezvous(LOCAL_RANK="0")
    model = make_model(False, size)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    run_loop(engine, None, steps, turn, backward=engine.backward, step=engine.step)


def child(name: str, steps: int, size: str) -> None:
    import torch
    import transformers.models.llama  # noqa: F401  imports are not the contender's memory
    from lightning.pytorch import Trainer  # noqa: F401

    import lightning_cxl  # noqa: F401

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    imports_bytes = status_bytes("VmRSS")
    turn = Turn()
    if name == "lightning":
        run_lightning("auto", False, steps, size, turn)
    elif name == "lightning, checkpointed":
        run_lightning("auto", True, steps, size, turn)
    elif name.startswith("cxl_offload"):
        run_lightning(name, False, steps, size, turn)
    elif name == "fsdp2 offload, checkpointed":
        run_fsdp2(steps, size, turn)
    elif name == "deepspeed zero-2 offload":
        run_deepspeed(steps, size, turn)
    else:
        raise SystemExit(f"no contender {name!r}")
    peak_bytes = status_bytes("VmHWM") - imports_bytes
    parameters = sum(p.numel() for p in make_model(False, size).parameters())
    print(
        json.dumps({"peak_bytes": peak_bytes, "parameters": parameters}),
        file=sys.stderr,
        flush=True,
    )


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# -- the parent --------------------------------------------------------------------------------------------------------


class Contender:
    """A child process that takes steps when told to; `failed` holds why it cannot."""

    def __init__(self, name: str, steps: int, size: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []
        self.noise: list[str] = []
        command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--steps", str(steps), "--size", size]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def message(self) -> dict | None:
        """Return the child's next message, None when it has ended."""
        for line in self.process.stderr:
            if line.startswith("{"):
                return json.loads(line)
            self.noise.append(line.rstrip())
        return None

    def step(self) -> bool:
        """Let the child take one step; False when it cannot."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.message()
        if answer is None:
            return False
        self.seconds.append(answer["seconds"])
        self.cpu_seconds.append(answer["cpu_seconds"])
        self.losses.append(answer["loss"])
        return True


def measure(names: list[str], steps: int, size: str) -> dict[str, dict]:
    running = [Contender(name, steps, size) for name in names]
    order = random.Random(0)
    for step in range(steps):
        for contender in order.sample(running, len(running)):
            if not contender.step():
                running.remove(contender)
                print(f"{contender.name} did not run: {contender.noise[-1] if contender.noise else 'no output'}")
        print(f"round {step + 1} of {steps}", file=sys.stderr, flush=True)
    results = {}
    for contender in running:
        end = contender.message()
        contender.process.wait()
        if end is not None:
            results[contender.name] = {
                "seconds": contender.seconds[WARM_UP:],
                "cpu_seconds": contender.cpu_seconds[WARM_UP:],
                "losses": contender.losses,
                **end,
            }
    return results


def rows_of(results: dict[str, dict]) -> list[dict]:
    rows = []
    for name, result in results.items():
        median = statistics.median(result["seconds"])
        peak = result["peak_bytes"] / result["parameters"]
        rows.append({"name": f"{name}: step", "value": median, "unit": "s", "goal": None, "holds": None})
        goal = PEAK_GOAL if name == "cxl_offload" else None
        rows.append(
            {
                "name": f"{name}: peak",
                "value": peak,
                "unit": "B/parameter",
                "goal": goal,
                "holds": None if goal is None else peak <= goal,
            }
        )
        base = results.get(BASELINE.get(name, ""))
        if base is not None:
            # the same round ran under the same noise: take the median of the rounds' ratios
            ratio = median_ratio(result["seconds"], base["seconds"])
            cpu_ratio = median_ratio(result["cpu_seconds"], base["cpu_seconds"])
            label = f"{name}: CPU time / {BASELINE[name]}"
            rows.append({"name": label, "value": cpu_ratio, "unit": "x", "goal": None, "holds": None})
            rows.append(
                {
                    "name": f"{name}: step / {BASELINE[name]}",
                    "value": ratio,
                    "unit": "x",
                    "goal": GOALS[name],
                    "holds": ratio <= GOALS[name],
                }
            )
    return rows


def median_ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=12, help=f"steps of each contender, the first {WARM_UP} not counted"
    )
    parser.add_argument("--only", nargs="+", help="contenders to run (default: all that can be imported)")
    parser.add_argument("--size", choices=["57M", "tiny"], default="57M")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.steps, args.size)
        return
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} warm-up steps")
    names = [
        "lightning",
        "cxl_offload_optimizer",
        "lightning, checkpointed",
        "cxl_offload",
        "fsdp2 offload, checkpointed",
    ]
    try:
        import importlib.util

        if importlib.util.find_spec("deepspeed"):
            names.append("deepspeed zero-2 offload")
    except ImportError:
        pass
    results = measure(args.only or names, args.steps, args.size)
    rows = rows_of(results)
    print(f"{'contender':32} {'s per step':>10} {'spread':>7} {'CPU s':>7} {'peak B/parameter':>17} {'last loss':>10}")
    for name, result in results.items():
        seconds = result["seconds"]
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        cpu_seconds = statistics.median(result["cpu_seconds"])
        print(
            f"{name:32} {statistics.median(seconds):10.3f} {spread:7.0%} {cpu_seconds:7.3f} "
            f"{result['peak_bytes'] / result['parameters']:17.1f} {result['losses'][-1]:10.4f}"
        )
    for row in rows:
        if row["goal"] is not None:
            print(
                f"{row['name']}: {row['value']:.3f} {row['unit']}, goal at most {row['goal']}: "
                f"{'holds' if row['holds'] else 'MISSED'}"
            )
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
