"""Tiny models of many kinds train on the device as on the CPU; each has operators that others have not."""

import copy

import pytest
import torch
import transformers as hf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests import apart

WORDS = 64
TEXT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SOUND = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "conv_dim": (8, 8), "conv_kernel": (4, 3),
    "conv_stride": (2, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def words():
    tokens = torch.randint(1, WORDS, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


MODELS = {  # class, options of its configuration, and what makes a batch
    "mixtral": (
        hf.MixtralForCausalLM,
        {**TEXT, "num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True},
        words,
    ),
    "mamba": (hf.MambaForCausalLM, {**TEXT, "state_size": 4}, words),
    "deberta": (
        hf.DebertaV2ForMaskedLM, {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, words
    ),
    "convnext": (
        hf.ConvNextForImageClassification, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])},
    ),
    "wav2vec2": (
        hf.Wav2Vec2ForCTC, {**TEXT, **SOUND},
        lambda: {"input_values": torch.randn(2, 200), "labels": torch.randint(1, WORDS, (2, 4))},
    ),
}  # fmt: skip


def train(model, batch, device, steps=2):
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "options", "make_batch"), MODELS.values(), ids=MODELS)
def test_a_tiny_model_trains_as_on_the_cpu(kind, options, make_batch):
    torch.manual_seed(0)
    model, batch = kind(kind.config_class(**options)).train(), make_batch()
    there = copy.deepcopy(model).to("apart")
    before = apart.counters()
    apart.set_poison(True)
    found = train(there, batch, "apart")
    apart.set_poison(False)
    with sdpa_kernel(SDPBackend.MATH):  # the same kernels
        expected = train(model, batch, "cpu")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    largest = max(grad.abs().max() for grad in expected[1].values())
    for parameter, grad in expected[1].items():
        assert (found[1][parameter] - grad).abs().max() <= 1e-5 * largest, parameter
    assert found[1].keys() == expected[1].keys()
    waited = apart.counters()["sync_kernels"] - before["sync_kernels"]
    assert waited <= 4, f"the host waited for {waited} kernels"


def test_checkpointed_dropout_is_recomputed_alike():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8)).to("apart")
    data = torch.randn(4, 8).to("apart")
    apart.set_delay(kernel=0.0005)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        out = checkpoint(model, data, use_reentrant=False) if recompute else model(data)
        grads.append(torch.autograd.grad(out.square().sum(), model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
