"""Libraries that keep training state in host memory, each as its documentation says that one model is trained."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import ADAM, whole
from torch import nn

Arguments = dict[str, Any]


def parameters(model: nn.Module, *, groups: bool) -> list[Any]:
    """Return what an optimizer gets; `groups`: vectors are not decayed."""
    named = list(model.parameters())
    if not groups:
        return named
    matrices, vectors = [each for each in named if each.ndim > 1], [each for each in named if each.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def begin_alone() -> None:
    """Be one process of one."""
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # DeepSpeed asks for them; nothing is opened
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Plain:
    """A loop of torch, without offload: what all are compared with."""

    def __init__(self, model: nn.Module, *, clip_norm: float | None = None, groups: bool = False) -> None:
        self.model = self.module = model
        self.optimizer = torch.optim.AdamW(parameters(model, groups=groups), fused=True, **ADAM)

    def backward(self, loss: torch.Tensor, *, last: bool = True, **options: Any) -> None:
        loss.backward(**options)

    def clip(self, *, norm: float | None = None, value: float | None = None) -> torch.Tensor | None:
        if norm is not None:
            return whole(nn.utils.clip_grad_norm_(self.module.parameters(), norm))
        nn.utils.clip_grad_value_(self.module.parameters(), value)
        return None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def touch(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(each).detach() for name, each in self.module.named_parameters()}

    def save(self, folder: Path) -> None:
        torch.save({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, folder)

    def load(self, folder: Path) -> None:
        saved = torch.load(folder)
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def close(self) -> None: ...


class FSDP2(Plain):
    """torch's `fully_shard` with `CPUOffloadPolicy` in one process; blocks are the units."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        begin_alone()
        for part in (*model.blocks, model):
            fully_shard(
                part,
                mesh=dist.device_mesh.init_device_mesh("cpu", (1,)),
                offload_policy=CPUOffloadPolicy(pin_memory=False),
            )
        super().__init__(model, **settings)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optimizer"), get_state_dict(self.module, self.optimizer), strict=True))

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class DeepSpeed(Plain):
    """ZeRO with everything that the stage can offload on the CPU."""

    stage = 2

    def __init__(self, model: nn.Module, *, clip_norm: float | None = None, groups: bool = False) -> None:
        import deepspeed

        begin_alone()
        zero: dict[str, Any] = {"stage": self.stage, "offload_optimizer": {"device": "cpu"}}
        if self.stage == 3:
            zero |= {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero, "gradient_clipping": clip_norm or 0.0,
        }  # fmt: skip
        self.module = model
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters(model, groups=groups), config=config
        )
        self.model, self.optimizer = self.engine, self.engine.basic_optimizer  # what a scheduler may get

    def backward(self, loss: torch.Tensor, *, last: bool = True, **options: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, **options)

    def clip(self, *, norm: float | None = None, value: float | None = None) -> torch.Tensor | None:
        if value is not None:
            raise NotImplementedError("DeepSpeed clips by norm only")
        return None  # told before; the norm is known after the step

    def step(self) -> None:
        self.engine.step()

    def touch(self) -> contextlib.AbstractContextManager[Any]:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=0)

    def weights(self) -> dict[str, torch.Tensor]:
        with self.touch():
            return {name: each.detach().clone() for name, each in self.module.named_parameters()}

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        if self.engine.load_checkpoint(folder)[0] is None:
            raise FileNotFoundError(f"no checkpoint in {folder}")

    def close(self) -> None:
        self.engine.destroy()


class DeepSpeed3(DeepSpeed):
    stage = 3


class CPUOffload(Plain):
    """Accelerate's `cpu_offload`, which its documentation describes for inference."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        from accelerate import cpu_offload

        super().__init__(cpu_offload(model, execution_device=torch.device("cpu")), **settings)

    def weights(self) -> dict[str, torch.Tensor]:
        from accelerate.utils import align_module_device

        found = {}
        for prefix, module in self.module.named_modules():
            with align_module_device(module):
                for name, each in module.named_parameters(prefix, recurse=False):
                    found[name] = each.detach().clone()
        return found


class Ours(Plain):
    """This package with Fabric; weights are streamed as on a device with memory of its own."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        from lightning.fabric import Fabric

        from lightning_cxl import CXLFabricStrategy

        super().__init__(model, **settings)
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=CXLFabricStrategy(stream_weights=True))
        self.model, self.optimizer = self.fabric.setup(model, self.optimizer)

    def backward(self, loss: torch.Tensor, *, last: bool = True, **options: Any) -> None:
        self.fabric.backward(loss, **options)

    def clip(self, *, norm: float | None = None, value: float | None = None) -> torch.Tensor | None:
        return self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm, clip_val=value)

    def save(self, folder: Path) -> None:
        self.fabric.save(folder, {"model": self.model, "optimizer": self.optimizer})

    def load(self, folder: Path) -> None:
        self.fabric.load(folder, {"model": self.model, "optimizer": self.optimizer})

    def close(self) -> None:
        self.fabric.strategy.teardown()


CONTENDERS: dict[str, type[Plain]] = {
    "torch": Plain,
    "lightning_cxl": Ours,
    "FSDP2": FSDP2,
    "ZeRO-2": DeepSpeed,
    "ZeRO-3": DeepSpeed3,
    "cpu_offload": CPUOffload,
}
PACKAGES = {"lightning_cxl": "lightning_cxl", "ZeRO-2": "deepspeed", "ZeRO-3": "deepspeed", "cpu_offload": "accelerate"}
