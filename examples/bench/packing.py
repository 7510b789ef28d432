"""Packed rows against padded ones: how many tokens of real documents a model learns in a second.

Documents are the source files of the running interpreter's standard library, as tokens of a BPE that is trained on
them; those longer than a row are cut into pieces of a row. A Llama with random weights learns the same documents in two
ways, forward and backward on the CPU:

* padded: each document has a row, padded to the longest of its batch;
* packed: documents share rows, with positions that begin anew with each ([Note: Packed rows] in the package).

A batch has as many rows both times. Only tokens of documents count. Rounds alternate; before them, a batch of each
warms up. CPU seconds of the process are shown, too: they count where others use the cores. That no token attends to
another document is checked first: losses of both ways must agree.

    python examples/bench/packing.py [--row 1024] [--documents 96] [--rounds 5] [--json FILE]
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl import chunked_loss, pack_sequences, packed_arguments
from lightning_cxl.commands.measuring.results import Results, machine, print_columns
from lightning_cxl.finetune.corpus import stdlib_files
from lightning_cxl.finetune.tokenizer import train_tokenizer

VOCABULARY, BATCH = 8192, 4
Batch = dict[str, torch.Tensor]


def documents(count: int, row: int) -> list[list[int]]:
    """Return tokens of `count` files, every seventh of the sorted ones, in pieces of at most `row`."""
    texts = [path.read_text() for path in stdlib_files()[::7][:count]]
    encoded = train_tokenizer(texts, VOCABULARY)(texts, verbose=False)["input_ids"]
    return [ids[start : start + row] for ids in encoded for start in range(0, len(ids), row)]


def padded(pieces: list[list[int]]) -> list[Batch]:
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    return [rows([pieces[i] for i in order[start : start + BATCH]]) for start in range(0, len(order), BATCH)]


def rows(ids: list[list[int]]) -> Batch:
    found = [torch.tensor(each) for each in ids]
    labels = pad_sequence(found, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(found, batch_first=True), "labels": labels}


def packed(pieces: list[list[int]], row: int) -> list[Batch]:
    found = pack_sequences(pieces, row)
    padding = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return [
        {
            name: pad_sequence(
                [torch.tensor(each) for each in found[name][start : start + BATCH]],
                batch_first=True,
                padding_value=value,
            )
            for name, value in padding.items()
        }
        for start in range(0, len(found["input_ids"]), BATCH)
    ]


def learn(model: LlamaForCausalLM, batches: list[Batch], backward: bool = True) -> tuple[float, float, float, int]:
    """Return the sum of all losses, seconds, CPU seconds, and how many tokens were given, with padding."""
    total, given, began, cpu_began = 0.0, 0, time.perf_counter(), time.process_time()
    for batch in batches:
        arguments = {}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pieces = documents(options.documents, options.row)
    ways = {"padded": padded(pieces), "packed": packed(pieces, options.row)}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=options.row,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    tokens = sum(map(len, pieces))
    losses = {name: learn(model, batches, backward=False)[0] for name, batches in ways.items()}
    assert abs(losses["packed"] / losses["padded"] - 1) < 1e-5, losses
    for batches in ways.values():
        learn(model, batches[:1])
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    given = {}
    for round_ in range(options.rounds):
        for name in list(ways)[:: 1 if round_ % 2 else -1]:
            model.zero_grad()
            _, seconds, cpu_seconds, given[name] = learn(model, ways[name])
            speeds[name].append(tokens / seconds)
            cpu[name].append(tokens / cpu_seconds)
    print(f"{len(pieces)} pieces, {tokens:,} tokens, rows of {options.row}")
    table = [("", "rows", "padding", "tokens/s", "spread", "tokens per CPU s")]
    for name, batches in ways.items():
        spread = (max(speeds[name]) - min(speeds[name])) / median(speeds[name])
        count = sum(len(batch["input_ids"]) for batch in batches)
        middle = f"{median(speeds[name]):,.0f}"
        table.append(
            (name, f"{count}", f"{1 - tokens / given[name]:.1%}", middle, f"{spread:.0%}", f"{median(cpu[name]):,.0f}")
        )
    print_columns(table)
    results = Results(machine(torch.get_num_threads()))
    ratio = median(one / other for one, other in zip(speeds["packed"], speeds["padded"], strict=True))
    results.add("tokens per second, packed", ratio, "of padded")
    cpu_ratio = median(one / other for one, other in zip(cpu["packed"], cpu["padded"], strict=True))
    results.add("tokens per CPU second, packed", cpu_ratio, "of padded")
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
