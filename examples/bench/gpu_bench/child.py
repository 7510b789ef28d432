"""One contender in a process of its own: trains a few steps, profiles one more, prints one line of JSON."""

import argparse
import json
import os
import random
from collections.abc import Callable
from typing import Any

import torch
from step import status_bytes

from gpu_bench.job import batches, make_model
from gpu_bench.meter import HostWork, StepClock, device_seconds

LEARNING_RATE = 1e-5


def be_the_only_process() -> None:
    """Set what torch.distributed and DeepSpeed read from the environment."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 40000)), "RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }  # fmt: skip


def run_cxl_offload(args: argparse.Namespace, clock: StepClock) -> dict[str, float]:
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    import lightning_cxl

    host, profile = HostWork(), Profile(args, clock)
    losses: list[torch.Tensor] = []

    def end_step(steps: int) -> None:
        clock.lap(float(losses[-1]))
        profile.after(steps, host)

    class Job(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = make_model(args.shape, args.seq)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.model(batch)
            losses[:] = [loss.detach()]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

        def train_dataloader(self) -> Any:
            return Laps()

        def on_train_end(self) -> None:
            end_step(args.steps + 1)

    class Laps:
        """A step ends when the next batch is asked for: with a hook there, updates do not run behind the backward."""

        def __len__(self) -> int:  # Lightning fetches ahead what has no length
            return args.steps + 1

        def __iter__(self) -> Any:
            clock.start()
            for step, batch in zip(range(len(self)), batches(args.shape, args.seq, args.batch), strict=False):
                if step:
                    end_step(step)
                profile.before(step)
                yield batch

    strategy = lightning_cxl.CXLOffloadStrategy(
        on_overflow=args.on_overflow,
        state=args.state,
        stream_weights=True,
        overlap_step=True,
        units_on_device=args.units_on_device,
        state_on_device=args.state_on_device,
    )
    trainer = pl.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu", devices=1, strategy=strategy, max_steps=args.steps + 1,
        precision="bf16-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=args.clip,
    )  # fmt: skip
    trainer.fit(Job())
    streams = strategy.report()["streamed"]
    if streams and not host.num_behind_backward and args.on_overflow != "skip" and args.clip is None:
        raise SystemExit("no update ran behind the backward: another schedule than that which was to be measured")
    return profile.seconds


def run_fsdp2(args: argparse.Namespace, clock: StepClock) -> dict[str, float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    be_the_only_process()
    cuda = args.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    mesh = init_device_mesh(args.device, (1,))
    model = make_model(args.shape, args.seq)  # float32: the sharded parameters are the master weights
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for layer in model.model.model.layers:
        fully_shard(layer, **options)
    if model.model.lm_head.weight is not model.model.model.embed_tokens.weight:
        fully_shard(model.model.lm_head, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def train(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seconds = run_loop(args, clock, train)
    dist.destroy_process_group()
    return seconds


def run_deepspeed(args: argparse.Namespace, clock: StepClock) -> dict[str, float]:
    import deepspeed

    be_the_only_process()
    offload = {"device": "cpu", "pin_memory": args.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model(args.shape, args.seq)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def train(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return run_loop(args, clock, train)


def run_loop(
    args: argparse.Namespace, clock: StepClock, train: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """Take the timed steps and the profiled one; `train` takes a step and returns its loss."""
    profile = Profile(args, clock)
    tokens = next(batches(args.shape, args.seq, args.batch)).to(args.device)
    clock.start()
    for step in range(args.steps + 1):
        profile.before(step)
        loss = train(tokens)
        clock.lap(loss.item())
        profile.after(step + 1, None)
    return profile.seconds


CONTENDERS = {
    "cxl_offload": run_cxl_offload,
    "fsdp2 cpu offload": run_fsdp2,
    "deepspeed zero-3 offload": run_deepspeed,
}


class Profile:
    """Profiles the step after those that are timed."""

    def __init__(self, args: argparse.Namespace, clock: StepClock) -> None:
        self.seconds: dict[str, float] = {}
        self._at = args.steps
        self._clock = clock
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin, if the step that begins is the one."""
        if step == self._at:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._clock.device.type == "cuda":
                activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def after(self, steps: int, host: HostWork | None) -> None:
        """End, if the step that has ended was the one; its time is not one of the timed ones."""
        if steps == self._at + 1:
            self._profiler.stop()
            self.seconds = device_seconds(self._profiler.events())
            self.seconds["profiled step"] = seconds = self._clock.seconds.pop()
            if host is not None:
                self.seconds["host step"] = host.seconds(self._clock.began - seconds, self._clock.began)


def run(name: str, args: argparse.Namespace) -> None:
    """Run one contender and print what it took."""
    device = torch.device(args.device)
    imports_bytes = status_bytes("VmRSS")
    clock = StepClock(device)
    profile = CONTENDERS[name](args, clock)
    result = {
        "seconds": clock.seconds,
        "losses": clock.losses,
        "profile": profile,
        "host_peak_bytes": status_bytes("VmHWM") - imports_bytes,
        "gpu_peak_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(json.dumps(result), flush=True)
