import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.devices.transfer import HostEngine
from lightning_cxl.streaming.activations import StoredInput, UnitInput, can_store
from tests import training_device
from tests.fakes import RecyclingMemory

CPU = torch.device("cpu")


def grown(*shape, dtype=torch.float32):
    """A tensor that carries gradient."""
    return torch.randn(*shape, requires_grad=True).to(dtype).mul(1)


@st.composite
def layouts(draw):
    """Views of all kinds: permuted, sliced, expanded, offset."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = grown(*sizes, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["permute", "slice", "expand", "step"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "slice":
                tensor = tensor.narrow(
                    axis, start := draw(st.integers(0, tensor.size(axis) - 1)), tensor.size(axis) - start
                )
            case "expand":
                tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
            case "step":
                tensor = tensor[tuple([slice(None)] * axis + [slice(None, None, 2)])]
    return tensor


@settings(deadline=None)
@given(layouts())
def test_the_image_is_exact(tensor):
    memory, engine = RecyclingMemory(), HostEngine()
    stored = StoredInput(tensor, engine, memory.allocate, "unit")
    image = stored.shape_like_source(stored.on_host())
    assert torch.equal(image, tensor) and image.stride() == tensor.stride() and image.dtype == tensor.dtype
    assert image.data_ptr() % 64 == tensor.data_ptr() % 64
    assert not image.requires_grad
    destination, transfer = stored.fetch(engine)
    transfer.wait()
    assert torch.equal(stored.shape_like_source(destination), tensor)
    del stored, image
    assert memory.live_bytes == 0


def test_an_image_read_back_before_its_copy_is_done_waits_for_it(device_engine):
    training_device.make_late("to the host")
    tensor = grown(100)
    stored = StoredInput(tensor, device_engine, RecyclingMemory().allocate, "unit")
    destination, transfer = stored.fetch(device_engine)
    transfer.wait()
    assert torch.equal(stored.shape_like_source(destination), tensor)


def test_an_image_is_recognised_by_identity_and_version():
    tensor = grown(4)
    stored = StoredInput(tensor, HostEngine(), RecyclingMemory().allocate, "unit")
    assert stored.is_image_of(tensor)
    assert not stored.is_image_of(tensor.view(4))  # same memory, another tensor
    own = tensor.data
    tensor.data = own.clone()
    assert not stored.is_image_of(tensor)  # same version, other memory
    tensor.data = own
    assert stored.is_image_of(tensor)
    with torch.no_grad():
        tensor.add_(1)
    assert not stored.is_image_of(tensor)
    del tensor
    assert stored.source() is None


def test_a_held_input_does_not_hold_the_graph():
    tensor = grown(4)
    held = UnitInput(tensor, None, "unit", cautious=False)
    assert not held.observe()
    held.release(HostEngine())
    assert held.load(HostEngine()).grad_fn is None and torch.equal(held.load(HostEngine()), tensor)
    tensor.mul_(2)
    with pytest.raises(RuntimeError, match="an input of unit `unit`"):
        held.load(HostEngine())


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (grown(4), True),
        (grown(4, dtype=torch.bfloat16), True),
        (torch.randn(4), False),  # no gradient
        (torch.randn(4, requires_grad=True), False),  # a leaf is alive anyway
        (grown(3), False),  # too small
        (grown(0), False),
        (grown(4, 4).to(torch.complex64), False),
        (grown(4, 4).to_sparse(), False),
        (grown(4, 4)[:, :1], False),  # the image would hold mostly other data
        (torch.nn.Parameter(torch.randn(4)), False),
        (grown(4).to("meta"), False),
    ],
)
def test_what_belongs_on_the_tier(tensor, expected):
    assert can_store(tensor, CPU, min_bytes=8 if tensor.dtype is torch.bfloat16 else 16) is expected
