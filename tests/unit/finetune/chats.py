"""A tokenizer with control tokens, chat templates as models have them, and conversations by hand."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = (  # as Qwen3 does: only the last message keeps its thoughts
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_WITH_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""As R1 does: asks for a thought that it does not show later."""
REWRITES = "{{ messages | length }}{{ messages[-1]['content'] }}"
"""No beginning of a conversation is the beginning of its text."""

TWO_TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def byte_tokenizer(template=None, **special):
    """Return a tokenizer of bytes with the control tokens of ChatML; pieces cut anywhere give the same tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    special = {"eos_token": "<|endoftext|>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def by_hand(tokenizer, *pieces):
    """Return (ids, labels) of pieces of text: a tuple of one piece is the assistant's, a string is not."""
    ids, labels = [], []
    for piece in pieces:
        text = piece if isinstance(piece, str) else piece[0]
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += [-100] * len(tokens) if isinstance(piece, str) else tokens
    return ids, labels
