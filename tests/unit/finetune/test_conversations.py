import json
import re

import pytest

from lightning_cxl.finetune.data import (
    LineError,
    form_of_file,
    read_conversation,
)

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": MESSAGES, "id": 7}, MESSAGES),
        ({"prompt": "Hi", "completion": "Hello"}, MESSAGES),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, MESSAGES),
        ({"instruction": "Hi", "output": "Hello"}, MESSAGES),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
    ],
)
def test_every_form_becomes_messages(row, messages):
    assert read_conversation(json.dumps(row)) == (messages, None)


def test_tools_and_calls_are_kept_for_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "now"}}]
    row = {"messages": [MESSAGES[0], call, {"role": "tool", "content": "12:00"}, MESSAGES[1]], "tools": tools}
    assert read_conversation(json.dumps(row)) == (row["messages"], tools)


def test_arguments_of_calls_as_text_are_read():
    """OpenAI has them so; a template would put them into quotes once more."""

    def row(arguments):
        call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": arguments}}]}
        return json.dumps({"messages": [*MESSAGES[:1], call]})

    assert read_conversation(row('{"zone": "UTC"}')) == read_conversation(row({"zone": "UTC"}))
    assert read_conversation(row("UTC"))[0][1]["tool_calls"][0]["function"]["arguments"] == "UTC"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ('{"question": "Hi"}', r"keys \['question'\]; expected one JSON object per line"),
        ('{"prompt": "Hi", "completion": 7}', "`completion` must be a string, not 7"),
        ('{"messages": "Hi"}', '`messages` must be a list of objects, not "Hi"'),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no message has the role assistant"),
        ('{"messages": [{"role": "assistant"}]}', "`content` of message 1 must be a string, and is missing"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            r'must be a string, and is \[\{"type": "image"\}\]',
        ),
        ('{"messages": [{"role": "user", "content": null, "tool_calls": [1]}]}', "must be a string, and is null"),
        ('{"messages": [{"role": "assistant", "content": "Hi", "weight": 0}]}', "message 1 has a `weight`"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}], "tools": {}}', "`tools` must be a list"),
    ],
)
def test_what_is_no_conversation_is_refused_with_what_is_expected(line, reason):
    with pytest.raises(LineError) as caught:
        read_conversation(line)
    assert re.search(reason, caught.value.args[0])


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.jsonl", '\n  \n{"messages": []}\n', "conversations"),
        ("a.txt", '{"prompt": "", "completion": ""}\n', "conversations"),
        ("a.json", '\ufeff{"instruction": "", "output": ""}', "conversations"),
        ("a.jsonl", '{"text": ""}\nnot read here', "documents"),
        ("a.txt", "some text", "text"),
        ("a.txt", "", "text"),
        ("a.py", '{"name": "a dictionary in a text"}', "text"),
        ("a.txt", "[1, 2]", "text"),
    ],
)
def test_a_files_form_is_that_of_its_first_line(tmp_path, name, content, form):
    (tmp_path / name).write_text(content)
    assert form_of_file(tmp_path / name) == form
