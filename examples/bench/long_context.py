"""A loss in chunks against one from all logits: seconds and memory of a step, and whether gradients are the same.

A Llama of two layers with a vocabulary of 128,256 and random weights learns one row of 8,192 random tokens: forward and
backward, plain torch on the CPU, without a strategy. Both contenders take turns, each time in a process of its own, in
an order that changes. A short row comes first, so that what libraries take at their first use does not count.

* seconds: of forward and backward;
* grown: what the process grew by at the peak (`RssAnon`, looked at every 2 ms), gradients of all weights included;
* gradients: the norm of the difference to those from all logits, relative to their norm, of the weight that differs
  most.

    python examples/bench/long_context.py [--hidden 256 512] [--precision 32-true bf16-true] [--rounds 3] [--json FILE]
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from own_memory import Growth
from results import Results, machine, print_columns
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl import chunked_loss

VOCABULARY, TOKENS = 128_256, 8192
CONTENDERS = ("all logits", "in chunks")
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}


# -- the child: one step -----------------------------------------------------------------------------------------------


def child(contender: str, hidden: int, precision: str, tokens: int, gradients: Path) -> None:
    """Make one step, print what it took as JSON and write its gradients."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=hidden // 64, max_position_embeddings=tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DTYPES[precision]).train()
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    step(model, ids[:, :300], contender)
    model.zero_grad()
    growth = Growth()
    growth.start()
    began = time.perf_counter()
    loss = step(model, ids, contender)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "grown": growth.stop(), "loss": loss}))
    save_file({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, gradients)


def step(model: LlamaForCausalLM, ids: torch.Tensor, contender: str) -> float:
    with chunked_loss(model) if contender == "in chunks" else contextlib.nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item()


# -- the parent --------------------------------------------------------------------------------------------------------


def measure(hidden: int, precision: str, options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what every contender took in every round; leaves gradients in `folder`."""
    found: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    for round_ in range(options.rounds):
        for contender in CONTENDERS[:: 1 if round_ % 2 else -1]:
            path = folder / f"{contender}.safetensors"
            settings = [contender, str(hidden), precision, str(options.tokens), str(path)]
            done = subprocess.run([sys.executable, __file__, "--child", *settings], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{settings} ended with status {done.returncode}:\n{done.stderr}")
            found[contender].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def worst_difference(folder: Path) -> float:
    one, other = (load_file(folder / f"{contender}.safetensors") for contender in CONTENDERS)
    return max(((one[name].float() - other[name].float()).norm() / one[name].float().norm()).item() for name in one)


def compare(hidden: int, precision: str, options: argparse.Namespace, results: Results) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = measure(hidden, precision, options, Path(name))
        difference = worst_difference(Path(name))
    title = f"hidden size {hidden}, {precision}"
    rows = [(title, "seconds", "spread", "grown, GiB", "loss")]
    for contender, rounds in found.items():
        seconds = [each["seconds"] for each in rounds]
        spread = (max(seconds) - min(seconds)) / median(seconds)
        grown = median(each["grown"] for each in rounds) / 2**30
        rows.append((contender, f"{median(seconds):.1f}", f"{spread:.0%}", f"{grown:.2f}", f"{rounds[0]['loss']:.6f}"))
    print_columns(rows)
    full, chunks = (found[contender] for contender in CONTENDERS)
    times = median(one["seconds"] / other["seconds"] for one, other in zip(chunks, full, strict=True))
    grown = median(one["grown"] / other["grown"] for one, other in zip(chunks, full, strict=True))
    results.add(f"{title}: seconds in chunks", times, "of those from all logits")
    results.add(f"{title}: grown in chunks", grown, "of that from all logits")
    results.add(f"{title}: gradients differ by", difference, "of their norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=["32-true"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        contender, hidden, precision, tokens, gradients = options.child
        child(contender, int(hidden), precision, int(tokens), Path(gradients))
        return
    results = Results(machine(torch.get_num_threads()))
    for precision in options.precision:
        for hidden in options.hidden:
            compare(hidden, precision, options, results)
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
