"""`TextData`: text or conversations of files, tokenized, packed and batched for a causal language model."""

import contextlib
import glob
import json
import os
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from jinja2 import TemplateError
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DistributedSampler
from transformers import AutoTokenizer, DataCollatorWithFlattening, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_cxl.config import private_folder
from lightning_cxl.errors import CheckpointError, ConfigError, warn
from lightning_cxl.integrations.lightning import LightningDataModule
from lightning_cxl.sequences.chunked_loss import IGNORED
from lightning_cxl.sequences.packing import fit_rows
from lightning_cxl.weights.hf import without_code

_EXPECTED = (
    'expected one JSON object per line, with "messages", "prompt" and "completion", "instruction" and "output", or '
    '"text". Messages have text or, of the assistant, `tool_calls`; one at least is of the assistant, and none has a '
    "`weight`"
)
FALLBACK_TEMPLATE = (  # for a tokenizer without a template; needs no tokens of its own
    "{{ bos_token }}{% for message in messages %}### {{ message['role'] | capitalize }}:\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_END = "<|endoftext|>"
_TOKENS, _COUNT = List(Value("int32")), Value("int64")
_COLUMNS = Features({"input_ids": _TOKENS, "labels": _TOKENS, "length": _COUNT, "scored": _COUNT})
Batch = dict[str, Tensor]
Record = str | tuple[list[dict[str, Any]], list[Any] | None]  # a document, or messages and tools
Sample = tuple[list[int], list[int]]  # tokens and labels


class SampleLoader:
    """Whole batches of packed rows: "input_ids", "labels", "position_ids", int64 ``(rows, tokens)``.

    `sampler` orders its rows, each the numbers of some `samples`. Lightning calls its `set_epoch`, saves `state_dict()`
    and calls `load_state_dict()` before the first batch: a resume is exact.
    """

    batch_sampler = None  # where Lightning looks for `set_epoch`, too

    def __init__(self, samples: Dataset, sampler: Any, batch_size: int) -> None:
        self.samples, self.sampler, self.batch_size = samples, sampler, batch_size
        self.order = {"rows": len(sampler.dataset), "seed": sampler.seed, "world_size": sampler.num_replicas}
        self.order["batch_size"] = batch_size
        self._done = self._loaded = (0, 0)  # epoch, and batches of it: of a checkpoint now, and of the next iterator

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        # a generator: the sampler's epoch is read at the first batch, after Lightning's set_epoch()
        (epoch, done), self._loaded = self._loaded, (0, 0)
        batches = list(BatchSampler(self.sampler, self.batch_size, drop_last=True))
        for index in range(done if epoch == self.sampler.epoch else 0, len(batches)):
            self._done = self.sampler.epoch, index + 1
            yield self._batch(batches[index])

    def _batch(self, numbers: list[int]) -> Batch:
        flatten = DataCollatorWithFlattening()
        rows = [flatten([self.samples[sample] for sample in self.sampler.dataset[row]]) for row in numbers]
        fill = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}  # see [Note: Packed rows]
        return {name: pad_sequence([row[name][0] for row in rows], True, value) for name, value in fill.items()}

    def state_dict(self) -> dict[str, Any]:
        epoch, done = self.sampler.epoch, self._done
        return {"epoch": epoch, "next_batch": done[1] if done[0] == epoch else 0, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given, number = state["order"], state["next_batch"]
        if 0 < number < len(self) and given != self.order:
            raise CheckpointError(
                f"the checkpoint is at batch {number} of an epoch over {given}, this run reads {self.order}. Use the "
                "same data options, or start a new run from exported weights (--model.name_or_path)"
            )
        self.sampler.set_epoch(state["epoch"])
        self._done = self._loaded = state["epoch"], number


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
        if seq_len < 2 or batch_size < 1 or not 0 < val_fraction < 1:
            given = f"seq_len {seq_len}, batch_size {batch_size}, val_fraction {val_fraction}"
            raise ConfigError(f"need seq_len >= 2, batch_size >= 1 and 0 < val_fraction < 1; got {given}")
        self.text_files, self.seq_len, self.batch_size, self.seed = text_files, seq_len, batch_size, seed
        self.vocab_size, self.tokenizer_name_or_path = vocab_size, tokenizer_name_or_path
        self.val_fraction, self.train_on = val_fraction, train_on
        self.tokenizer: Any = None
        self._split: Any = None

    def prepare_data(self) -> None:
        self._load()

    def setup(self, stage: str | None = None) -> None:
        if self._split is not None:
            return
        self.tokenizer, samples = self._load()
        lengths, kept = samples["length"][:], samples["scored"][:].nonzero()[:, 0].tolist()
        long = int((lengths > self.seq_len).sum())
        if long or len(kept) < len(samples):
            warn(
                f"of {len(samples)} samples {long} are longer than {self.seq_len} tokens and lose their end; "
                f"{len(samples) - len(kept)} have no answer in what is left and are left out. The longest has "
                f"{lengths.max()} tokens: raise data.seq_len"
            )
        batch = self.batch_size * self._processes()[1]
        held_out = max(batch, round(len(kept) * self.val_fraction))
        if len(kept) < held_out + batch:
            raise ConfigError(
                f"the files give {len(kept)} samples, too few for one training and one validation batch of "
                f"{self.batch_size}: add some, or lower seq_len or batch_size"
            )
        self._split = samples.select(kept).train_test_split(held_out, shuffle=False)

    def train_dataloader(self) -> SampleLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> SampleLoader:
        return self._loader("test", shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader

    def held_out(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return (prompt, expected) of up to `count` held-out samples, int64 ``(tokens,)`` each, after `setup`.

        A conversation is cut where its first answer begins, and ends with it; a document is cut after 16 tokens.
        """
        found, rows = [], self._split["test"][:count]
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            start = int((labels != IGNORED).nonzero()[0]) or 16  # nothing can be generated from no token
            after = (labels[start:] == IGNORED).nonzero()
            found.append((ids[:start], ids[start : start + int(after[0]) if len(after) else None]))
        return found

    def _loader(self, part: str, *, shuffle: bool) -> SampleLoader:
        samples, (rank, count) = self._split[part], self._processes()
        rows = fit_rows(samples["length"][:].clamp(max=self.seq_len).tolist(), self.seq_len)
        if len(rows) < self.batch_size * count:  # too few: each sample has a row
            rows = [[number] for number in range(len(samples))]
        seed = self.seed * 1_000_003  # the sampler adds the epoch: orders of other seeds are others
        order: Any = DistributedSampler(rows, count, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        return SampleLoader(samples, order, self.batch_size)

    def _processes(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _load(self) -> tuple[PreTrainedTokenizerBase, Dataset]:
        """Return the tokenizer and all samples, from the caches where they have them."""
        files = find_files(self.text_files)
        kinds = {has_records(path): path for path in files}
        if len(kinds) > 1:
            raise ConfigError(f"text_files: `{kinds[True]}` has lines of JSON, `{kinds[False]}` has not: name one kind")
        by_line = True in kinds
        # lines of JSON are read as text, too: the JSON reader of `datasets` makes timestamps of answers that look like
        # dates, and its errors name no line of a file
        how: dict[str, Any] = {"sample_by": "line" if by_line else "document", "data_files": list(map(str, files))}
        try:
            texts = load_dataset("text", split="train", cache_dir=str(private_folder("datasets")), **how)
            tokenizer = self._tokenizer_for(texts, by_line)
            options = {"tokenizer": tokenizer, "seq_len": self.seq_len, "train_on": self.train_on, "by_line": by_line}
            options["recipe"] = 4  # part of the cache key: change it when samples of the same text change
            made: dict[str, Any] = {"features": _COLUMNS, "fn_kwargs": options, "remove_columns": ["text"]}
            mixed = texts.shuffle(seed=0)  # one split for all runs, so that their validation losses compare
            samples = mixed.map(tokenize, batched=True, desc="Tokenizing", **made)
        except (DatasetGenerationError, FileNotFoundError) as error:
            raise ConfigError(f"cannot read the {len(files)} text files: {error.__cause__ or error}") from error
        return tokenizer, samples.with_format("torch")

    def _tokenizer_for(self, texts: Dataset, by_line: bool) -> PreTrainedTokenizerBase:
        if self.tokenizer_name_or_path is not None:
            tokenizer = load_tokenizer(self.tokenizer_name_or_path)
        else:
            shown = (_as_text(text) if by_line else text for text in filter(str.strip, texts["text"]))
            tokenizer = trained_tokenizer(shown, self.vocab_size, texts._fingerprint)
        if by_line:
            tokenizer.chat_template = tokenizer.chat_template or FALLBACK_TEMPLATE
        return tokenizer


def find_files(patterns: str | Sequence[str] | None) -> list[Path]:
    """Return the files that paths or globs (``**`` allowed) name; None: the standard library's ``.py`` files."""
    files: set[Path] = set()
    if patterns is None:
        for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
            subfolders[:] = set(subfolders) - _SKIPPED
            files |= {Path(folder, name) for name in names if name.endswith(".py")}
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        found = {Path(name).resolve() for name in glob.glob(os.path.expanduser(pattern), recursive=True)}
        if not any(map(Path.is_file, found)):
            raise ConfigError(f"text_files: {pattern!r} matches no file (looked from `{os.getcwd()}`)")
        files |= found
    return sorted(filter(Path.is_file, files))  # not links to nowhere


def has_records(path: Path) -> bool:
    """Return whether a file of text has lines of JSON, by its name or its first line that is not empty."""
    try:
        with path.open(encoding="utf-8") as file:
            first = next(filter(str.strip, file), "")
            while file.read(1 << 20):  # is all of it text?
                pass
        return path.suffix in (".jsonl", ".ndjson", ".json") or read_record(first) is not None
    except ConfigError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text_files: `{path}` cannot be read as UTF-8 text: convert it, or leave it out") from error


def read_record(line: str) -> Record:
    """Return the document of a line, or messages and tools; a prompt is a message of the user."""
    row: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line.lstrip("\ufeff"))
    match row:
        case {"messages": [*messages]} if all(map(_is_message, messages)) and isinstance(row.get("tools") or [], list):
            if any(message["role"] == "assistant" for message in messages):
                return messages, row.get("tools") or None
        case {"prompt": str(prompt), "completion": str(answer)}:
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], None
        case {"instruction": str(asked), "output": str(answer)} if isinstance(row.get("input") or "", str):
            prompt = "\n\n".join(filter(None, (asked, row.get("input"))))
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], None
        case {"text": str(text)} if not row.keys() & {"messages", "prompt", "instruction"}:
            return text
    raise _refused(line, _EXPECTED)


