"""Layers of bitsandbytes in the place of linear ones, for tests in one process and in several."""

import torch
from torch import nn


def four_bit(linear, *, nested):
    import bitsandbytes as bnb

    return bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4",
        compress_statistics=nested,
    )  # fmt: skip


def eight_bit(linear):
    import bitsandbytes as bnb

    return bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)


KINDS = {
    "4 bit": lambda linear: four_bit(linear, nested=False),
    "4 bit, nested": lambda linear: four_bit(linear, nested=True),
    "8 bit": eight_bit,
}


def quantise_layers(model, kind):
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    twin = KINDS[kind](linear)
                    twin.load_state_dict(linear.state_dict())
                    setattr(parent, name, twin.to("cpu"))  # quantises


def quantise(model, kind):
    """Do that as transformers does when it loads: everything is frozen then, and peft knows what the base is."""
    quantise_layers(model, kind)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind.startswith("4"), kind.startswith("8")
    model.requires_grad_(False)
