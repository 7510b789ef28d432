"""Give the package damaged files and options that make no sense: 100,000 cases, each answered in words.

    python tests/fuzz.py [--cases N] [--seed S] [--only WORD]

A case is accepted, or ends in an error of the package (of native code: of the kernel, or ValueError, TypeError,
OverflowError or BufferError). Anything else is a finding, with the seed that makes it again: another exception, a
process that dies, one that needs 4 GiB more, or a case that takes longer than ten seconds.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import warnings
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from torch import nn

from lightning_cxl import OffloadConfig
from lightning_cxl.errors import LightningCXLError
from lightning_cxl.machine import recorder
from lightning_cxl.machine.speeds import load_machine, load_overrides
from lightning_cxl.native import _adam, _cpu, _numa
from lightning_cxl.run.checkpoint import load_file, plain_checkpoint
from lightning_cxl.storage.store import FORMAT, decode
from lightning_cxl.weights.models import load_weights, save_weights

PATIENCE_S, MEMORY_BYTES = 10, 4 << 30
MACHINES = sorted((Path(__file__).parent.parent / "examples" / "machines").glob("*.yaml"))
NATIVE = (OSError, ValueError, TypeError, OverflowError, BufferError)

Random = random.Random


def damaged(contents: bytes, rng: Random) -> bytes:
    """Flip, cut, insert, repeat or replace some bytes."""
    data = bytearray(contents)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 8, 64))
        how = rng.randrange(5)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + size]
        elif how == 2:
            data[at:at] = rng.randbytes(size)
        elif how == 3:
            data[at : at + size] = rng.choice((b"\0", b"\xff", b"9", b"-", b"{", b'"')) * size
        else:
            del data[at:]
    return bytes(data)


WORDS = ("", "auto", "dram", "cxl", "ssd", "-1", "1e999", "64GiB", "../../etc/passwd", "*", "[", "(" * 300, "模", "\0")


def anything(rng: Random, depth: int = 0) -> Any:
    """Return a value as JSON or YAML has them, or as a user errs in Python."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {rng.choice(WORDS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}
    unlikely = 1 if depth else rng.choice((b"x", (), object))
    number = rng.choice((float("nan"), float("inf"), -0.0, 1e-300, 0.5, rng.randrange(-(2**70), 2**70)))
    return (None, rng.choice((True, False)), rng.choice(WORDS), number, rng.randrange(-3, 5), number, unlikely)[kind]


