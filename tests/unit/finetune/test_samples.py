from lightning_cxl.finetune.data import tokenize
from tests.unit.finetune.chats import byte_tokenizer


def test_a_label_that_nothing_predicts_is_no_answer():
    """An answer of one token at the beginning of a text: the model has no token to predict it from."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    lines = ['{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}']
    samples = tokenize({"text": lines}, byte_tokenizer(template), 8, "answers")
    assert samples["labels"][0][0] != -100
    assert samples["scored"] == [0]
