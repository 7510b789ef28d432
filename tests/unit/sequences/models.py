"""Tiny models of transformers with random weights, of families that differ in their logits or their attention."""

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 67
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_WIDE = {**_SHAPE, "intermediate_size": 48}
_HEADS = {**_WIDE, "num_key_value_heads": 1}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHAPES = {
    "Llama": _HEADS,
    "Gemma2": {**_HEADS, "head_dim": 16, "final_logit_softcapping": 2.0, "sliding_window": 3},
    "Gemma3Text": {**_HEADS, "head_dim": 16, "sliding_window": 3},
    "Granite": {**_HEADS, "logits_scaling": 3.0},
    "Cohere": {**_HEADS, "logit_scale": 0.3},
    "Mistral": {**_HEADS, "sliding_window": 3},
    "Mixtral": {**_HEADS, "num_local_experts": 2},
    "Qwen3": {**_HEADS, "head_dim": 16},
    "Phi": {**_WIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0},  # its output layer has a bias
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, **_DROPOUT},
    "GPTNeoX": _WIDE,
    "OPT": {**_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Falcon": _SHAPE,
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "Mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 2},
    "Llama4Text": {**_HEADS, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "Mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
}


def tiny(family, dtype=torch.float32, attention=None, **options):
    """Return a model with larger weights than an initialisation has, so that its logits differ."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPES[family] | options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.train()
