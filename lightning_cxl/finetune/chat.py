"""Conversations as tokens and labels, through the chat template of the tokenizer.

A label is the token itself where the assistant said it, and -100 elsewhere. The template may mark what the assistant
says (``{% generation %}``). One without marks is applied to the beginnings of a conversation: what an answer adds to
what was said before is the assistant's, without the header of its turn.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.conversations import Conversation

IGNORED = -100
"""The label of a token that the loss leaves out, as torch and transformers have it."""

FALLBACK_TEMPLATE = (
    "{{- bos_token if bos_token is defined else '' -}}"
    "{%- for message in messages -%}"
    "{{- '### ' + message['role'] | capitalize + ':\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n\\n' -}}"
    "{%- else -%}{{- message['content'] + '\\n\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '### Assistant:\\n' -}}{%- endif -%}"
)
"""For a tokenizer without a template; needs no tokens of its own."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Sample(NamedTuple):
    """A conversation to learn from, or a part of one."""

    input_ids: list[int]
    labels: list[int]


class TemplateMismatchError(Exception):
    """A chat template cannot show a conversation, or not so that the answers are found."""


def with_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with `FALLBACK_TEMPLATE` where it had no template.

    Raises:
        ConfigError: the tokenizer cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"conversations need a tokenizer of the package `tokenizers` (a tokenizer.json), and "
            f"{tokenizer.name_or_path!r} is a {type(tokenizer).__name__}"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = FALLBACK_TEMPLATE
    return tokenizer


def plain_text(conversation: Conversation) -> str:
    """Return a conversation as the text from which a new tokenizer learns: that of `FALLBACK_TEMPLATE`."""
    parts = ((message["role"].capitalize(), message.get("content") or "") for message in conversation.messages)
    return "".join(f"### {role}:\n{content}\n\n" for role, content in parts)


def samples_of(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, train_on_all: bool) -> list[Sample]:
    """Return a conversation as samples: one, or one for each answer.

    Some templates without marks show an answer otherwise when more follows (Qwen3 takes its thoughts out). Each answer
    of such a conversation becomes a sample that ends with it, as the model will see it when it answers.

    Args:
        conversation: with an answer.
        tokenizer: with a template, see `with_template`.
        train_on_all: every token has a label.

    Raises:
        TemplateMismatchError: with what the template said, or because an answer is not found in its text.
    """
    try:
        if train_on_all:
            text = _Rendered(conversation, tokenizer).text()
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return [Sample(ids, list(ids))]
        if _MARKS.search(tokenizer.get_chat_template(tools=conversation.tools)):
            return [_by_marks(conversation, tokenizer)]
        return _by_beginnings(conversation, tokenizer)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise TemplateMismatchError(f"the chat template refuses the conversation: {error}") from error


def _by_marks(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Sample:
    encoded = tokenizer.apply_chat_template(
        conversation.messages,
        tools=conversation.tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    ids, said = encoded["input_ids"], encoded["assistant_masks"]
    return Sample(ids, [token if mine else IGNORED for token, mine in zip(ids, said, strict=True)])


def _by_beginnings(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    rendered = _Rendered(conversation, tokenizer)
    text, answers = rendered.text(), list(rendered.answers())
    try:
        return [_labelled(text, [_span(text, answer) for answer in answers], tokenizer)]
    except TemplateMismatchError:
        return [_labelled(answer.after, [_span(answer.after, answer)], tokenizer) for answer in answers]


class _Answer(NamedTuple):
    """The text of a conversation around one answer."""

    before: str
    opened: str
    """`before`, and the header with which the model is asked for an answer."""
    after: str
    other: str | None
    """`after` with another answer; None where that cannot be shown, or `opened` says enough."""

    @property
    def start(self) -> int:
        """Where the answer itself begins in `after`."""
        # a template may open an answer with more than it shows later, such as "<think>"; what such an opening has in
        # common with the answer's own first letters is the answer's
        found = [_shared(text, self.after) for text in (self.opened, self.other) if text]
        return max(len(self.before), min(found, default=0))


class _Rendered:
    """Beginnings of one conversation as text."""

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
        self._conversation = conversation
        self._tokenizer = tokenizer

    def text(self, end: int | None = None, *, opened: bool = False) -> str:
        """Return the first `end` messages as text, all by default."""
        messages: list[Any] = self._conversation.messages[:end]
        if not messages:
            return ""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=self._conversation.tools, tokenize=False, add_generation_prompt=opened
        )
        return text

    def answers(self) -> Iterator[_Answer]:
        for index, message in enumerate(self._conversation.messages):
            if message["role"] == "assistant":
                opened, after = self.text(index, opened=True), self.text(index + 1)
                other = None if opened and after.startswith(opened) else self._with_another_answer(index)
                yield _Answer(self.text(index), opened, after, other)

    def _with_another_answer(self, index: int) -> str | None:
        """Return the messages up to an answer, which is replaced by one that begins with another letter."""
        answer = self._conversation.messages[index]
        if not isinstance(answer.get("content"), str):
            return None
        letter = "a" if answer["content"].lstrip().startswith("b") else "b"
        messages = [*self._conversation.messages[:index], {**answer, "content": letter}]
        return _Rendered(self._conversation._replace(messages=messages), self._tokenizer).text()


def _span(text: str, answer: _Answer) -> tuple[int, int]:
    """Return where the answer begins and ends in `text`, in characters."""
    if not (text.startswith(answer.after) and answer.after.startswith(answer.before)):
        raise TemplateMismatchError(
            "the chat template changes earlier messages when an answer follows, so the answer is not found in its "
            "text: mark it in the template with {% generation %}, or train on all (data.train_on)"
        )
    return answer.start, len(answer.after)


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with that are the same."""
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _labelled(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the tokens of `text`, with labels where a token has a character of a span."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    said = [any(begin < stop and end > start for start, stop in spans) for begin, end in offsets]
    return Sample(ids, [token if mine else IGNORED for token, mine in zip(ids, said, strict=True)])
