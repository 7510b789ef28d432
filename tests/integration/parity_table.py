"""Parity on the device: model x schedule x precision x accumulation, each run beside the one it must equal.

    python -m tests.integration.parity_table [--device apart|cpu|cuda] [model ...]

With the user's own torch optimizer a run must equal plain Lightning on the same device bit for bit, whether weights
stay there or stream; not with ``bf16-true``, where ours has float32 masters and plain Lightning has none. With
`CPUAdam`, streamed weights under every schedule of updates must equal weights that stay, and those follow torch's Adam.
Exception: gradients of a block that is used twice are added in another order where weights stream (last bits differ).
"""

import argparse
import functools
import itertools
import sys
import warnings

import torch
from torch import nn

from lightning_cxl.run.run import Run
from tests import training_device
from tests.integration.llama import LlamaTask, tiny_llama, with_lora
from tests.integration.training import EXACT, offload, train
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, token_data


class WithPositions(TinyTransformer):
    """The gradient of the positions is a view of that of the activations: micro-batches have one row."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.positions = nn.Parameter(torch.randn(12, 32) * 0.1)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions.unsqueeze(0)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(self.norm(x))


def frozen():
    model = TinyTransformer()
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].mlp.requires_grad_(False)
    return model


MODELS = {
    "transformer": (TinyTransformer, Task, token_data),
    "tied": (lambda: TinyTransformer(tied=True), Task, token_data),
    "block twice": (lambda: TinyTransformer(twice=True), Task, token_data),
    "positions": (WithPositions, Task, lambda: token_data(batch=1)),
    "convolution": (TinyConvNet, Task, image_data),
    "frozen": (frozen, Task, token_data),
    "lora": (lambda: with_lora(tiny_llama()), LlamaTask, token_data),
}
IGNORE = {"on_overflow": "ignore"}
STAYS = {"stream_weights": False}
PLAIN = "plain Lightning"
SCHEDULES = {
    "torch's, weights stay": (PLAIN, {**EXACT, **STAYS}),
    "torch's, streamed": (PLAIN, EXACT),
    "updates after": (STAYS, {"overlap_step": False}),
    "behind forward": (STAYS, {}),
    "behind backward": ({**STAYS, **IGNORE}, IGNORE),
    "state on the device": ({**STAYS, **IGNORE}, {**IGNORE, "state_on_device": True, "units_on_device": 1}),
}
"""What each must equal, and its options."""
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
ACCUMULATE = (1, 2, 4)


def run(options, model, precision, accumulate):
    make, task, data = MODELS[model]
    strategy = "auto" if options == PLAIN else offload(**dict(options))
    trainer_args = {"precision": precision, "accumulate_grad_batches": accumulate}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(make, strategy, task=task, data=data, steps=4, trainer_args=trainer_args)


@functools.cache
def reference(options, model, precision, accumulate):
    """As `run`; several schedules have the same one."""
    return run(options, model, precision, accumulate)


def promises_nothing(model, schedule, precision):
    """Return whether there is nothing to compare: no masters in plain Lightning, no 16-bit batch norm on the device."""
    return precision == "bf16-true" and (SCHEDULES[schedule][0] == PLAIN or model == "convolution")


def compare(model, schedule, precision, accumulate):
    """Return ``"="`` for bitwise equality, else by how much losses differ at most, relative; None if not promised."""
    against, options = SCHEDULES[schedule]
    if promises_nothing(model, schedule, precision):
        return None
    key = against if against == PLAIN else tuple(against.items())
    losses, state = reference(key, model, precision, accumulate)
    mine, my_state = run(options, model, precision, accumulate)
    assert len(mine) == len(losses) >= 4
    if mine == losses and all(torch.equal(my_state[name], value) for name, value in state.items()):
        return "="
    return max(abs(one - other) / abs(other) for one, other in zip(mine, losses, strict=True))


def allowed(model, schedule, precision, accumulate):
    """Return the relative difference of losses that is allowed."""
    adds_one_by_one = model == "block twice" and schedule != "torch's, weights stay"
    adds_one_by_one &= accumulate > 1 or precision == "bf16-true"
    return (1e-3 if precision == "bf16-true" else 1e-6) if adds_one_by_one else 0.0


def is_right(result, model, schedule, precision, accumulate):
    return result in (None, "=") or result <= allowed(model, schedule, precision, accumulate)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=training_device.NAMES, default="apart")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training_device.choose(arguments.device)
    if training_device.unavailable is not None:
        sys.exit(training_device.unavailable)
    Run.min_activation_bytes = 1
    num_wrong = num_equal = num_close = 0
    print(f"{'model':12} {'precision':10} {'micro-batches':>13} " + " ".join(f"{name:>21}" for name in SCHEDULES))
    for model, precision, accumulate in itertools.product(arguments.models, PRECISIONS, ACCUMULATE):
        cells = []
        with training_device.on_chosen():
            for schedule in SCHEDULES:
                result = compare(model, schedule, precision, accumulate)
                right = is_right(result, model, schedule, precision, accumulate)
                num_wrong += not right
                num_equal += result == "="
                num_close += isinstance(result, float) and right
                cell = "" if result is None else result if result == "=" else f"{result:.0e}"
                cells.append(f"{cell}{'' if right else ' WRONG':}")
        print(f"{model:12} {precision:10} {accumulate:13} " + " ".join(f"{cell:>21}" for cell in cells), flush=True)
        reference.cache_clear()
    print(f"{num_equal} runs equal bit for bit, {num_close} as close as promised, {num_wrong} wrong")
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
