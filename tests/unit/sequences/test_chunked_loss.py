import copy
import logging

import pytest
import torch
from torch import nn

from lightning_cxl import chunked_loss
from lightning_cxl.sequences.chunked_loss import DeferredLogits, chunk_tokens, chunked_cross_entropy, tell_once
from lightning_cxl.streaming.units import StandIn
from tests.unit.sequences.models import VOCABULARY, tiny

FAMILIES = ["Llama", "Gemma2", "Granite", "Cohere", "Mixtral", "Phi", "GPT2", "OPT", "Mamba"]
PRECISIONS = {
    "float32": (torch.float32, None, 3e-6),
    "bfloat16": (torch.bfloat16, None, 2e-2),
    "autocast to bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "autocast to float16": (torch.float32, torch.float16, 5e-3),
}


@pytest.fixture
def batch():
    ids = torch.randint(3, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, 10:30] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


@pytest.fixture
def lines(caplog):
    """What the log says, in which each line comes once."""
    tell_once.cache_clear()
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    return lambda: [record.message for record in caplog.records]


def gradients(model, batch, *, chunked, autocast=None, factor=1.0):
    """Return the loss and all gradients, of a loss in chunks of 16 tokens or of all logits."""
    model.zero_grad()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        if chunked:
            with chunked_loss(model, tokens=16):
                output = model(**batch)
            assert isinstance(output.logits, DeferredLogits)
        else:
            output = model(**batch)
    (output.loss * factor).backward()
    return output.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(model, batch, tolerance, **options):
    loss, expected = gradients(model, batch, chunked=False, **options)
    found_loss, found = gradients(model, batch, chunked=True, **options)
    assert found_loss.item() == pytest.approx(loss.item(), rel=min(tolerance, 1e-3))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        norm = gradient.float().norm().clamp(min=1e-3)  # some are zero but for rounding
        off = (found[name].float() - gradient.float()).norm() / norm
        assert off < tolerance, f"{name}: {off}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_all_logits(family, precision, batch):
    dtype, autocast, tolerance = PRECISIONS[precision]
    if family == "Mamba" and precision != "float32":
        pytest.skip("its own scan takes float32")
    batch = batch | ({} if family == "Mamba" else {"num_items_in_batch": torch.tensor(37)})
    assert_alike(tiny(family, dtype), batch, tolerance, autocast=autocast, factor=0.25)


def test_a_sum_over_chunks_in_bfloat16_is_rounded_once():
    """The gradient of the weight of many chunks is as near to the true one as that of one product."""
    torch.manual_seed(0)
    layer = nn.Linear(32, VOCABULARY, bias=False)
    hidden, labels = torch.randn(4096, 32), torch.randint(0, VOCABULARY, (4096,))
    errors, truth = {}, None
    for dtype, tokens in ((torch.float64, 4096), (torch.bfloat16, 4096), (torch.bfloat16, 16)):
        copied, inputs = copy.deepcopy(layer).to(dtype), hidden.bfloat16().to(dtype)
        chunked_cross_entropy(copied.forward, copied, None, inputs, labels, None, tokens).backward()
        gradient = copied.weight.grad.double()
        truth = gradient if truth is None else truth
        errors[dtype, tokens] = (gradient - truth).norm() / truth.norm()
    assert errors[torch.bfloat16, 16] < 1.2 * errors[torch.bfloat16, 4096]


@pytest.mark.parametrize("bias", [-1e9, -float("inf")])
def test_a_label_that_has_no_chance_leaves_the_gradient_of_one_product(bias):
    torch.manual_seed(0)
    layer, hidden = nn.Linear(32, VOCABULARY, dtype=torch.bfloat16), torch.randn(100, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.bias[::2] = bias
    labels, logits = torch.arange(100) % VOCABULARY, layer(hidden).float()
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), layer.weight)
    chunked_cross_entropy(layer.forward, layer, None, hidden, labels, None, 16).backward()
    assert torch.allclose(layer.weight.grad, expected, rtol=1e-2, atol=1e-6)


