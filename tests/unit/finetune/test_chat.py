import json

import pytest

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import FALLBACK_TEMPLATE, has_records, read_record, samples_of
from tests.unit.finetune.chats import (
    CHATML,
    FORGETS_THOUGHTS,
    MARKED,
    OPENS_WITH_THOUGHT,
    REWRITES,
    TWO_TURNS,
    by_hand,
    byte_tokenizer,
)

SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"


def question(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def learned(template, messages=TWO_TURNS, *, train_on_all=False, tools=None, **special):
    tokenizer = byte_tokenizer(template, **special)
    return tokenizer, samples_of(messages, tools, tokenizer, train_on_all=train_on_all)


def answered(content):
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]


THOUGHTS = [
    *answered("greet</think>Hello"),
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "leave</think>See you"},
]
HI, BYE, HELLO, SEE = question("Hi"), question("Bye"), ("Hello<|im_end|>\n",), ("See you<|im_end|>\n",)
LEARNED = {
    "what answers add": (CHATML, TWO_TURNS, [[SYSTEM, HI, OPENED, HELLO, BYE, OPENED, SEE]]),
    "what is marked": (
        MARKED, TWO_TURNS,
        [[SYSTEM, HI, OPENED, ("Hello<|im_end|>",), "\n", BYE, OPENED, ("See you<|im_end|>",), "\n"]],
    ),
    "an answer that looks like its question": (CHATML, answered("Hi"), [[HI, OPENED, ("Hi<|im_end|>\n",)]]),
    "not what the template opens": (
        OPENS_WITH_THOUGHT, answered("<think>\nhm</think>Hello"),
        [[HI, OPENED, "<think>\n", ("hm</think>Hello<|im_end|>\n",)]],
    ),
    "not an answer without a question": (
        CHATML, [answered("Hello")[1], *TWO_TURNS[3:]], [[OPENED, *HELLO, BYE, OPENED, SEE]],
    ),
    "not what follows the last answer": (CHATML, TWO_TURNS[1:4], [[HI, OPENED, HELLO, BYE]]),
    "each answer as a sample where earlier ones change": (
        FORGETS_THOUGHTS, THOUGHTS,
        [
            [HI, OPENED, ("greet</think>Hello<|im_end|>\n",)],
            [HI, OPENED, "Hello<|im_end|>\n", BYE, OPENED, ("leave</think>See you<|im_end|>\n",)],
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEARNED)
def test_what_is_learned(case):
    template, messages, expected = LEARNED[case]
    tokenizer, found = learned(template, messages)
    assert found == [by_hand(tokenizer, *pieces) for pieces in expected]


@pytest.mark.parametrize("template", [REWRITES, OPENS_WITH_THOUGHT])
def test_a_template_that_hides_where_answers_are_trains_on_all_or_is_refused(template):
    tokenizer, ((ids, labels),) = learned(template, train_on_all=True)
    assert ids == labels == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    with pytest.raises(ValueError, match=r"mark it in the template .* or train on all"):
        learned(template)


def test_tools_reach_the_template():
    template = "{{ tools[0]['name'] }}:" + CHATML
    tokenizer, found = learned(template, TWO_TURNS[1:3], tools=[{"name": "now"}])
    assert found == [by_hand(tokenizer, "now:", question("Hi"), OPENED, ("Hello<|im_end|>\n",))]


@pytest.mark.parametrize("bos", [{}, {"bos_token": "<|im_start|>"}])
def test_a_tokenizer_without_template_gets_one_in_plain_letters(bos):
    tokenizer = byte_tokenizer(FALLBACK_TEMPLATE, **bos)
    (found,) = samples_of(TWO_TURNS, None, tokenizer, train_on_all=False)
    assert found == by_hand(
        tokenizer,
        bos.get("bos_token", ""),
        "### System:\nBe kind.\n\n### User:\nHi\n\n### Assistant:\n",
        ("Hello<|endoftext|>",),
        "\n\n### User:\nBye\n\n### Assistant:\n",
        ("See you<|endoftext|>",),
        "\n\n",
    )
    asked = tokenizer.apply_chat_template(TWO_TURNS[:2], tokenize=False, add_generation_prompt=True)
    assert asked == bos.get("bos_token", "") + "### System:\nBe kind.\n\n### User:\nHi\n\n### Assistant:\n"


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": MESSAGES, "id": 7}, ["Hi", "Hello"]),
        ({"prompt": "Hi", "completion": "Hello"}, ["Hi", "Hello"]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, ["Hi", "Hello"]),
        ({"instruction": "Hi", "output": "Hello"}, ["Hi", "Hello"]),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, ["Add\n\n1 2", "3"]),
    ],
)
def test_every_form_becomes_messages(row, said):
    expected = [{**message, "content": text} for message, text in zip(MESSAGES, said, strict=True)]
    assert read_record(json.dumps(row)) == (expected, None)


@pytest.mark.parametrize(("arguments", "read"), [({}, {}), ('{"zone": "UTC"}', {"zone": "UTC"}), ("UTC", "UTC")])
def test_tools_and_calls_are_kept_for_the_template(arguments, read):
    """OpenAI has arguments as text; a template would put them into quotes once more."""

    def row(arguments):
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "now", "arguments": arguments}}],
        }
        return [MESSAGES[0], call, {"role": "tool", "content": "12:00"}, MESSAGES[1]]

    tools = [{"type": "function", "function": {"name": "now"}}]
    assert read_record(json.dumps({"messages": row(arguments), "tools": tools})) == (row(read), tools)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": "Hi", "completion": 7}',
        '{"messages": "Hi", "text": "Hi"}',
        '{"messages": [{"role": "assistant", "content": "Hi"}], "tools": {"a": 1}}',
        '{"messages": [{"role": "user", "content": "Hi"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "Hi"}]}',
        '{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}',
        '{"messages": [{"role": "assistant", "content": "Hi", "weight": 0}]}',
    ],
)
def test_what_is_no_conversation_is_refused_with_what_is_expected(line):
    with pytest.raises(ConfigError, match="is refused: expected one JSON object per line"):
        read_record(line)


def test_a_files_name_or_its_first_line_says_what_it_holds(tmp_path):
    for name, content, is_json in (
        ("a.jsonl", '\n  \n{"messages": []}\n', True),  # is refused when it is read
        ("a.txt", '\ufeff{"text": "", "id": 3}', True),
        ("a.txt", "", False),
        ("a.py", '{"name": "a dictionary in a text"}', False),
        ("a.txt", "[1, 2]", False),
    ):
        (tmp_path / name).write_text(content)
        assert has_records(tmp_path / name) is is_json
