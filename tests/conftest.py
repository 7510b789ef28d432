"""Shared by all tests: one torch thread, so that tiny models do not spend their time in barriers."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        choices=("host", "delaying", "reordering"),
        default="host",
        help="what copies in tests/integration; all but host make the CPU play a device with memory of its own",
    )
