"""Everything that the Trainer of transformers logs, with many of its arguments: as without us, to the last bit."""

import pytest
import torch

from tests.integration.hf_trainer import EXACT, PLAIN, assert_close, finish, make_trainer, rows
from tests.integration.llama import tiny_llama

STREAMED = {"stream_weights": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
NOT_COMPARED = ("runtime", "per_second", "preparation_time")
CASES = {
    "polynomial": {"lr_scheduler_type": "polynomial", "warmup_steps": 2},  # reads the optimizer's defaults
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVALUATED},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adagrad": {"optim": "adagrad"},  # makes its state when it is constructed
    "parts of predictions": {"eval_accumulation_steps": 1, "eval_do_concat_batches": False, **EVALUATED},
    "an evaluation first": {"eval_on_start": True, **EVALUATED},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "own offload": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "counted tokens": {"include_num_input_tokens_seen": "all", "torch_empty_cache_steps": 1},
    "mean of micro-batches": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "debug": {"debug": "underflow_overflow"},
    "compiled": {"gradient_accumulation_steps": 2, **COMPILED},
}


def logged(trainer):
    """Return all that was logged, but for times."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]


def run(folder, offload=PLAIN, *, parts=None, **given):
    torch._dynamo.reset()
    trainer = make_trainer(folder, offload, parts={"eval_dataset": rows(6, seed=5), **(parts or {})}, **given)
    trainer.train()
    found = logged(trainer)
    return found, finish(trainer)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # workers are forked
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logs_what_the_plain_trainer_logs(tmp_path, case):
    plain, _ = run(tmp_path, **case)
    exact, _ = run(tmp_path, {**STREAMED, **EXACT}, **case)
    assert len(plain) > 2
    assert exact == plain


@pytest.mark.parametrize("options", [{**STREAMED, **EXACT}, EXACT, STREAMED], ids=str)
def test_tied_weights_count_once_for_the_norm(tmp_path, options):
    def tied(offload=PLAIN):
        return run(tmp_path, offload, model=tiny_llama(tie_word_embeddings=True))

    (plain, trained), (ours, found) = tied(), tied(options)
    if EXACT.items() <= options.items():
        assert ours == plain
    assert_close(trained, found)


class Averages(torch.optim.SGD):
    """Evaluates with the mean of its weights so far, as optimizers without a schedule do."""

    is_training = True

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["num_steps"] = state.get("num_steps", 0) + 1
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter, 1 / state["num_steps"])
        return loss

    def train(self):
        self._swap(to_training=True)

    def eval(self):
        self._swap(to_training=False)

    @torch.no_grad()
    def _swap(self, to_training):
        if self.is_training is to_training:
            return
        self.is_training = to_training
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "mean" in state:
                other = state["mean"].clone()
                state["mean"].copy_(parameter)
                parameter.copy_(other)


@pytest.mark.parametrize("options", [STREAMED, {"stream_weights": False}], ids=str)
def test_optimizers_without_a_schedule_evaluate_with_other_weights(tmp_path, options):
    found = []
    for offload in (PLAIN, options):
        model = tiny_llama()
        averages = Averages(model.parameters(), lr=0.1)
        parts = {"optimizers": (averages, torch.optim.lr_scheduler.ConstantLR(averages, 1.0))}
        found.append(run(tmp_path, offload, model=model, parts=parts, **EVALUATED))
        assert not averages.is_training or offload != PLAIN
    (plain, trained), (ours, same) = found
    assert ours == plain
    for name, value in trained[1].items():
        assert torch.equal(same[1][name], value), name


def test_inputs_in_a_list_count_no_operations(tmp_path):
    """As TRL's trainers that generate give them."""
    for offload in (PLAIN, STREAMED):
        trainer = make_trainer(tmp_path, offload)
        assert trainer.floating_point_ops([{"prompt": "a"}]) == 0
        trainer.end()
