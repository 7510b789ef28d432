"""`TextData`: text or conversations of files, tokenized, packed and batched for a causal language model."""

import contextlib
import glob
import hashlib
import json
import os
import re
import sysconfig
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

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
from lightning_cxl.integrations.lightning.lightning_api import LightningDataModule
from lightning_cxl.sequences.chunked_loss import IGNORED
from lightning_cxl.sequences.packing import fit_rows, without_first
from lightning_cxl.weights.hf import without_code

_FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))
_EXPECTED = (
    'expected one JSON object per line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}, {"prompt": "...", "completion": "..."}, {"instruction": "...", "input": "...", '
    '"output": "..."}, or {"text": "..."}'
)
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
_RECIPE = 3  # part of the cache key of samples: change it when those of the same text change
_DOCUMENTS = 512  # that are packed together: what fills no block behind them is dropped
_PROMPT_TOKENS = 16
Batch = dict[str, Tensor]


class LineError(ValueError):
    """A line of a JSONL file is refused: `args` are the reason and the whole line."""


class SampleLoader:
    """Whole batches of rows "input_ids", "labels", "position_ids": int64 ``(tokens,)``; the last two may be missing.

    The order depends on `seed` (None: that of `samples`) and the epoch alone. Lightning calls `set_epoch` (through
    `sampler`), saves `state_dict()` and calls `load_state_dict()` before the first batch: a resume is exact.
    """

    batch_sampler, sampler = None, property(lambda self: self)  # where Lightning looks for `set_epoch`

    def __init__(
        self, samples: Dataset, batch_size: int, *, rows: Sequence[list[int]] | None = None, pad_id: int = 0,
        seed: int | None = None, rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        self.samples, self.rows, self.batch_size, self.pad_id, self.seed = samples, rows, batch_size, pad_id, seed
        self.rank, self.world_size, self.epoch, self.num_rows = rank, world_size, 0, len(rows or samples)
        self._next_batch = 0  # of the running epoch: what a checkpoint taken now must continue with
        self._start = 0  # of the next iterator; not 0 only after load_state_dict()

    def __len__(self) -> int:
        return self.num_rows // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: epoch and start are read at the first batch, after Lightning's set_epoch()
        start, self._start = self._start, 0
        order = torch.arange(self.num_rows)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.num_rows, generator=generator)
        own = order[self.rank :: self.world_size].tolist()
        for index in range(start, len(self)):
            self._next_batch = index + 1
            yield self._batch(own[index * self.batch_size : (index + 1) * self.batch_size])

    def _batch(self, numbers: list[int]) -> Batch:
        if self.rows is None:
            found = {name: list(values) for name, values in self.samples[numbers].items()}
        else:
            parts = [self.samples[self.rows[number]] for number in numbers]
            found = {name: [torch.cat(list(part[name])) for part in parts] for name in ("input_ids", "labels")}
            counts = [[len(ids) for ids in part["input_ids"]] for part in parts]
            found["position_ids"] = [torch.cat([torch.arange(count) for count in each]) for each in counts]
        found.setdefault("labels", found["input_ids"])
        # padding comes last and has no labels, so no mask has to hide it
        fill = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": 0}
        batch = {name: pad_sequence(found[name], True, fill[name]) for name in fill if name in found}
        if "position_ids" in batch:  # packed, see [Note: Packed rows]
            batch["labels"] = without_first(batch["labels"], batch["position_ids"])
        return batch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._next_batch = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next_batch": self._next_batch, "order": self._order_key()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if 0 < state["next_batch"] < len(self) and state["order"] != self._order_key():
            raise CheckpointError(
                f"the checkpoint is at batch {state['next_batch']} of an epoch over {state['order']}, this run reads "
                f"{self._order_key()}. Use the same data options, or start a new run from exported weights "
                "(--model.name_or_path)"
            )
        self.epoch = state["epoch"]
        self._start = self._next_batch = state["next_batch"]

    def _order_key(self) -> dict[str, Any]:
        order = {name: getattr(self, name) for name in ("batch_size", "seed", "world_size")}
        return {"num_blocks": self.num_rows, **order}


