"""`TextData`: text or conversations of files, tokenized, packed and batched for a causal language model."""

import contextlib
import glob
import json
import os
import re
import sysconfig
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_cxl.config import private_folder
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.integrations.lightning import LightningDataModule
from lightning_cxl.sequences.chunked_loss import IGNORED
from lightning_cxl.sequences.packing import fit_rows, without_first
from lightning_cxl.weights.hf import without_code

_EXPECTED = (
    'expected one JSON object per line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}, {"prompt": "...", "completion": "..."}, {"instruction": "...", "input": "...", '
    '"output": "..."}, or {"text": "..."}'
)
_RECORDS = ({"messages"}, {"prompt", "completion"}, {"instruction", "output"}, {"text"})
FALLBACK_TEMPLATE = (  # for a tokenizer without a template; needs no tokens of its own
    "{{- bos_token if bos_token is defined else '' -}}{%- for message in messages -%}"
    "{{- '### ' + message['role'] | capitalize + ':\\n' -}}{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n\\n' -}}"
    "{%- else -%}{{- message['content'] + '\\n\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '### Assistant:\\n' -}}{%- endif -%}"
)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_SPLIT_SEED = 0  # one split for all runs, so that their validation losses compare
_RECIPE = 4  # part of the cache key of samples: change it when those of the same text change
_PROMPT_TOKENS = 16
_END = "<|endoftext|>"
Batch = dict[str, Tensor]
Record = str | tuple[list[dict[str, Any]], list[Any] | None]  # a document, or messages and tools


