from datasets import Dataset

from lightning_cxl.finetune.samples import tokenize_conversations
from tests.unit.finetune.chats import byte_tokenizer


def test_a_label_that_nothing_predicts_is_no_answer():
    """An answer of one token at the beginning of a text: the model has no token to predict it from."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    lines = ['{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}']
    samples = tokenize_conversations(
        Dataset.from_dict({"text": lines}), byte_tokenizer(template), 8, train_on_all=False
    )
    assert samples[0]["labels"][0] != -100
    assert samples["scored"][:].tolist() == [0]