def _is_message(message: Any) -> bool:
    match message:
        case {"weight": weight} if weight != 1:
            return False
        case {"role": "assistant", "tool_calls": [_, *_] as calls} if isinstance(message.get("content") or "", str):
            for call in calls:
                with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
                    function = call.get("function", call)  # OpenAI has arguments as text, templates expect objects
                    function["arguments"] = json.loads(function["arguments"])
            return True
        case {"role": str(), "content": str()}:
            return True
    return False


def _refused(line: str, reason: str) -> ConfigError:
    return ConfigError(f"text_files: the line `{textwrap.shorten(line, 80, placeholder='...')}` is refused: {reason}")


def _as_text(line: str) -> str:
    """Return a conversation as `FALLBACK_TEMPLATE` shows it: a new tokenizer learns from that."""
    if isinstance(record := read_record(line), str):
        return record
    return "".join(f"### {each['role'].capitalize()}:\n{each.get('content') or ''}\n\n" for each in record[0])


def samples_of(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, *, train_on_all: bool
) -> list[Sample]:
    """Return a conversation as (tokens, labels): one sample, or one for each answer.

    A template may mark what the assistant says with ``{% generation %}``. Without marks, an answer is what it adds to
    the text with which the template asks for it. Where a template shows it otherwise when more follows (Qwen3 takes its
    thoughts out), each answer becomes a sample that ends with it.
    """

    def shown(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))

    whole = shown(messages)
    if train_on_all:
        return [_labelled(whole, [(0, len(whole))], tokenizer)]
    if "endgeneration" in tokenizer.get_chat_template(tools=tools):
        marked = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = tokenizer.apply_chat_template(messages, tools=tools, **marked)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return [(encoded["input_ids"], [token if said else IGNORED for token, said in pairs])]
    texts = []
    # templates cannot show what asks for an answer that comes first: it is not learned
    for index in (index for index, message in enumerate(messages) if index and message["role"] == "assistant"):
        opened, after = shown(messages[:index], add_generation_prompt=True), shown(messages[: index + 1])
        if not after.startswith(opened):
            raise ValueError(
                "it shows an answer otherwise than it asks for it, so the answer is not found in its text: mark it in "
                "the template with {% generation %}, or train on all (data.train_on)"
            )
        texts.append((after, (len(opened), len(after))))
    if all(whole.startswith(after) for after, _ in texts):
        return [_labelled(whole, [span for _, span in texts], tokenizer)]
    return [_labelled(text, [span], tokenizer) for text, span in texts]


def _labelled(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the tokens of a text, and labels for those that are at least partly in `spans` of its characters."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = [
        token if any(begin < stop and end > start for start, stop in spans) else IGNORED
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], labels


def tokenize(
    batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, train_on: str, by_line: bool,
    recipe: int = 0,
) -> dict[str, list[Any]]:  # fmt: skip
    """Return samples of at most `seq_len` tokens: long documents in pieces; `recipe` is for the cache alone."""
    samples, documents, end = list[Sample](), list[str](), tokenizer.eos_token_id
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
    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained, name_or_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot load a tokenizer from {name_or_path!r}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name_or_path!r} has no end-of-text token, which separates documents")
    return tokenizer


def trained_tokenizer(texts: Iterable[str], vocab_size: int, corpus_key: str) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE of at most `vocab_size` tokens, trained on `texts`; it is cached by `corpus_key`."""
    path = private_folder("tokenizers") / f"bpe2-{corpus_key}-{vocab_size}.json"
    if not path.is_file():
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[_END])
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as unfinished:
            tokenizer.save(f"{unfinished}/tokenizer.json")
            os.replace(f"{unfinished}/tokenizer.json", path)  # appears complete or not at all
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_END)
