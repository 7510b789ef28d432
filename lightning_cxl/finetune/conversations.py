"""Lines of a JSONL file: which form they have, and conversations of roles and contents from them."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import ConfigError

EXPECTED = (
    'expected one JSON object per line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}, {"prompt": "...", "completion": "..."}, {"instruction": "...", "input": "...", '
    '"output": "..."}, or {"text": "..."}'
)
_KEYS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
_SUFFIXES = frozenset({".jsonl", ".ndjson"})


class LineError(Exception):
    """What is wrong with a line of a JSONL file; `located` says where it is."""

    def __init__(self, line: str, reason: str) -> None:
        """Remember the whole line, to find it again.

        Args:
            line: without its line break.
            reason: begins in lower case and has no full stop.
        """
        super().__init__(line, reason)
        self.line = line
        self.reason = reason

    def located(self, files: Sequence[Path]) -> ConfigError:
        """Return the error for the user: with the first of `files` that has the line, and its number."""
        for path in files:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.rstrip("\n") == self.line:
                        return ConfigError(f"`{path}`, line {number}: {self.reason}")
        return ConfigError(f"a line of the JSONL files changed while they were read: {self.reason}")


class Conversation(NamedTuple):
    """What a chat template turns into text."""

    messages: list[dict[str, Any]]
    """With ``role`` and ``content``; assistants' may have ``tool_calls`` instead of a content."""
    tools: list[Any] | None = None
    """Descriptions of functions, for templates that show them."""


def form_of_file(path: Path) -> str:
    """Return what a file holds by its first line that is not empty: "text", "json_text" or "conversations".

    A line is a document or a conversation where it is a JSON object with the keys of one; any other file is text.

    Raises:
        ConfigError: the name ends like that of a JSONL file, and the line is none of these; or the file is one JSON
            array.
    """
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "").rstrip("\n")
    if path.suffix == ".json" and first.lstrip("\ufeff ").startswith("["):
        raise ConfigError(
            f"`{path}` is one JSON array, which would have to be read as a whole: give its objects a line each, "
            f"in a file such as `{path.stem}.jsonl` (jq -c '.[]' {path.name})"
        )
    if not first:
        if path.suffix in _SUFFIXES:
            raise ConfigError(f"`{path}` has no line that is not empty; {EXPECTED}")
        return "text"
    try:
        row = _object(first)
    except LineError as error:
        if path.suffix in _SUFFIXES:
            raise error.located([path]) from None
        return "text"
    if _keys(row):
        return "conversations"
    if "text" in row:
        return "json_text"
    if path.suffix in _SUFFIXES:
        raise _unknown(first, row).located([path])
    return "text"


def read_text(line: str) -> str:
    """Return the document of a line.

    Raises:
        LineError: the line is not ``{"text": "..."}``.
    """
    row = _object(line)
    if "text" not in row:
        raise _unknown(line, row)
    return _string(line, row, "text")


def read_conversation(line: str) -> Conversation:
    """Return the conversation of a line.

    A prompt, or an instruction with its input, is a message of the user; a completion or output is the answer.

    Raises:
        LineError: the line is no conversation, or nobody answers in it.
    """
    row = _object(line)
    keys = _keys(row)
    if keys == ("messages",):
        messages = _messages(line, row["messages"])
        tools = row.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise LineError(line, f"`tools` must be a list, not {_shown(tools)}")
        return Conversation(messages, tools or None)
    if not keys:
        raise _unknown(line, row)
    question, answer = (_string(line, row, key) for key in keys)
    if keys[0] == "instruction" and row.get("input") not in (None, ""):
        question += "\n\n" + _string(line, row, "input")
    return Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise LineError(line, f"not JSON ({error}); {EXPECTED}") from None
    if not isinstance(row, dict):
        raise LineError(line, f"{_shown(row)} is no JSON object; {EXPECTED}")
    return row


def _keys(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys that make a row a conversation, in the order of question and answer; () if there are none."""
    return next((keys for keys in _KEYS if all(key in row for key in keys)), ())


def _unknown(line: str, row: dict[str, Any]) -> LineError:
    return LineError(line, f"the object has the keys {sorted(row)}; {EXPECTED}")


def _messages(line: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise LineError(line, f"`messages` must be a list of objects, not {_shown(messages)}")
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message.get("role"), str):
            raise LineError(line, f"{where} needs a `role`: system, user, assistant or tool")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
            content = _shown(message["content"]) if "content" in message else "missing"
            raise LineError(line, f"the `content` of {where} must be a string, and is {content}")
        if message.get("weight", 1) != 1:
            raise LineError(line, f"{where} has a `weight`, which is not supported: take it out")
        if calls:
            message["tool_calls"] = _with_read_arguments(calls)
    if not any(message["role"] == "assistant" for message in messages):
        raise LineError(line, "no message has the role assistant, so there is no answer to learn")
    return messages


def _with_read_arguments(calls: Any) -> Any:
    """Return tool calls with their arguments as objects, which templates expect; OpenAI has them as text with JSON."""
    if isinstance(calls, list):
        return [_with_read_arguments(call) for call in calls]
    if not isinstance(calls, dict):
        return calls
    read = dict(calls)
    if isinstance(calls.get("function"), dict):
        read["function"] = _with_read_arguments(calls["function"])
    if isinstance(calls.get("arguments"), str):
        with contextlib.suppress(ValueError):
            read["arguments"] = json.loads(calls["arguments"])
    return read


def _string(line: str, row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise LineError(line, f"`{key}` must be a string, not {_shown(row[key])}")
    text: str = row[key]
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
