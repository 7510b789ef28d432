"""A tiny Llama and its task, for what only Hugging Face models do."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models import InStep, Task


def tiny_llama(num_layers=3, **config):
    torch.manual_seed(0)
    shape = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(**{**shape, "num_key_value_heads": 2, "num_hidden_layers": num_layers, **config})
    )
    return model.train()


def with_lora(model, targets=("q_proj", "v_proj", "down_proj")):
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM"))


def word_tokenizer(words, **special):
    """Return a tokenizer that knows these words, one of which is ``<unk>``."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


class LlamaTask(Task):
    """Next-token loss of a model that takes and returns what Hugging Face models do."""

    def loss(self, batch):
        x, y = batch
        logits = self.model(input_ids=x).logits[:, -x.shape[1] :]  # without the tokens that prompt tuning adds
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), y.flatten())

    def record_sums(self, parameters):
        """Record what someone sees who looks at parameters now."""
        for parameter in parameters:
            self.record(parameter.detach().double().sum())


class LlamaInStep(InStep, LlamaTask):
    """Goes on with the batch that comes next."""