class SampleLoader:
    """Whole batches of packed rows: "input_ids", "labels", "position_ids", int64 ``(rows, tokens)``.

    The order depends on `seed` (None: that of `rows`) and the epoch alone. Lightning calls `set_epoch` (through
    `sampler`), saves `state_dict()` and calls `load_state_dict()` before the first batch: a resume is exact.
    """

    batch_sampler, sampler = None, property(lambda self: self)  # where Lightning looks for `set_epoch`

    def __init__(
        self, samples: Dataset, rows: Sequence[list[int]], batch_size: int, *, pad_id: int = 0,
        seed: int | None = None, rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        self.samples, self.rows, self.batch_size, self.pad_id, self.seed = samples, rows, batch_size, pad_id, seed
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self._next_batch = 0  # of the running epoch: what a checkpoint taken now must continue with
        self._start = 0  # of the next iterator; not 0 only after load_state_dict()

    def __len__(self) -> int:
        return len(self.rows) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: epoch and start are read at the first batch, after Lightning's set_epoch()
        start, self._start = self._start, 0
        order = torch.arange(len(self.rows))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(self.rows), generator=generator)
        own = order[self.rank :: self.world_size].tolist()
        for index in range(start, len(self)):
            self._next_batch = index + 1
            yield self._batch(own[index * self.batch_size : (index + 1) * self.batch_size])

    def _batch(self, numbers: list[int]) -> Batch:
        rows = [self.samples[self.rows[number]] for number in numbers]
        found = {name: [torch.cat(list(row[name])) for row in rows] for name in ("input_ids", "labels")}
        found["position_ids"] = [torch.cat([torch.arange(len(ids)) for ids in row["input_ids"]]) for row in rows]
        fill = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": 0}  # see [Note: Packed rows]
        batch = {name: pad_sequence(found[name], True, value) for name, value in fill.items()}
        return batch | {"labels": without_first(batch["labels"], batch["position_ids"])}

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._next_batch = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        order = {name: getattr(self, name) for name in ("batch_size", "seed", "world_size")}
        return {"epoch": self.epoch, "next_batch": self._next_batch, "order": {"num_blocks": len(self.rows), **order}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()["order"]
        if 0 < state["next_batch"] < len(self) and state["order"] != own:
            raise CheckpointError(
                f"the checkpoint is at batch {state['next_batch']} of an epoch over {state['order']}, this run reads "
                f"{own}. Use the same data options, or start a new run from exported weights (--model.name_or_path)"
            )
        self.epoch = state["epoch"]
        self._start = self._next_batch = state["next_batch"]


class TextData(LightningDataModule):
    """Documents and conversations as samples of up to `seq_len` tokens, packed into rows.

    They are shuffled once, tokenized and packed; in a row no sample attends to another one.
    Samples are cached (LIGHTNING_CXL_CACHE) until text, tokenizer or `seq_len` change.
    """

    def __init__(
        self,
        text_files: str | list[str] | None = None,
        *,
        seq_len: int = 256,
        batch_size: int = 6,
        vocab_size: int = 8192,
        val_fraction: float = 0.05,
        seed: int = 0,
        tokenizer_name_or_path: str | None = None,
        train_on: Literal["answers", "all"] = "answers",
    ) -> None:
        """Keep the options; files are read in `prepare_data`.

        Args:
            text_files: Files or globs: text in UTF-8, or JSONL with conversations or documents, a line each. None: the
                Python standard library's sources.
            seq_len: Most tokens of a row, and of a sample in it.
            batch_size: Rows in a batch, per process.
            vocab_size: Size of the byte-level BPE that is trained on the files; unused with a model's own tokenizer.
            val_fraction: Share of the samples that is held out for validate, test and predict.
            seed: Of the order of the training samples.
            tokenizer_name_or_path: Use this tokenizer (hub id or folder) instead of training one.
            train_on: The part of conversations to learn: "answers" of the assistant, or "all" with the questions.
        """
        super().__init__()
        if seq_len < 2 or batch_size < 1 or not 0 < val_fraction < 1 or train_on not in ("answers", "all"):
            given = f"seq_len {seq_len}, batch_size {batch_size}, val_fraction {val_fraction}, train_on {train_on!r}"
            need = 'seq_len >= 2, batch_size >= 1, 0 < val_fraction < 1, and train_on "answers" or "all"'
            raise ConfigError(f"need {need}; got {given}")
        self.text_files, self.seq_len, self.batch_size, self.seed = text_files, seq_len, batch_size, seed
        self.vocab_size, self.tokenizer_name_or_path = vocab_size, tokenizer_name_or_path
        self.val_fraction, self.train_on = val_fraction, train_on
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._train: Any = None

    def prepare_data(self) -> None:
        self._load()

    def setup(self, stage: str | None = None) -> None:
        if self._train is not None:
            return
        self.tokenizer, samples = self._load()
        columns, count = samples.with_format("numpy"), len(samples)
        lengths, scored = (np.asarray(columns[name][:], dtype=np.int64) for name in ("length", "scored"))
        kept, long = np.flatnonzero(scored), int((lengths > self.seq_len).sum())
        samples = samples.select(kept)
        if long or len(kept) < count:
            warnings.warn(
                f"of {count} samples {long} are longer than {self.seq_len} tokens and lose their end; "
                f"{count - len(kept)} have no answer in what is left and are left out. The longest has "
                f"{lengths.max()} tokens: raise data.seq_len",
                LightningCXLWarning,
                stacklevel=1,
            )
        batch = self.batch_size * self._processes()[1]
        num_train = len(samples) - max(batch, round(len(samples) * self.val_fraction))
        if num_train < batch:
            raise ConfigError(
                f"the files give {len(samples)} samples, too few for one training and one validation batch of "
                f"{self.batch_size}: add some, or lower seq_len or batch_size"
            )
        self._held_out = samples.select(range(num_train, len(samples)))
        self._train = samples.select(range(num_train))

    def train_dataloader(self) -> SampleLoader:
        return self._loader(self._train, self.seed)

    def val_dataloader(self) -> SampleLoader:
        return self._loader(self._held_out, None)

    test_dataloader = predict_dataloader = val_dataloader

    def held_out(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return (prompt, expected) of up to `count` held-out samples, int64 ``(tokens,)`` each, after `setup`.

        A conversation is cut where its first answer begins, and ends with it; a document is cut after 16 tokens.
        """
        return [cut(self._held_out[number]) for number in range(min(count, len(self._held_out)))]

    def _loader(self, samples: Any, seed: int | None) -> SampleLoader:
        assert self.tokenizer is not None, "setup() comes first"
        rank, world_size = self._processes()
        lengths = samples.with_format("numpy")["length"][:]
        rows = fit_rows([min(int(length), self.seq_len) for length in lengths], self.seq_len)
        if len(rows) < self.batch_size * world_size:  # too few: each sample has a row
            rows = [[number] for number in range(len(samples))]
        options: dict[str, Any] = {"pad_id": self.tokenizer.eos_token_id, "rank": rank, "world_size": world_size}
        return SampleLoader(samples, rows, self.batch_size, seed=seed, **options)

    def _processes(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _load(self) -> tuple[PreTrainedTokenizerBase, Dataset]:
        """Return the tokenizer and all samples, from the caches where they have them."""
        files = stdlib_files() if self.text_files is None else user_files(self.text_files)
        kinds = {has_records(path): path for path in files}
        if len(kinds) > 1:
            raise ConfigError(f"text_files: `{kinds[True]}` has lines of JSON, `{kinds[False]}` has not: name one kind")
        by_line, names, cache = True in kinds, [str(path) for path in files], str(private_folder("datasets"))
        columns = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
        columns |= {"length": Value("int64"), "scored": Value("int64")}
        try:
            # lines of JSON are read as text, too: the JSON reader of `datasets` makes timestamps of answers that look
            # like dates, and its errors name no line of a file
            how: dict[str, Any] = {"sample_by": "line" if by_line else "document", "cache_dir": cache}
            texts = load_dataset("text", data_files=names, split="train", **how)
            if self.tokenizer_name_or_path is not None:
                tokenizer = load_tokenizer(self.tokenizer_name_or_path)
            else:
                each = (text for batch in texts.iter(64) for text in batch["text"] if text.strip())
                shown = (_as_text(read_record(line)) for line in each) if by_line else each
                tokenizer = cached_tokenizer(shown, self.vocab_size, texts._fingerprint)
            if by_line:
                tokenizer.chat_template = tokenizer.chat_template or FALLBACK_TEMPLATE
            options = {"tokenizer": tokenizer, "seq_len": self.seq_len, "train_on": self.train_on, "by_line": by_line}
            made: dict[str, Any] = {"features": Features(columns), "fn_kwargs": {**options, "recipe": _RECIPE}}
            mixed = texts.shuffle(seed=_SPLIT_SEED)
            samples = mixed.map(tokenize, batched=True, desc="Tokenizing", remove_columns=["text"], **made)
        except (DatasetGenerationError, FileNotFoundError) as error:
            raise ConfigError(f"cannot read the {len(files)} text files: {error.__cause__ or error}") from error
        return tokenizer, samples.with_format("torch")


def cut(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a sample as prompt and expected continuation, int64 ``(tokens,)`` each."""
    ids, labels = sample["input_ids"], sample["labels"]
    start = int((labels != IGNORED).nonzero()[0]) or _PROMPT_TOKENS  # nothing can be generated from no token
    after = (labels[start:] == IGNORED).nonzero()
    return ids[:start], ids[start : start + int(after[0]) if len(after) else None]


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """Return the ``.py`` files of the interpreter's standard library, or of `root`, sorted."""
    root, found = Path(root or sysconfig.get_path("stdlib")), list[Path]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _SKIPPED
        found += (path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file())
    if not found:
        raise ConfigError(f"the standard library at `{root}` has no sources: name files with --data.text_files")
    return sorted(found)


def user_files(patterns: str | Sequence[str]) -> list[Path]:
    """Return the files that `patterns` (paths or globs, ``**`` allowed) name, sorted, each once."""
    files: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {Path(name).resolve() for name in glob.glob(os.path.expanduser(pattern), recursive=True)}
        if not (found := set(filter(Path.is_file, found))):
            raise ConfigError(f"text_files: {pattern!r} matches no file (looked from `{os.getcwd()}`)")
        files |= found
    if not files:
        raise ConfigError("text_files is empty: name a file, or leave it out to train on the standard library")
    return sorted(files)


def has_records(path: Path) -> bool:
    """Return whether a file of text has lines of JSON, by its name or its first line that is not empty."""
    try:
        with path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "")
            while file.read(1 << 20):  # is all of it text?
                pass
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text_files: `{path}` cannot be read as UTF-8 text: convert it, or leave it out") from error
    keys: set[str] = set()
    with contextlib.suppress(ConfigError):
        keys = set(_object(first))
    return path.suffix in (".jsonl", ".ndjson", ".json") or any(keys >= each for each in _RECORDS)


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise _refused(line, f"not JSON ({error}); {_EXPECTED}") from None
    if not isinstance(row, dict):
        raise _refused(line, _EXPECTED)
    return row


def _refused(line: str, reason: str) -> ConfigError:
    return ConfigError(f"text_files: the line `{textwrap.shorten(line, 80, placeholder='...')}` is refused: {reason}")


def read_record(line: str) -> Record:
    """Return the document of a line, or messages and tools; a prompt is a message of the user."""
    match row := _object(line):
        case {"messages": list(messages)} if isinstance(row.get("tools") or [], list):
            return _checked(messages, line), row.get("tools") or None
        case {"prompt": str(question), "completion": str(answer)}:
            pass
        case {"instruction": str(question), "output": str(answer)} if isinstance(row.get("input") or "", str):
            question += f"\n\n{row['input']}" if row.get("input") else ""
        case {"text": str(text)} if not any(row.keys() >= each for each in _RECORDS[:3]):
            return text
        case _:
            raise _refused(line, _EXPECTED)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None


def _checked(messages: list[Any], line: str) -> list[dict[str, Any]]:
    for number, message in enumerate(messages, 1):
        match message:
            case {"role": "assistant", "tool_calls": [_, *_] as calls} if isinstance(message.get("content") or "", str):
                pass
            case {"role": str(), "content": str()}:
                calls = []
            case _:
                raise _refused(line, f"message {number} needs `role` and `content` as text, or `tool_calls`")
        if message.get("weight", 1) != 1:
            raise _refused(line, f"message {number} has a `weight`, which is not supported: take it out")
        for call in calls:  # OpenAI has arguments as text, templates expect objects
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with contextlib.suppress(ValueError):
                    function["arguments"] = json.loads(function["arguments"])
    if not any(message["role"] == "assistant" for message in messages):
        raise _refused(line, "no message has the role assistant, so there is no answer to learn")
    return messages


def _as_text(record: Record) -> str:
    """Return a conversation as `FALLBACK_TEMPLATE` shows it: a new tokenizer learns from that."""
    if isinstance(record, str):
        return record
    return "".join(f"### {each['role'].capitalize()}:\n{each.get('content') or ''}\n\n" for each in record[0])


def samples_of(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, *, train_on_all: bool
) -> list[tuple[list[int], list[int]]]:
    """Return a conversation as (tokens, labels): one sample, or one for each answer.

    A template may mark what the assistant says with ``{% generation %}``. Without marks, an answer is what it adds to
    the text with which the template asks for it. Where a template shows it otherwise when more follows (Qwen3 takes its
    thoughts out), each answer becomes a sample that ends with it.
    """
    if not train_on_all and _MARKS.search(tokenizer.get_chat_template(tools=tools)):
        marked = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = tokenizer.apply_chat_template(messages, tools=tools, **marked)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return [(encoded["input_ids"], [token if said else IGNORED for token, said in pairs])]

    def shown(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))

    def sample(text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        labels = [
            token if any(begin < stop and end > start for start, stop in spans) else IGNORED
            for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]
        return encoded["input_ids"], labels

    whole, answers = shown(messages), []
    if train_on_all:
        return [sample(whole, [(0, len(whole))])]
    # templates cannot show what asks for an answer that comes first: it is not learned
    for index in (index for index, message in enumerate(messages) if index and message["role"] == "assistant"):
        opened, after = shown(messages[:index], add_generation_prompt=True), shown(messages[: index + 1])
        if not after.startswith(opened):
            raise ValueError(
                "it shows an answer otherwise than it asks for it, so the answer is not found in its text: mark it in "
                "the template with {% generation %}, or train on all (data.train_on)"
            )
        answers.append((after, (len(opened), len(after))))
    if all(whole.startswith(after) for after, _ in answers):
        return [sample(whole, [span for _, span in answers])]
    return [sample(after, [span]) for after, span in answers]


def tokenize(
    batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, train_on: str, by_line: bool,
    recipe: int = 0,
) -> dict[str, list[Any]]:  # fmt: skip
    """Return samples of at most `seq_len` tokens: long documents in pieces; `recipe` is for the cache alone."""
    samples: list[tuple[list[int], list[int]]] = []
    documents, end = list[str](), tokenizer.eos_token_id
    for line in filter(str.strip, batch["text"]):
        if isinstance(record := read_record(line) if by_line else line, str):
            documents.append(record)
            continue
        try:
            samples += samples_of(*record, tokenizer, train_on_all=train_on == "all")
        except (TemplateError, TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise _refused(line, f"the chat template refuses the conversation: {error}") from error
    for ids in tokenizer(documents, verbose=False)["input_ids"] if documents else ():
        ended = ids if ids[-1:] == [end] else [*ids, end]
        pieces = (ended[start : start + seq_len] for start in range(0, len(ended), seq_len))
        samples += [(piece, piece) for piece in pieces if len(piece) > 1]
    return {
        "input_ids": [ids[:seq_len] for ids, _ in samples],
        "labels": [labels[:seq_len] for _, labels in samples],
        "length": [len(ids) for ids, _ in samples],
        "scored": [sum(label != IGNORED for label in labels[1:seq_len]) for _, labels in samples],
    }


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub id or a local folder."""
    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained, name_or_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = f"{name_or_path!r} (a local folder or a hub id)"
        raise ConfigError(f"cannot load a tokenizer from {where}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name_or_path!r} has no end-of-text token, which separates documents")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with at most `vocab_size` tokens."""
    if vocab_size < 257:  # every byte, and the end of a text
        raise ConfigError(f"vocab_size {vocab_size} is too small for a byte-level BPE: at least 257")
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [_END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)


def cached_tokenizer(texts: Iterable[str], vocab_size: int, corpus_key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that is trained on `texts`; the cache has it by `corpus_key` and size."""
    path = private_folder("tokenizers") / f"bpe2-{corpus_key}-{vocab_size}.json"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as unfinished:
            train_tokenizer(texts, vocab_size).backend_tokenizer.save(f"{unfinished}/tokenizer.json")
            os.replace(f"{unfinished}/tokenizer.json", path)  # appears complete or not at all
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_END)