def test_no_logit_that_the_product_of_a_band_rounds_up_has_a_probability_above_1(monkeypatch):
    torch.manual_seed(0)
    layer, hidden = nn.Linear(32, VOCABULARY, dtype=torch.bfloat16), torch.randn(100, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.mul_(500)  # a step of bfloat16 multiplies the exponential by e^4
    labels, made = layer(hidden).argmax(1), nn.functional.linear

    def rounded_up(inputs, weight, bias):
        return made(inputs, weight, bias) * (1 if len(weight) == VOCABULARY else 1 + 2**-7)

    monkeypatch.setattr(nn.functional, "linear", rounded_up)
    chunked_cross_entropy(layer.forward, layer, None, hidden, labels, 1, 16).backward()
    assert (layer.weight.grad.abs() <= hidden.abs().sum(0)).all()


@pytest.mark.parametrize("change", ["tied", "frozen", "nothing learned but the layer", "no label", "small gradients"])
def test_whatever_is_trained(change, batch):
    model = tiny("Llama", tie_word_embeddings=change == "tied")
    head = model.lm_head.weight
    if change == "frozen":
        head.requires_grad_(False)
    elif change == "nothing learned but the layer":
        model.requires_grad_(False)
        head.requires_grad_(True)
    elif change == "no label":
        batch["labels"] = torch.full_like(batch["labels"], -100)
        loss, found = gradients(model, batch, chunked=True)
        assert loss.isnan() and not any(gradient.any() for gradient in found.values())
        return
    elif change == "small gradients":  # without the loss scale they would be zero in float16
        assert_alike(model, batch | {"num_items_in_batch": 10**6}, 5e-3, autocast=torch.float16, factor=2.0**16)
        return
    assert_alike(model, batch, 3e-6)


def test_adapters_are_called_chunk_by_chunk(batch):
    peft = pytest.importorskip("peft")
    for options in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        model = tiny("Llama")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
        assert_alike(model, batch, 3e-6)


def test_a_quantised_layer(batch):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny("Llama")
    quantised = bitsandbytes.nn.Linear4bit(32, VOCABULARY, bias=False, compute_dtype=torch.float32)
    quantised.load_state_dict(model.lm_head.state_dict())
    model.lm_head = quantised.to("cpu")
    assert_alike(model, batch, 3e-6)


def test_evaluation_keeps_nothing_and_logits_can_be_read(batch, lines):
    model = tiny("Gemma2").eval()
    with torch.no_grad():
        expected = model(**batch)
        with chunked_loss(model, tokens=16):
            output = model(**batch)
            generated = model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert output.logits.shape == expected.logits.shape and output.logits.dtype == expected.logits.dtype
    with torch.no_grad():
        assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(output.logits[:, -1], expected.logits[:, -1])
    assert torch.equal(generated, model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False))
    assert lines() == []


def test_logits_that_somebody_needs_are_made_and_the_log_says_so_once(batch, lines):
    model = tiny("Llama")
    expected = model(**batch).logits.logsumexp(-1).mean()
    for _ in range(2):
        with chunked_loss(model):
            found = model(**batch).logits.logsumexp(-1).mean()
        assert found.item() == pytest.approx(expected.item())
    found.backward()
    assert model.lm_head.weight.grad is not None
    assert lines() == ["All logits are made at once: `logsumexp` asks for them, which cannot be done in chunks."]


def divided(module, args, output):
    output.div_(5)


def forbidden(module, args, output):
    output[..., :30] = -1e4


def capped(module, args, output):
    alias = output.float()
    alias.clamp_(max=1)


FACTORS = torch.rand(2, 50, 1, requires_grad=True)


def with_a_factor_for_each_token(module, args, output):  # which is no step of every logit
    return output * FACTORS


