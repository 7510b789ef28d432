"""Contenders do the job that they are timed for: updates agree with each other, checks find norms."""

import functools

import pytest
import torch
from adam_bench import chains, peers
from adam_bench.contenders import torch_adamw
from adam_bench.path import Path
from adam_bench.problems import Layout, Problem

LAYOUT = Layout("some", ((40, 50), (7,), (1000,)))


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """The short functions as they are: compiling them takes half a minute."""
    monkeypatch.setattr(peers, "_compiled", lambda function: function)


def values(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def test_peers_agree_on_a_float32_step():
    before, updated = values(Problem.make(LAYOUT).parameters), []
    makes = [
        lambda problem: torch_adamw(problem, fused=True),
        lambda problem: torch_adamw(problem, foreach=True),
        lambda problem: functools.partial(peers.compiled_step(problem, problem.parameters), 1.0),
    ]
    for make in makes:
        problem = Problem.make(LAYOUT)
        run = make(problem)
        run()
        run()
        updated.append([values(tensors) for tensors in (problem.parameters, problem.momentum, problem.variance)])
    assert not torch.equal(updated[0][0], before)
    for other in updated[1:]:
        for mine, theirs in zip(updated[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)


def test_chains_agree_on_new_weights_and_leave_the_gradients():
    masters = []
    for make in (
        lambda path: chains.in_turn(
            chains.torch_prepare(path.problem.gradients, path.max_norm), chains.torch_update(path.masters)
        ),
        lambda path: chains.compiled_chain(path.masters, path.max_norm),
    ):
        path = Path(Problem.make(LAYOUT, torch.bfloat16), 1)
        gradients, weights = values(path.problem.gradients), values(path.problem.parameters)
        run = make(path)
        run()
        assert torch.equal(values(path.problem.gradients), gradients)
        masters.append(values(path.masters.masters))
        assert not torch.equal(masters[-1], weights)
        assert torch.equal(values(path.problem.parameters), masters[-1].bfloat16().float())
    torch.testing.assert_close(*masters, rtol=1e-6, atol=1e-8)
