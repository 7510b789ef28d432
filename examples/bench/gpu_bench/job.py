"""The job that every contender does: a Llama of a known shape with random weights, full fine-tuning in bfloat16."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cxl.weights.hf import SHAPES

SHAPE_NAMES = ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "mistral-nemo-12b", "tiny")
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LOSS_CHUNK = 2048
"""Tokens whose logits exist at a time; of a long sequence all at once would take more memory than the blocks."""
_PATTERN = 1 << 22


class WithLoss(nn.Module):
    """A causal model whose forward is its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next token; logits are made chunk by chunk, and again in backward."""
        hidden = self.model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, target in zip(hidden.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True):
            total = total + checkpoint(_chunk_loss, self.model.lm_head, part, target, use_reentrant=False)
        return total / len(targets)


def make_model(shape: str, seq: int) -> WithLoss:
    """Return the model in the default dtype, on the default device; the weights are a repeated random pattern."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    fields = _fields(shape) | {"max_position_embeddings": seq}
    config = LlamaConfig(**fields, use_cache=False, attn_implementation="sdpa")
    with no_init_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    fill_weights(model)
    return WithLoss(model).train()


def _fields(shape: str) -> dict[str, Any]:
    """Return what decides about shapes of weights, as in the model's own config.json, with the head size."""
    found = SHAPES[shape].config if shape in SHAPES else _TINY
    fields = {name: found[name] for name in _TINY}
    return fields | {"head_dim": found.get("head_dim", found["hidden_size"] // found["num_attention_heads"])}


@torch.no_grad()
def fill_weights(model: nn.Module) -> None:
    """Give every weight values as an initialisation would: drawing billions of random numbers takes minutes."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.empty(_PATTERN, dtype=torch.float32, device="cpu").normal_(0.0, 0.02, generator=generator)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        values = pattern.to(parameter.dtype).to(parameter.device)
        for part in parameter.flatten().split(_PATTERN):
            part.copy_(values[: part.numel()])


def _chunk_loss(head: nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(head(hidden).float(), target, reduction="sum")


def flops_per_step(shape: str, seq: int, batch: int) -> float:
    """Return the multiply-adds times two of a step in which every block is computed twice in forward, once in backward.

    Matrices: 2 per weight and token forward, 4 backward; causal attention: half of 4 * seq * hidden per token and layer
    forward, twice that backward. The head is computed twice as well; the embedding is a look-up.
    """
    fields = _fields(shape)
    hidden, layers, head_size = (fields[name] for name in ("hidden_size", "num_hidden_layers", "head_dim"))
    width = fields["num_attention_heads"] * head_size
    block = hidden * (2 * width + 2 * fields["num_key_value_heads"] * head_size + 3 * fields["intermediate_size"])
    per_token = 2.0 * (layers * block + fields["vocab_size"] * hidden) + layers * 2.0 * seq * width
    return 4.0 * per_token * seq * batch


def batches(shape: str, seq: int, batch: int) -> Any:
    """Yield the same random tokens over and over."""
    tokens = torch.randint(0, _fields(shape)["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(1))
    while True:
        yield tokens
