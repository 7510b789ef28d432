"""Takes the device's promises away, one at a time, and shows which of its tests notices.

``python -m tests.apart.mutants``; names after it choose some. A mutant is a change of the sources, built in a cache
that starts as a copy of the usual one, so that the changed unit alone is compiled.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.apart import build

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """Text of a source that is replaced, and the file of tests that must notice."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = {
    "memory of the device can be read by the host": Mutant(
        "runtime/arena.cpp", "reserve(PROT_NONE)", "reserve(PROT_READ)", "test_memory.py"
    ),
    "freed memory keeps its bytes under poison": Mutant(
        "runtime/allocator.cpp", "if (poison == Poison::kFreed)", "if (false)", "test_memory.py"
    ),
    "poison comes at once": Mutant(
        "runtime/allocator.cpp",
        "queue_of(d, stream).push_internal([at, size] { std::memset(at, 0xff, size); });",
        "std::memset(at, 0xff, size);",
        "test_memory.py",
    ),
    "a stream does not wait for an event": Mutant(
        "runtime/events.cpp", "{ record->wait(); });", "{});", "test_streams.py"
    ),
    "an order of streams through another one is not known": Mutant(
        "runtime/events.cpp", "auto after = queue.order();", "Queue::Order after;", "test_violations.py"
    ),
    "the owner of given-back memory is not asked whether it waits": Mutant(
        "runtime/allocator.cpp",
        "taken_on(queue_of(d, stream), ",
        "if (false) taken_on(queue_of(d, stream), ",
        "test_violations.py",
    ),
    "devices do not wait for each other": Mutant(
        "operators/copies.cpp", "if (s != d) wait_on(other, record_on(queue));", "", "test_streams.py"
    ),
    "the host waits for every task": Mutant(
        "operators/kernels.cpp",
        "current_queue(device).push({Kind::kKernel, name(), bytes(outputs), std::move(run), {}});",
        "auto& q = current_queue(device); q.wait(q.push({Kind::kKernel, name(), 0, std::move(run), {}}));",
        "test_streams.py",
    ),
    "an error of a kernel is lost": Mutant(
        "runtime/streams.cpp", "if (failed && !error_) error_ = failed;", "", "test_streams.py"
    ),
    "a number of the host is read late": Mutant(
        "operators/kernels.cpp", "Tensor copy = t.clone();", "Tensor copy = t;", "test_streams.py"
    ),
    "record_stream does nothing": Mutant(
        "runtime/allocator.cpp",
        "if (stream.id() != b->stream) b->used_by.insert(stream.id());",
        "",
        "test_allocator.py",
    ),
    "a freed block goes to any stream": Mutant(
        "runtime/allocator.cpp", "int64_t stream = current_stream[d];", "int64_t stream = 0;", "test_allocator.py"
    ),
    "the capacity has no bound": Mutant(
        "runtime/allocator.cpp", "if (pool.reserved + size > pool.capacity) {", "if (false) {", "test_allocator.py"
    ),
    "freed bytes stay counted": Mutant("runtime/allocator.cpp", "  pool.count(*b, false);", "", "test_allocator.py"),
    "pageable memory is read late": Mutant(
        "operators/copies.cpp",
        "auto staged = std::make_shared<Tensor>(host.clone());",
        "auto staged = std::make_shared<Tensor>(host);",
        "test_pinned.py",
    ),
    "a copy to pageable memory is not waited for": Mutant(
        "operators/copies.cpp",
        "queue.wait(queue_plain(queue, transfer, nullptr));",
        "auto t = queue_plain(queue, transfer, nullptr); if (!non_blocking) queue.wait(t);",
        "test_pinned.py",
    ),
    "pinned memory is taken back at once": Mutant(
        "runtime/pinned.cpp", "if (block) block->users.push_back(record_on(queue_of(stream)));", "", "test_pinned.py"
    ),
    "memory is registered twice": Mutant("runtime/pinned.cpp", "return 712;", "return 0;", "test_pinned.py"),
    "the source of a copy is not watched": Mutant(
        "runtime/transfers.cpp", "if (checksum(from(), transfer.bytes) != source)", "if (false)", "test_violations.py"
    ),
    "the destination of a copy is not watched": Mutant(
        "runtime/transfers.cpp",
        "if (checksum(to(), transfer.bytes) != destination)",
        "if (false)",
        "test_violations.py",
    ),
    "the source of an h2d is not watched before its turn": Mutant(
        "runtime/transfers.cpp", "watched->source_at_call = checksum(t.host, t.bytes);", "", "test_violations.py"
    ),
    "there and back again counts as a race": Mutant(
        "runtime/transfers.cpp",
        "t.to_device && !find_under_way(t.host, t.bytes, writes)",
        "t.to_device",
        "test_violations.py",
    ),
    "unregistered memory is not missed": Mutant(
        "runtime/pinned.cpp", 'leave_alone(p, it->second.bytes, "unregistered", false);', "", "test_violations.py"
    ),
    "delays are those of kernels": Mutant(
        "runtime/streams.cpp", "delay_us[int(task.kind)].load()", "delay_us[0].load()", "test_timeline.py"
    ),
    "tensors of the host are taken": Mutant(
        "operators/kernels.cpp", "if (!on_device(t) && !number)", "if (false)", "test_operators.py"
    ),
    "indices may be numbers of the host": Mutant(
        "operators/kernels.cpp", " && !info.index[i];", ";", "test_operators.py"
    ),
    "a draw belongs to the kernel": Mutant("runtime/generator.cpp", "++offset_", "offset_", "test_operators.py"),
    "parameters stay on their device": Mutant(
        "backend/tensors.cpp", "(on_device(t) || t.is_cpu())", "on_device(t)", "test_operators.py"
    ),
    "a child may use the device": Mutant("runtime/device.cpp", "[] { in_child = true; }", "[] {}", "test_fork.py"),
}


def run(name: str, mutant: Mutant, cache: str) -> str | None:
    """Return the first test that fails with the mutant, None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "csrc"
        shutil.copytree(build.SOURCES, sources)
        text = (sources / mutant.file).read_text()
        if mutant.old not in text:
            raise SystemExit(f"mutant {name!r}: {mutant.file} has no text {mutant.old!r}; change the mutant with it")
        (sources / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        environment = {**os.environ, "APART_SOURCES": str(sources), "LIGHTNING_CXL_CACHE": cache}
        options = ["-x", "-q", "--timeout=60", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, f"tests/apart/{mutant.tests}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    if not failed and done.returncode > 0:  # the tests have not run
        raise SystemExit(f"mutant {name!r}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return failed[1] if failed else f"died with signal {-done.returncode}"


def main() -> None:
    """Print one line for each, and fail if one lives."""
    names = sys.argv[1:] or list(MUTANTS)
    alive = []
    built = build.library().parent
    with tempfile.TemporaryDirectory() as cache:
        shutil.copytree(built, Path(cache) / built.name)
        for name in names:
            killer = run(name, MUTANTS[name], cache)
            print(f"{'killed' if killer else 'LIVES':7} {name}: {killer or 'no test fails'}", flush=True)
            if not killer:
                alive.append(name)
    print(f"{len(names) - len(alive)} of {len(names)} are killed")
    if alive:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
