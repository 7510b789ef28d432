"""Fine-tune a causal language model with the Trainer of transformers, as its own example script `run_clm.py` does.

    python examples/run_clm.py --model_name_or_path FOLDER --train_file text.txt --output_dir out --do_train --do_eval

It takes all options of `TrainingArguments`. One line differs from a script without us: the import of `Trainer`.
Options of the offload come from the environment, such as ``LIGHTNING_CXL_STATE=bf16``.
"""

import math
import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from lightning_cxl.transformers import CXLTrainer as Trainer


@dataclass
class ModelArguments:
    """Which model is trained."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights; without: from `config_name`."})
    config_name: str | None = field(default=None, metadata={"help": "Config of a model that is trained from scratch."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not that of the model."})
    dtype: str | None = field(default=None, metadata={"help": "Such as bfloat16; without: what the config says."})


@dataclass
class DataArguments:
    """What the model is trained and evaluated on."""

    train_file: str = field(metadata={"help": "A .txt file, or .csv or .json with a column `text`."})
    validation_file: str | None = field(default=None, metadata={"help": "Without: a part of `train_file`."})
    validation_split_percentage: int = field(default=5, metadata={"help": "How much of `train_file` that is."})
    block_size: int = field(default=1024, metadata={"help": "Tokens of a sequence."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many sequences."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many sequences."})


def read(arguments: DataArguments) -> DatasetDict:
    """Return the texts to train on and those to evaluate on."""
    files = {"train": arguments.train_file}
    if arguments.validation_file is not None:
        files["validation"] = arguments.validation_file
    kind = arguments.train_file.rsplit(".", 1)[-1]
    texts = load_dataset("text" if kind == "txt" else kind, data_files=files)
    if "validation" not in texts:
        percent = arguments.validation_split_percentage
        for name, split in (("validation", f"train[:{percent}%]"), ("train", f"train[{percent}%:]")):
            texts[name] = load_dataset("text" if kind == "txt" else kind, data_files=files, split=split)
    return texts


def blocks(texts: DatasetDict, tokenizer, block_size: int) -> DatasetDict:
    """Return sequences of `block_size` tokens, one document behind the other."""
    tokens = texts.map(
        lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=list(texts["train"].features), desc="Tokens"
    )

    def group(rows):
        joined = {name: list(chain(*rows[name])) for name in rows}
        total = len(joined["input_ids"]) // block_size * block_size
        result = {name: [t[i : i + block_size] for i in range(0, total, block_size)] for name, t in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    return tokens.map(group, batched=True, desc="Blocks")


def accuracy(predictions) -> dict[str, float]:
    """Return how many of the next tokens were predicted."""
    found, labels = predictions
    return {"accuracy": float((found[:, :-1] == labels[:, 1:]).mean())}


def first(data: Dataset, count: int | None) -> Dataset:
    """Return the first rows."""
    return data if count is None else data.select(range(min(count, len(data))))


def main(arguments: list[str] | None = None) -> Trainer:
    """Train and evaluate; returns the Trainer."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses(args=arguments)
    set_seed(args.seed)

    source = model_args.model_name_or_path or model_args.config_name
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or source)
    config = AutoConfig.from_pretrained(source)
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=model_args.dtype or "auto")
    else:
        model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    with args.main_process_first(desc="datasets"):
        data = blocks(read(data_args), tokenizer, min(data_args.block_size, tokenizer.model_max_length))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=first(data["train"], data_args.max_train_samples) if args.do_train else None,
        eval_dataset=first(data["validation"], data_args.max_eval_samples) if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy if args.do_eval else None,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(dim=-1),
    )

    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