def altered(value: Any, rng: Random) -> Any:
    """Replace one value somewhere in nested dicts and lists; sometimes a key."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {(rng.choice(WORDS) if each == key else each): one for each, one in value.items()}
        return {**value, key: altered(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], altered(value[at], rng), *value[at + 1 :]]
    return anything(rng, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


def sound_files(folder: Path) -> dict[str, bytes]:
    """Write one sound file of each kind; return their contents."""
    model = Net()
    save_weights(model, folder / "one.safetensors")
    save_weights(model, folder / "many", max_shard_bytes=300)
    optimizer = torch.optim.AdamW(model.parameters())
    model.blocks[0](torch.ones(8)).sum().backward()
    optimizer.step()
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, folder / "ckpt")
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def options(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    names = [each.name for each in fields(OffloadConfig)]
    if rng.random() < 0.5:
        OffloadConfig.resolve(**{rng.choice(names): anything(rng) for _ in range(rng.choice((1, 2)))})
        return
    name = f"LIGHTNING_CXL_{rng.choice(names).upper()}"
    text = rng.choice((str(anything(rng)), json.dumps(anything(rng, 1))))
    os.environ[name] = text.replace("\0", "")
    try:
        OffloadConfig.resolve()
    finally:
        del os.environ[name]


def machine_files(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    contents, path = rng.choice(MACHINES).read_bytes(), folder / "machine.yaml"
    if rng.random() < 0.5:
        path.write_bytes(damaged(contents, rng))
    else:
        path.write_text(yaml.safe_dump(altered(yaml.safe_load(contents), rng)))
    for load in (load_machine, load_overrides):
        with contextlib.suppress(LightningCXLError):
            load(path)


def checkpoints(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    (folder / "ckpt").write_bytes(damaged(sound["ckpt"], rng))
    if rng.random() < 0.5:
        torch.save(altered(torch.load(io.BytesIO(sound["ckpt"])), rng), folder / "ckpt")
    plain_checkpoint(load_file(folder / "ckpt", "cpu", True))


def safetensors(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    contents = sound["one.safetensors"]
    if rng.random() < 0.5:
        length = int.from_bytes(contents[:8], "little")
        header = json.dumps(altered(json.loads(contents[8 : 8 + length]), rng)).encode()
        contents = len(header).to_bytes(8, "little") + header + contents[8 + length :]
    else:
        contents = damaged(contents, rng)
    (folder / "one.safetensors").write_bytes(contents)
    load_weights(Net(), folder / "one.safetensors")


def indices(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    name = "model.safetensors.index.json"
    for each, contents in sound.items():
        if each.startswith("model-"):
            (folder / each).write_bytes(contents)
    index = sound[name]
    altered_index = json.dumps(altered(json.loads(index), rng)).encode() if rng.random() < 0.7 else damaged(index, rng)
    (folder / name).write_bytes(altered_index)
    load_weights(Net(), folder)


def manifests(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    body = {"store_id": "a", "drives": ["b"], "chunk_bytes": 1 << 20, "last_number": 2, "records": {"r": [8, [0]]}}
    body["generations"] = [{"number": 2, "details": {}, "records": {"r": [0, 1]}}]
    text = json.dumps(altered(body, rng))
    contents = json.dumps({"format": FORMAT, "crc": zlib.crc32(text.encode()), "body": text}).encode()
    decode(contents if rng.random() < 0.5 else damaged(contents, rng), folder)


def records(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    header = {"pid": 1, "began": 1e9, "began_s": 5.0, "boot": "", "oom_kills": 0, "command": "x"}
    text = json.dumps(altered(header, rng)).encode()
    contents = text.ljust(4096) + recorder._SAMPLE.pack(6.0, 1, 2, 3, 4) * 3
    (folder / "run-x").write_bytes(damaged(contents, rng) if rng.random() < 0.5 else contents)
    recorder._folder = lambda: folder
    recorder.last()


def native(rng: Random, folder: Path, sound: dict[str, bytes]) -> None:
    def array(kind: Any) -> np.ndarray[Any, Any]:
        made = np.zeros(rng.choice((0, 1, 3, 255, 256, 257, 1000)), rng.choice((kind, kind, kind, np.float64)))
        return made[:: rng.choice((1, 1, 1, 2, -1))]

    isa = rng.choice((*_cpu.supported_isas(), "none", ""))
    which, is_unsigned = rng.randrange(5), rng.choice((True, False))
    if which == 0:
        _adam.quantize(array(np.float32), array(np.uint8), array(np.float32), is_unsigned, isa)
    elif which == 1:
        _adam.dequantize(array(np.uint8), array(np.float32), array(np.float32), is_unsigned, isa)
    elif which == 2:
        mapping = _numa.Mapping(rng.choice((0, 1, 4096, 3 * 4096 + 1, 1 << 62)), rng.choice((1, 3, 4096, 1 << 21)))
        name = rng.choice(("advise_huge", "populate", "discard", "hide"))
        getattr(mapping, name)(rng.choice((0, 1, 4096, 1 << 40)), rng.choice((0, 1, 4096, 1 << 40, 2**64 - 1)))
    elif which == 3:
        with (folder / "shown").open("wb+") as file:
            file.truncate(1 << 16)
            at, size, start = (rng.choice((0, 1, 4096, 1 << 16, 1 << 20)) for _ in range(3))
            _numa.Mapping(1 << 16).show(at, size, rng.choice((file.fileno(), -1)), start)
    else:
        at, size = (rng.choice((0, 4096, 1 << 20)) for _ in range(2))
        _numa.Mapping(1 << 16).prefer(at, size, rng.choice((0, 1, 63, 10**6, -1)))


_DAMAGED = (options, machine_files, checkpoints, safetensors, indices, manifests, records)
TARGETS = {each.__name__: each for each in (*_DAMAGED, native)}


def work(target: str, seeds: range, at: Any, num_findings: Any) -> None:
    """Try cases; `at` shows which one runs, and is -1 at the end."""
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told = set()
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory() as name:
        sound = sound_files(Path(files))
        for seed in seeds:
            at.value, text = seed, ""
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
            try:
                TARGETS[target](Random(f"{target} {seed}"), Path(name), sound)
            except LightningCXLError as error:
                text = "" if str(error).strip() else f"{type(error).__name__} says nothing"
            except BaseException as error:
                if target != "native" or not isinstance(error, NATIVE):
                    text = f"{type(error).__name__}: {str(error)[:200]}"
            num_findings.value += bool(text)
            if text[:60] not in {"", *told}:
                told.add(text[:60])
                print(f"  {target} {seed}: {text}", flush=True)
    at.value = -1


def fuzz(target: str, seeds: range) -> int:
    """Try cases in a process; where one ends it, tell so and go on behind it. Returns how many findings there are."""
    context = multiprocessing.get_context("fork")
    at, num_findings = context.Value("q", 0), context.Value("q", 0)
    while seeds:
        at.value = seeds.start
        process = context.Process(target=work, args=(target, seeds, at, num_findings))
        process.start()
        process.join()
        if at.value == -1:
            break
        num_findings.value += 1
        print(f"  {target} {at.value}: the process ended with status {process.exitcode}", flush=True)
        seeds = range(at.value + 1, seeds.stop)
    return num_findings.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", default="", metavar="WORD", help="what is damaged")
    asked = parser.parse_args()
    targets, found = [each for each in TARGETS if asked.only in each], 0
    for target in targets:
        begin, count = time.monotonic(), -(-asked.cases // len(targets))
        found += (new := fuzz(target, range(asked.seed, asked.seed + count)))
        print(f"{target}: {count:,} cases, {new} findings, {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
