"""Loops of Hugging Face Accelerate, with our accelerator and with theirs."""

import pytest

from tests.integration.accelerate_loop import (
    EXACT,
    assert_close,
    assert_identical,
    train,
)
from tests.models import TinyTransformer

pytestmark = pytest.mark.usefixtures("late_copies")


def bf16(**arguments):
    return TinyTransformer(**arguments).bfloat16()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},
        {"mixed_precision": "fp16", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("streams", [True, False])
def test_is_the_plain_loop(arguments, streams):
    plain = train(**arguments)
    assert_identical(plain, train({"stream_weights": streams, **EXACT}, **arguments))
    assert_close(plain, train({"stream_weights": streams}, **arguments))


@pytest.mark.on_cpu
@pytest.mark.parametrize("arguments", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_is_the_plain_loop_on_the_cpu(arguments):
    plain = train(**arguments)
    assert_identical(plain, train({"stream_weights": True, **EXACT}, **arguments))
    assert_close(plain, train({}, **arguments))
