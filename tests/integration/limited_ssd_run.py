"""One job under a limit on memory, planned and run with and without the tier ssd: see test_memory_limits.py.

    python -m tests.integration.limited_ssd_run FOLDER LIMIT USE STATISTICS BYTES [unchecked]

LIMIT, USE and STATISTICS are files of a control group. The limit is what the process uses before it makes the model,
and BYTES; no limit is set where BYTES is 0. Prints one line of JSON before the runs, and one after them.
"""

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl import TierFullError
from lightning_cxl.commands.plan import main as plan
from tests.integration.limited_run import take_the_checks_away
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import token_data

BATCH, LENGTH, STEPS = 2, 128, 3
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=LENGTH, tie_word_embeddings=False,
)  # fmt: skip
"""51.6 million parameters."""


def main(folder, limit, use, statistics, extra, unchecked=""):
    folder = Path(folder)
    ssd = {"ssd": {"path": str(folder / "ssd"), "budget": "2GiB"}}

    def used():
        lines = dict(line.split() for line in Path(statistics).read_text().splitlines())
        return int(Path(use).read_text()) - sum(int(lines.get(f"{name}_file", 0)) for name in ("active", "inactive"))

    def planned(*options):
        """Return the exit status of the command `plan`, and what it found."""
        file = folder / "plan.json"
        with contextlib.redirect_stdout(io.StringIO()):
            status = plan(
                ["--model", str(folder), "--batch", str(BATCH), "--seq", str(LENGTH), "--json", str(file), *options]
            )
        return {"status": status, "found": json.loads(file.read_text())}

    def fit(model, strategy, vocab=CONFIG.vocab_size):
        module = LlamaTask(model)
        data = token_data(num_batches=STEPS, batch=BATCH, length=LENGTH, vocab=vocab)
        make_trainer(strategy, max_steps=STEPS, precision="bf16-true").fit(module, data)
        return module.losses

    warnings.simplefilter("ignore")
    CONFIG.save_pretrained(folder)
    fit(tiny_llama(max_position_embeddings=LENGTH), offload(batch_tokens=BATCH * LENGTH), 37)  # first uses of libraries
    base = used()
    result = {"base": base, "limit": base + int(extra)}
    if int(extra):
        Path(limit).write_text(str(result["limit"]))
    result["plan_of_memory"], result["plan_with_ssd"] = planned(), planned("--ssd", str(folder), "--ssd-budget", "2GiB")
    print(json.dumps(result), flush=True)
    if unchecked:
        take_the_checks_away()
    seed_everything(1, verbose=False)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in LlamaForCausalLM(CONFIG).parameters())
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(CONFIG).train()
    torch.set_default_dtype(torch.float32)
    result |= {"refusal": "", "num_parameters": num_parameters}
    try:
        result["losses"] = fit(model, offload(batch_tokens=BATCH * LENGTH))
    except TierFullError as error:
        result["refusal"] = str(error)
        strategy = offload(batch_tokens=BATCH * LENGTH, tiers=ssd, on_tier_full="error")
        result["losses"] = fit(model, strategy)
        result["on_ssd"] = strategy.report()["tiers"]["ssd"]["peak_bytes"]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