class TextData(LightningDataModule):
    """Text files as blocks of `seq_len` tokens, or conversations as samples of up to `seq_len` tokens.

    Documents and conversations are shuffled once, tokenized and packed; in a row no token attends to another one's.
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
            seq_len: Tokens in a block, and most tokens of a conversation.
            batch_size: Blocks or rows in a batch, per process.
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
        if train_on not in ("answers", "all"):
            raise ConfigError(f'train_on must be "answers" or "all", not {train_on!r}')
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
        of = f"blocks of {self.seq_len} tokens"
        if "scored" in samples.column_names:
            columns, count, of = samples.with_format("numpy"), len(samples), "conversations"
            lengths, scored = (np.asarray(columns[name][:], dtype=np.int64) for name in ("length", "scored"))
            kept, long = np.flatnonzero(scored), int((lengths > self.seq_len).sum())
            samples = samples.select(kept).select_columns(["input_ids", "labels"])
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
                f"the files give {len(samples)} {of}, too few for one training and one validation batch of "
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

        A conversation is cut where its first answer begins, and ends with it; a block is cut after 16 tokens.
        """
        return [cut(self._held_out[number]) for number in range(min(count, len(self._held_out)))]

    def _loader(self, samples: Any, seed: int | None) -> SampleLoader:
        assert self.tokenizer is not None, "setup() comes first"
        (rank, world_size), rows = self._processes(), None
        if "position_ids" not in samples.column_names:
            rows = fit_rows([len(ids) for ids in samples.with_format("numpy")["input_ids"]], self.seq_len)
            if len(rows) < self.batch_size * world_size:  # too few: each conversation has a row
                rows = None
        options: dict[str, Any] = {"pad_id": self.tokenizer.eos_token_id, "rank": rank, "world_size": world_size}
        return SampleLoader(samples, self.batch_size, rows=rows, seed=seed, **options)

    def _processes(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _load(self) -> tuple[PreTrainedTokenizerBase, Dataset]:
        """Return the tokenizer and all samples, from the caches where they have them."""
        files = stdlib_files() if self.text_files is None else user_files(self.text_files)
        forms = {} if self.text_files is None else {form_of_file(path): path for path in files}
        if len(forms) > 1:
            examples = ", ".join(f"`{path}` ({form})" for form, path in sorted(forms.items()))
            raise ConfigError(f"text_files: files of several kinds cannot be mixed: {examples}. Name those of one kind")
        texts, make = load_texts(files, by_line=bool(forms.keys() - {"text"})), cast(Any, pack)
        columns = {name: List(Value("int32")) for name in ("input_ids", "position_ids")}
        options: dict[str, Any] = {"seq_len": self.seq_len, "train_on": self.train_on, "recipe": _RECIPE}
        try:
            if "conversations" in forms:
                # a new tokenizer learns from conversations as `FALLBACK_TEMPLATE` shows them
                said = (
                    "".join(f"### {each['role'].capitalize()}:\n{each.get('content') or ''}\n\n" for each in messages)
                    for messages, _ in (read_conversation(line) for line in _each(texts) if line.strip())
                )
                options["tokenizer"], make = with_template(self._tokenizer(texts, said)), tokenize
                columns = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
                columns |= {"length": Value("int64"), "scored": Value("int64")}
            else:
                if "documents" in forms:
                    texts = texts.map(_read_documents, batched=True, desc="Reading")
                options["tokenizer"] = self._tokenizer(texts, _each(texts))
            made = {"features": Features(columns), "fn_kwargs": options, "remove_columns": ["text"]}
            shuffled = texts.shuffle(seed=_SPLIT_SEED)
            samples = shuffled.map(make, batched=True, batch_size=_DOCUMENTS, desc="Tokenizing", **made)
        except LineError as error:
            raise located(error, files) from error
        return options["tokenizer"], samples.with_format("torch")

    def _tokenizer(self, rows: Dataset, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        if self.tokenizer_name_or_path is not None:
            return load_tokenizer(self.tokenizer_name_or_path)
        return cached_tokenizer(texts, self.vocab_size, corpus_fingerprint(rows))


def cut(sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a sample as prompt and expected continuation, int64 ``(tokens,)`` each."""
    ids, labels = sample["input_ids"], sample.get("labels")
    if labels is None or bool((labels == ids).all()):
        return ids[:_PROMPT_TOKENS], ids[_PROMPT_TOKENS:]
    start = max(1, int((labels != IGNORED).nonzero()[0]))  # nothing can be generated from no token
    after = (labels[start:] == IGNORED).nonzero()
    return ids[:start], ids[start : start + int(after[0]) if len(after) else None]


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """Return the ``.py`` files in UTF-8 of the interpreter's standard library, or of `root`, sorted."""
    root, found = Path(root or sysconfig.get_path("stdlib")), list[Path]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _SKIPPED
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    if not (files := sorted(filter(_is_text, found))):
        raise ConfigError(
            f"no readable .py file in the standard library at `{root}`: this interpreter comes without sources. "
            "Name your own files with --data.text_files"
        )
    return files


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
    if unreadable := [str(path) for path in sorted(files) if not _is_text(path)]:
        raise ConfigError(f"text_files: not readable as UTF-8 text: {', '.join(unreadable[:5])}. Convert or leave out")
    return sorted(files)


def _is_text(path: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        while file.read(1 << 20):
            pass
        return True
    return False


def load_texts(files: Sequence[Path], *, by_line: bool = False) -> Dataset:
    """Return a memory-mapped dataset ``{"text": ...}`` of files or their lines; reads nothing from the network.

    Lines of JSON are read as text, too: the JSON reader of `datasets` makes timestamps of answers that look like dates,
    and its errors name no line of a file.
    """
    names, how = [str(path) for path in files], "line" if by_line else "document"
    try:
        cache = str(private_folder("datasets"))
        return load_dataset("text", data_files=names, sample_by=how, split="train", cache_dir=cache)
    except (DatasetGenerationError, FileNotFoundError) as error:
        raise ConfigError(f"cannot read the {len(files)} text files: {error.__cause__ or error}") from error


def _each(rows: Dataset) -> Iterator[str]:
    return (text for batch in rows.iter(batch_size=64) for text in batch["text"])


def corpus_fingerprint(rows: Dataset) -> str:
    """Return 16 hex digits that depend on text and order alone, not on paths or dates."""
    digest = hashlib.sha256()
    for text in map(str.encode, _each(rows)):
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


def form_of_file(path: Path) -> str:
    """Return what a file holds by its first line that is not empty: "text", "documents" or "conversations"."""
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "").rstrip("\n")
    if path.suffix == ".json" and first.lstrip("\ufeff ").startswith("["):
        how = f"give its objects a line each, in a file such as `{path.stem}.jsonl` (jq -c '.[]' {path.name})"
        raise ConfigError(f"`{path}` is one JSON array, which would have to be read as a whole: {how}")
    try:
        return "documents" if _object(first)[1] == ("text",) else "conversations"
    except LineError as error:
        if path.suffix in (".jsonl", ".ndjson"):
            raise located(error, [path]) from None
        return "text"


def located(error: LineError, files: Sequence[Path]) -> ConfigError:
    """Return the error with the first of `files` that has the line, and its number."""
    reason, refused = error.args
    for path in files:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.rstrip("\n") == refused:
                    return ConfigError(f"`{path}`, line {number}: {reason}")
    return ConfigError(f"{', '.join(map(str, files[:3]))}: {reason}")


def _object(line: str, forms: Sequence[tuple[str, ...]] = _FORMS) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the object of a line, and those keys of `forms` that it has."""
    try:
        row = json.loads(line.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON ({error}); {_EXPECTED}", line) from None
    if not isinstance(row, dict):
        raise LineError(f"{_shown(row)} is no JSON object; {_EXPECTED}", line)
    for keys in forms:
        if row.keys() >= set(keys):
            return row, keys
    raise LineError(f"the object has the keys {sorted(row)}; {_EXPECTED}", line)


def _string(row: dict[str, Any], key: str, line: str) -> str:
    if not isinstance(text := row[key], str):
        raise LineError(f"`{key}` must be a string, not {_shown(text)}", line)
    return text


def _shown(value: Any) -> str:
    return textwrap.shorten(json.dumps(value, ensure_ascii=False), 60, placeholder="...")


def _read_documents(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": [_string(_object(line, _FORMS[3:])[0], "text", line) for line in batch["text"] if line.strip()]}


def read_conversation(line: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return messages and tools of a line; a prompt, or an instruction with its input, is a message of the user."""
    row, keys = _object(line, _FORMS[:3])
    if keys != ("messages",):
        question, answer = (_string(row, key, line) for key in keys)
        if keys[0] == "instruction" and row.get("input") not in (None, ""):
            question += "\n\n" + _string(row, "input", line)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None
    messages, tools = row["messages"], row.get("tools")
    for name, value in (("messages", messages), ("tools", [] if tools is None else tools)):
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise LineError(f"`{name}` must be a list of objects, not {_shown(value)}", line)
    for number, message in enumerate(messages, 1):
        calls, content = message.get("role") == "assistant" and message.get("tool_calls"), message.get("content")
        if not isinstance(message.get("role"), str):
            raise LineError(f"message {number} needs a `role`: system, user, assistant or tool", line)
        if not isinstance(content, str) and not (calls and content is None):
            given = _shown(content) if "content" in message else "missing"
            raise LineError(f"the `content` of message {number} must be a string, and is {given}", line)
        if message.get("weight", 1) != 1:
            raise LineError(f"message {number} has a `weight`, which is not supported: take it out", line)
        for call in calls if isinstance(calls, list) else []:  # OpenAI has arguments as text, templates expect objects
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with contextlib.suppress(ValueError):
                    function["arguments"] = json.loads(function["arguments"])
    if not any(message["role"] == "assistant" for message in messages):
        raise LineError("no message has the role assistant, so there is no answer to learn", line)
    return messages, tools or None


def samples_of(
    messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, *, train_on_all: bool
) -> list[tuple[list[int], list[int]]]:
    """Return a conversation as (tokens, labels): one sample, or one for each answer.

    A template may mark what the assistant says with ``{% generation %}``. Without marks, an answer is what it adds to
    the text before it, without the header of its turn. Where a template shows it otherwise when more follows (Qwen3
    takes its thoughts out), each answer becomes a sample that ends with it.
    """

    def shown(messages: list[dict[str, Any]], **options: Any) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options) if messages else ""

    def sample(text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = encoded["offset_mapping"]
        said = [any(begin < stop and end > start for start, stop in spans) for begin, end in places]
        return encoded["input_ids"], _labels(encoded["input_ids"], said)

    if train_on_all:
        ids = tokenizer(shown(messages), add_special_tokens=False, verbose=False)["input_ids"]
        return [(ids, ids)]
    if _MARKS.search(tokenizer.get_chat_template(tools=tools)):
        marked = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = tokenizer.apply_chat_template(messages, tools=tools, **marked)
        return [(encoded["input_ids"], _labels(encoded["input_ids"], encoded["assistant_masks"]))]
    whole, answers = shown(messages), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            earlier = messages[:index]
            before, after, other = shown(earlier), shown([*earlier, message]), ""
            opened, content = shown(earlier, add_generation_prompt=True), message.get("content")
            # a template may open an answer with more than it shows later, such as "<think>", or have no opening: what
            # the answer has in common with another one that begins with another letter is no part of it
            if isinstance(content, str) and not (opened and after.startswith(opened)):
                other = shown([*earlier, {**message, "content": "a" if content.lstrip().startswith("b") else "b"}])
            common = [len(os.path.commonprefix([text, after])) for text in (opened, other) if text]  # noqa: RUF071
            if not after.startswith(before):
                raise ValueError(
                    "it changes earlier messages when an answer follows, so the answer is not found in its text: mark "
                    "it in the template with {% generation %}, or train on all (data.train_on)"
                )
            answers.append((after, (max(len(before), min(common, default=0)), len(after))))
    if all(whole.startswith(after) for after, _ in answers):
        return [sample(whole, [span for _, span in answers])]
    return [sample(after, [span]) for after, span in answers]


def _labels(ids: Sequence[int], said: Sequence[int]) -> list[int]:
    return [token if mine else IGNORED for token, mine in zip(ids, said, strict=True)]


def tokenize(
    batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, train_on: str, recipe: int = 0
) -> dict[str, Any]:
    """Return conversations of lines as samples; `recipe` is for the cache alone."""
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "scored": []}
    for line in filter(str.strip, batch["text"]):
        messages, tools = read_conversation(line)
        try:
            samples = samples_of(messages, tools, tokenizer, train_on_all=train_on == "all")
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise LineError(f"the chat template refuses the conversation: {error}", line) from error
        for ids, labels in samples:
            rows["input_ids"].append(ids[:seq_len])
            rows["labels"].append(labels[:seq_len])
            rows["length"].append(len(ids))
            rows["scored"].append(sum(label != IGNORED for label in labels[1:seq_len]))
    return rows


def pack(batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, **_: Any) -> dict[str, Any]:
    """Return documents as full blocks; what fills no block behind the last one is dropped."""
    ids, places, end = list[int](), list[int](), tokenizer.eos_token_id
    for document in tokenizer(list(batch["text"]), verbose=False)["input_ids"]:
        ended = document if document[-1:] == [end] else [*document, end]
        ids += ended
        places += range(len(ended))
    blocks = [slice(start, start + seq_len) for start in range(0, len(ids) - seq_len + 1, seq_len)]
    positions = []
    for block in blocks:  # one that begins within a document counts from 0, too
        own = places[block]
        first = next((index for index in range(1, seq_len) if own[index] == 0), seq_len)
        positions.append([*range(first), *own[first:]])
    return {"input_ids": [ids[block] for block in blocks], "position_ids": positions}


def with_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with `FALLBACK_TEMPLATE` where it had no template."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"conversations need a tokenizer of the package `tokenizers` (a tokenizer.json), and "
            f"{tokenizer.name_or_path!r} is a {type(tokenizer).__name__}"
        )
    tokenizer.chat_template = tokenizer.chat_template or FALLBACK_TEMPLATE
    return tokenizer


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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE with at most `vocab_size` tokens."""
    if vocab_size < 257:  # every byte, and the end of a text
        raise ConfigError(f"vocab_size {vocab_size} is too small for a byte-level BPE: at least 257")
    tokenizer, end, alphabet = Tokenizer(models.BPE()), "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def cached_tokenizer(texts: Iterable[str], vocab_size: int, corpus_key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that is trained on `texts`; the cache has it by `corpus_key` (`corpus_fingerprint`)."""
    folder = private_folder("tokenizers") / f"bpe1-{corpus_key}-{vocab_size}"
    if not folder.is_dir():
        tokenizer = train_tokenizer(texts, vocab_size)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as unfinished:
            tokenizer.save_pretrained(f"{unfinished}/tokenizer")
            try:
                os.replace(f"{unfinished}/tokenizer", folder)  # appears complete or not at all
            except OSError:
                if not folder.is_dir():  # otherwise another process was first: same corpus, same tokenizer
                    raise
    return load_tokenizer(str(folder))
