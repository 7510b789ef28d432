"""Which of several failures explains the others, and how it is told."""

import json

import pytest
import torch
import torch.distributed as dist

from lightning_cxl.sharding.failures import Cause, Failure, first_of, is_in_collective

pytestmark = pytest.mark.on_cpu


def caught(function) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def failure(rank: int, cause: Cause) -> Failure:
    return Failure(rank, "here", 1, cause, "text")


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([Cause.OTHERS, Cause.GONE], 1),
        ([Cause.OTHERS, Cause.GONE, Cause.ERROR], 2),
        ([Cause.GONE, Cause.GONE], 0),
        ([Cause.OTHERS, Cause.OTHERS], 0),
    ],
)
def test_what_explains_the_others_is_first(causes, expected):
    assert first_of(failure(rank, cause) for rank, cause in enumerate(causes)).rank == expected


def test_errors_of_collectives_are_known():
    def no_group():
        dist.all_reduce(torch.ones(1))

    def gloo():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6529")

    def own():
        raise RuntimeError("shapes do not fit")

    assert is_in_collective(caught(gloo)) and is_in_collective(dist.DistNetworkError("x"))
    assert not is_in_collective(caught(own)) and not is_in_collective(caught(lambda: [][1]))
    assert not is_in_collective(caught(no_group))  # a ValueError: a mistake in the code, not a rank that is gone


def test_a_failure_survives_the_way_to_another_process():
    def raises():
        raise ValueError("x" * 10_000)

    own = Failure.of(caught(raises), 3)
    assert Failure.read(json.loads(json.dumps(own.values()))) == own
    assert own.cause is Cause.ERROR and len(own.text) == 4096 and own.text.endswith("xx")
    assert "rank 3" in own.describe() and own.machine in own.describe() and str(own.pid) in own.describe()
