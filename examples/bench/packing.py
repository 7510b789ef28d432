"""Packed rows against padded ones: how many tokens of real documents a model learns in a second.

Documents are the source files of the running interpreter's standard library, as tokens of a BPE that is trained on
them; those longer than a row are cut into pieces of a row. A Llama with random weights learns the same documents in
two ways, forward and backward on the CPU, with sdpa attention:

* padded: each document has a row, padded to the longest of its batch;
* packed: documents share rows, with positions that begin anew with each; transformers makes a mask of all pairs of
  tokens.

A batch has as many rows each time. Only tokens of documents count. Rounds alternate; before them, a batch of each
warms up. CPU seconds of the process are shown, too: they count where others use the cores. That no token attends to
another document is checked first: losses of all ways must agree. *Grown* is what a process of its own grew by at the
peak of one batch (`RssAnon`, looked at every 2 ms), gradients included.

    python examples/bench/packing.py [--row 1024] [--batch 4] [--longest N] [--documents 96] [--rounds 5] [--json FILE]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from own_memory import Growth
from results import Results, machine, print_columns
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl import chunked_loss, pack_sequences, packed_arguments
from lightning_cxl.finetune.data import find_files, trained_tokenizer

VOCABULARY = 8192
Batch = dict[str, torch.Tensor]


def documents(count: int, row: int) -> list[list[int]]:
    """Return tokens of `count` files, every seventh of the sorted ones, in pieces of at most `row`."""
    texts = [path.read_text() for path in find_files(None)[::7][:count]]
    encoded = trained_tokenizer(texts, VOCABULARY, f"packing-{count}")(texts, verbose=False)["input_ids"]
    return [ids[start : start + row] for ids in encoded for start in range(0, len(ids), row)]


def padded(pieces: list[list[int]], batch: int) -> list[Batch]:
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    return [rows([pieces[i] for i in order[start : start + batch]]) for start in range(0, len(order), batch)]


def rows(ids: list[list[int]]) -> Batch:
    found = [torch.tensor(each) for each in ids]
    labels = pad_sequence(found, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(found, batch_first=True), "labels": labels}


def packed(pieces: list[list[int]], row: int, batch: int) -> list[Batch]:
    found = pack_sequences(pieces, row)
    padding = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return [
        {
            name: pad_sequence(
                [torch.tensor(each) for each in found[name][start : start + batch]],
                batch_first=True,
                padding_value=value,
            )
            for name, value in padding.items()
        }
        for start in range(0, len(found["input_ids"]), batch)
    ]


def learn(model: LlamaForCausalLM, batches: list[Batch], backward: bool = True) -> tuple[float, float, float, int]:
    """Return the sum of all losses, seconds, CPU seconds, and how many tokens were given, with padding."""
    total, given, began, cpu_began = 0.0, 0, time.perf_counter(), time.process_time()
    for batch in batches:
        arguments: dict[str, Any] | None = {}
        if "position_ids" in batch:
            arguments = packed_arguments(model, batch["position_ids"])
            assert arguments is not None
        with chunked_loss(model), torch.set_grad_enabled(backward):
            loss = model(
                input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False, num_items_in_batch=1, **arguments
            ).loss
        if backward:
            loss.backward()
        total += loss.item()
        given += batch["input_ids"].numel()
    return total, time.perf_counter() - began, time.process_time() - cpu_began, given


def made(options: argparse.Namespace) -> tuple[list[list[int]], dict[str, list[Batch]], LlamaForCausalLM]:
    """Return documents, batches of each way, and the model."""
    pieces = documents(options.documents, min(options.longest or options.row, options.row))
    ways = {"padded": padded(pieces, options.batch), "packed": packed(pieces, options.row, options.batch)}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=options.row,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    return pieces, ways, model


def child(way: str, options: argparse.Namespace) -> float:
    """Return the MiB that this process grows by while it learns a batch."""
    _, ways, model = made(options)
    batch = ways[way][0]
    learn(model, [{name: values[:, :300] for name, values in batch.items()}])  # what libraries take at first
    model.zero_grad()
    growth = Growth()
    growth.start()
    learn(model, [batch])
    return growth.stop() / 2**20


def measured(way: str) -> float:
    command = [sys.executable, *sys.argv, "--child", way]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--longest", type=int, help="tokens of a document, at most; default: a row")
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(child(options.child, options))
        return
    pieces, ways, model = made(options)
    tokens = sum(map(len, pieces))
    losses = {way: learn(model, batches, backward=False)[0] for way, batches in ways.items()}
    assert max(losses.values()) / min(losses.values()) - 1 < 1e-5, losses
    for batches in ways.values():
        learn(model, batches[:1])
    grown = {way: measured(way) for way in ways}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    given = {}
    for round_ in range(options.rounds):
        for way in list(ways)[:: 1 if round_ % 2 else -1]:
            model.zero_grad()
            _, seconds, cpu_seconds, given[way] = learn(model, ways[way])
            speeds[way].append(tokens / seconds)
            cpu[way].append(tokens / cpu_seconds)
    print(f"{len(pieces)} pieces, {tokens:,} tokens, rows of {options.row}")
    table = [("", "rows", "padding", "tokens/s", "spread", "tokens per CPU s", "grown, MiB")]
    for way, batches in ways.items():
        spread = f"{(max(speeds[way]) - min(speeds[way])) / median(speeds[way]):.0%}"
        count, padding = f"{sum(len(batch['input_ids']) for batch in batches)}", f"{1 - tokens / given[way]:.1%}"
        middles = [f"{median(each[way]):,.0f}" for each in (speeds, cpu)]
        table.append((way, count, padding, middles[0], spread, middles[1], f"{grown[way]:,.0f}"))
    print_columns(table)
    results = Results(machine(torch.get_num_threads()))
    for other in list(ways)[:-1]:
        for unit, found in (("second", speeds), ("CPU second", cpu)):
            ratio = median(one / another for one, another in zip(found["packed"], found[other], strict=True))
            results.add(f"tokens per {unit}, packed", ratio, f"of {other}")
        results.add("grown, packed", grown["packed"] / grown[other], f"of {other}")
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
