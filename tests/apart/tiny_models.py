"""Tiny models of many kinds: every one has operators that others have not."""

from collections.abc import Callable

import torch
import transformers as hf

WORDS = 64
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": WORDS, **SIZES}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {"vocab_size": WORDS, "d_model": 16, "dropout": 0.0}
for part in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
GPT = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}

Model = tuple[torch.nn.Module, dict]


def words(length: int = 8) -> torch.Tensor:
    return torch.randint(1, WORDS, (2, length))


def text_model(kind: str, **options: object) -> Callable[[], Model]:
    """A model that is trained on its own input."""

    def make() -> Model:
        model = getattr(hf, kind)
        tokens = words()
        return model(model.config_class(**options)).train(), {"input_ids": tokens, "labels": tokens}

    return make


def t5() -> Model:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config).train(), {"input_ids": words(), "labels": words()}


def vit() -> Model:
    model = hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=4)).train()
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def clip() -> Model:
    text, vision = {**TEXT, "projection_dim": 8}, {**IMAGE, "projection_dim": 8}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).train()
    return model, {"input_ids": words(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def convnext() -> Model:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=4)
    model = hf.ConvNextForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def whisper() -> Model:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**SEQ2SEQ, **special, num_mel_bins=8, max_source_positions=8, max_target_positions=16)
    model = hf.WhisperForConditionalGeneration(config).train()
    return model, {"input_features": torch.randn(2, 8, 16), "labels": words()}


def wav2vec2() -> Model:
    names = (
        "hidden_dropout attention_dropout activation_dropout feat_proj_dropout final_dropout layerdrop mask_time_prob"
    )
    still = dict.fromkeys(names.split(), 0.0)
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    config = hf.Wav2Vec2Config(
        **TEXT, **still, **convolutions, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2
    )
    model = hf.Wav2Vec2ForCTC(config).train()
    return model, {"input_values": torch.randn(2, 200), "labels": words(4)}


MODELS: dict[str, Callable[[], Model]] = {
    "llama": text_model("LlamaForCausalLM", **TEXT, num_key_value_heads=1),
    "mixtral": text_model(
        "MixtralForCausalLM", **TEXT, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    ),
    "mamba": text_model("MambaForCausalLM", vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4),
    "gpt2": text_model("GPT2LMHeadModel", **GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gptj": text_model("GPTJForCausalLM", **GPT, rotary_dim=4),
    "bert": text_model("BertForMaskedLM", **TEXT, **STILL),
    "deberta": text_model(
        "DebertaV2ForMaskedLM", **TEXT, **STILL, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "t5": t5,
    "vit": vit,
    "clip": clip,
    "convnext": convnext,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
}