@pytest.mark.parametrize("hook", [divided, forbidden, capped, with_a_factor_for_each_token])
def test_what_hooks_do_to_logits_counts(hook, batch, lines):
    model = tiny("Llama")
    model.lm_head.register_forward_hook(hook)
    losses = []
    for each in nn.Identity(), model:
        model.zero_grad()
        FACTORS.grad = torch.zeros(2, 50, 1)
        with chunked_loss(each, tokens=16):
            loss = model(**batch).loss
        loss.backward()
        losses.append((loss.item(), model.model.norm.weight.grad.norm().item(), FACTORS.grad.norm().item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(lines()) == 2  # one of nn.Identity


def test_logits_are_what_they_were_in_the_forward(batch):
    """Also when they are read later: the same numbers with the same gradients, in the precision of the forward."""
    model = tiny("Llama")
    with chunked_loss(model), torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
        with torch.no_grad():
            evaluated = model(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch).logits
    assert output.logits.requires_grad and not evaluated.requires_grad
    seen = []
    output.logits.register_hook(seen.append)
    output.logits.float().sum().backward()
    assert len(seen) == 1
    assert torch.equal(output.logits, expected) and torch.equal(evaluated, expected)
    assert evaluated.float().numpy().shape == (2, 50, VOCABULARY)
    assert torch.mul(input=evaluated, other=2).shape == (2, 50, VOCABULARY)


def test_weights_changed_since_second_backwards_and_gradients_of_gradients_are_refused(batch):
    model = tiny("Llama")
    with chunked_loss(model):
        output = model(**batch)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="the weights of the output layer have changed"):
        output.logits.sum()
    model = tiny("Llama")
    with chunked_loss(model):
        loss = model(**batch).loss
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the gradients of a chunked loss are made once"):
        loss.backward()


def test_stand_ins_that_come_later_are_under_the_deferring_one(batch):
    """A layer that is streamed must be there when its logits are made."""
    model, calls = tiny("Llama"), []

    class Counting(StandIn):
        def run(self, compiler, args, kwargs):
            calls.append(self)
            return self.original(*args, **kwargs)

    expected = model(**batch).loss.item()
    with chunked_loss(model, tokens=25):
        first, second = Counting(model.lm_head), Counting(model.lm_head)
        assert isinstance(model(**batch).logits, DeferredLogits)
        assert calls == [second, first] * 4
        second.remove()
        model(**batch)
        assert calls[8:] == [first] * 4
    assert model(**batch).loss.item() == expected and calls[12:] == [first]
    first.remove()
    assert model(**batch).loss.item() == expected and len(calls) == 13
    assert "forward" not in model.lm_head.__dict__


def own_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().square().mean()


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("change", [own_loss, lambda it: it.lm_head.register_full_backward_hook(lambda *_: None)])
def test_a_model_for_which_it_is_not_possible_computes_as_before(change, batch, lines):
    model = tiny("Llama")
    change(model)
    before = model.__dict__.get("_loss_function")
    expected = model(**batch).loss
    with chunked_loss(model):
        found = model(**batch).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model.__dict__.get("_loss_function") is before
    assert len(lines()) == 1


def test_chunks_are_a_quarter_of_the_width_within_limits():
    assert [chunk_tokens(width) for width in (64, 2048, 8192)] == [256, 512, 1024]


def test_the_model_is_as_before_afterwards_and_a_copy_made_inside_too(batch):
    model = tiny("Llama")
    expected = model(**batch).loss.item()
    with pytest.raises(ZeroDivisionError), chunked_loss(model), chunked_loss(nn.Sequential(model)):
        logits = model(**batch).logits
        assert logits.forward_of_layer.__func__ is nn.Linear.forward, "the inner context does nothing"
        copied = copy.deepcopy(model)
        raise ZeroDivisionError
    for each in (model, copied):
        assert type(each(**batch).logits) is torch.Tensor
        assert each(**batch).loss.item() == expected
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("wrong", ["labels", "vocabulary"])
def test_labels_and_vocabularies_that_do_not_fit_are_the_models_affair(wrong, batch):
    model, options = tiny("Llama"), {}
    if wrong == "labels":  # those of late tokens are missing, so those that are there would find a token
        batch["labels"][:, 5:], options = -100, {"logits_to_keep": 10}
    else:
        model.config.vocab_size *= 50
    for each in (nn.Identity(), model):
        with chunked_loss(each), pytest.raises(ValueError, match="batch_size"):
            model(**batch, **options)
