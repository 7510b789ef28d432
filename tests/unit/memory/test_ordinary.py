"""What ordinary memory of tensors is free without them: touched, anonymous, counted once."""

import torch

from lightning_cxl.memory import host_memory as ordinary
from lightning_cxl.memory.host_memory import anonymous_bytes

MIB = 2**20


def test_touched_memory_counts_once_and_untouched_not():
    touched = torch.ones(4 * MIB)
    untouched = torch.empty(64 * MIB)
    found = anonymous_bytes([touched, touched[1:], touched.view(2, -1), untouched, torch.ones(3, device="meta")], 0)
    assert abs(sum(found.values()) - 16 * MIB) <= 2 * MIB


def test_mapped_files_do_not_count(tmp_path):
    path = tmp_path / "weights"
    torch.ones(4 * MIB).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=4 * MIB, dtype=torch.float32)
    assert mapped.sum() == 4 * MIB
    assert anonymous_bytes([mapped], 0) == {}


def test_a_kernel_that_refuses_to_say(monkeypatch):
    def refuse(address, nbytes):
        raise PermissionError

    monkeypatch.setattr(ordinary, "page_nodes", refuse)
    assert anonymous_bytes([torch.empty(1024)], 3) == {3: 4096}
