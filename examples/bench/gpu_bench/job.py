"""The job that every contender does: a Llama of a known shape with random weights, full fine-tuning in bfloat16."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# from the models' own config.json: vocabulary, hidden, intermediate, layers, heads, key/value heads, head size, tied
SHAPES = {
    "llama-3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama-3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128, False),
    "mistral-nemo-12b": (131072, 5120, 14336, 40, 32, 8, 128, False),
    "tiny": (256, 64, 128, 4, 4, 2, 16, False),
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

    vocab, hidden, intermediate, layers, heads, kv_heads, head_size, tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_size, tie_word_embeddings=tied,
        max_position_embeddings=seq, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with no_init_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    fill_weights(model)
    return WithLoss(model).train()


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
    vocab, hidden, intermediate, layers, heads, kv_heads, head_size, _ = SHAPES[shape]
    width = heads * head_size
    block = hidden * (width + 2 * kv_heads * head_size) + width * hidden + 3 * hidden * intermediate
    per_token = 2.0 * (layers * block + vocab * hidden) + layers * 2.0 * seq * width
    return 4.0 * per_token * seq * batch


def batches(shape: str, seq: int, batch: int) -> Any:
    """Yield the same random tokens over and over."""
    vocab = SHAPES[shape][0]
    tokens = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
    while True:
        yield tokens
