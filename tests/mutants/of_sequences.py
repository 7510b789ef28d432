"""Protections of the loss in chunks and of packed rows."""

from tests.mutants.mutant import Mutant

_LOSS = "lightning_cxl/sequences/cross_entropy.py"
_DEFERRED = "lightning_cxl/sequences/deferred_logits.py"
_CHUNKED = "lightning_cxl/sequences/chunked_loss.py"
_ATTENTION = "lightning_cxl/sequences/attention.py"
_PACKING = "lightning_cxl/sequences/packing.py"
_MASK = "lightning_cxl/sequences/packed_mask.py"
_LOADER = "lightning_cxl/finetune/loader.py"
_SAMPLES = "lightning_cxl/finetune/samples.py"
_DATA = "lightning_cxl/finetune/data.py"
_PRIVATE = "lightning_cxl/torch_private.py"
_STAND_IN = "lightning_cxl/streaming/stand_in.py"
T_LOSS = ("tests/unit/sequences/test_chunked_loss.py",)
T_ATTENTION = ("tests/unit/sequences/test_attention.py",)
T_MASK = ("tests/unit/sequences/test_packed_mask.py",)
T_PACKING = ("tests/unit/sequences/test_packing.py",)
T_DATA = ("tests/unit/finetune/test_data.py",)

MUTANTS = (
    Mutant(
        "float16 waits for the loss scale",
        _LOSS,
        "and torch.float16 not in (compute_type(hidden), layer.weight.dtype)",
        "",
        (f"{T_LOSS[0]}::test_small_gradients_in_float16_wait_for_the_loss_scale",),
    ),
    Mutant(
        "gradients of weights are summed in float32",
        _LOSS,
        "torch.zeros_like(weight, dtype=torch.float32)",
        "torch.zeros_like(weight)",
        T_LOSS,
    ),
    Mutant("the gradient of the loss counts", _LOSS, "each.mul_(gradient)", "each", T_LOSS),
    Mutant(
        "gradients are handed over once", _LOSS, "ctx.gradients, None  #", "ctx.gradients, ctx.gradients  #", T_LOSS
    ),
    Mutant(
        "each chunk's logits are made again",
        _LOSS,
        "checkpoint(_sum_of, forward, scores, part, targets, use_reentrant=False)",
        "_sum_of(forward, scores, part, targets)",
        ("tests/integration/test_chunked_loss.py::test_never_all_logits_are_on_the_device",),
    ),
    Mutant(
        "a cap of logits is differentiated",
        _LOSS,
        "if scores is None:\n        return summed, result",
        "if True:\n        return summed, result",
        T_LOSS,
    ),
    Mutant(
        "what is not done to each logit by itself makes them",
        _DEFERRED,
        "and _are_numbers(*args[1:], kwargs)",
        "",
        T_LOSS,
    ),
    Mutant(
        "made logits are kept",
        _DEFERRED,
        "self.all_logits = self.scored(self.forward_of_layer(self.hidden))\n        return self.all_logits",
        "return self.scored(self.forward_of_layer(self.hidden))",
        T_LOSS,
    ),
    Mutant(
        "made logits are those of the loss",
        _CHUNKED,
        " or logits.all_logits is not None",
        "",
        T_LOSS,
    ),
    Mutant(
        "made logits are not deferred again",
        _DEFERRED,
        " and args[0].all_logits is None else None",
        " else None",
        T_LOSS,
    ),
    Mutant(
        "logits are made with the gradients of the forward",
        _DEFERRED,
        "torch.set_grad_enabled(self._has_grad), ",
        "",
        T_LOSS,
    ),
    Mutant(
        "logits are made in the precision of the forward",
        _DEFERRED,
        "self._has_grad), self.as_deferred():",
        "self._has_grad):",
        T_LOSS,
    ),
    Mutant(
        "logits of changed weights are refused",
        _DEFERRED,
        "for parameter in self.layer.parameters()] != self._versions",
        "for parameter in self.layer.parameters()] is None",
        T_LOSS,
    ),
    Mutant(
        "logits know whether they carry a gradient",
        _DEFERRED,
        "return logits._carries_gradient()",
        "return False",
        T_LOSS,
    ),
    Mutant(
        "a step that changes nothing is the same tensor",
        _DEFERRED,
        "function.__name__ in _MAY_CHANGE_NOTHING and",
        "False and",
        T_LOSS,
    ),
    Mutant(
        "labels of another number are the model's affair",
        _CHUNKED,
        " or not fits",
        "",
        T_LOSS,
    ),
    Mutant("hooks of all backwards see logits", _PRIVATE, " or any(_hooks_of_all_backwards)", "", T_LOSS),
    Mutant("gradients of gradients are refused", _LOSS, "if torch.is_grad_enabled():  #", "if False:  #", T_LOSS),
    Mutant(
        "weights of a class of their own are left to autograd",
        _LOSS,
        " and type(layer.weight.detach()) is Tensor",
        "",
        T_LOSS,
    ),
    Mutant("autocast leaves float64 alone", _LOSS, " and hidden.dtype != torch.float64", "", T_LOSS),
    Mutant("a deferring layer stays outside", _CHUNKED, "stays_outside = True", "stays_outside = False", T_LOSS),
    Mutant(
        "a stand-in under a deferring one can go",
        _STAND_IN,
        "            self._outer.original, self._outer._had_own = self.original, self._had_own\n",
        "            pass\n",
        T_LOSS,
    ),
    Mutant("hooks of the backward see logits", _CHUNKED, "or has_backward_hooks(self.module) ", "", T_LOSS),
    Mutant("a loss of the model's own is called", _CHUNKED, "self._original is ForCausalLMLoss and ", "", T_LOSS),
    Mutant(
        "a vocabulary of another size is the model's affair",
        _CHUNKED,
        " and vocab_size == logits.shape[-1]",
        "",
        T_LOSS,
    ),
    Mutant("the head is as before", _CHUNKED, "        deferring.remove()\n", "", T_LOSS),
    Mutant(
        "a context inside of another does nothing",
        _CHUNKED,
        " or isinstance(found[0].loss_function, _ChunkedLoss)",
        "",
        T_LOSS,
    ),
    Mutant("a mask of ones is found", _ATTENTION, " and not seen[..., :_BEGINS].any()", "", T_ATTENTION),
    Mutant("a mask that says what is not seen is found", _ATTENTION, "seen[..., _BEGINS].all() and ", "", T_ATTENTION),
    Mutant(
        "a state that runs over the row is found",
        _ATTENTION,
        'getattr(model, "_is_stateful", False) or ',
        "",
        T_ATTENTION,
    ),
    Mutant("a layer with a state is found", _ATTENTION, "_KINDS:\n", "_KINDS | {'linear_attention'}:\n", T_ATTENTION),
    Mutant(
        "flash attention is told of all rows",
        _ATTENTION,
        "if _is_flash(implementation):\n        lengths",
        "if False:\n        lengths",
        T_ATTENTION,
    ),
    Mutant(
        "the question stops before the first block",
        _ATTENTION,
        "        raise _ReachedError(args, kwargs)\n",
        "        pass\n",
        T_ATTENTION,
    ),
    Mutant(
        "the question leaves the random state alone",
        _ATTENTION,
        ", torch.random.fork_rng(others, device_type=device.type):",
        ":",
        T_ATTENTION,
    ),
    Mutant("documents are causal", _MASK, ".tril()", "", T_MASK),
    Mutant("a window ends", _MASK, "visible.triu(1 - self._window)", "visible.triu(-self._window)", T_MASK),
    Mutant("documents of a piece are apart", _MASK, "document[:, None] == document", "document[:, None] >= 0", T_MASK),
    Mutant("masks of parts differ", _MASK, "self._kept((new, old)", "self._kept(0", T_MASK),
    Mutant("a part has the part before", _MASK, "            before = key, value\n", "", T_MASK),
    Mutant(
        "a part is no shorter than the window",
        _MASK,
        "size = max(window, _GROUP_TOKENS)",
        "size = _GROUP_TOKENS",
        T_MASK,
    ),
    Mutant("pieces are short", _MASK, " and sum(group) + length > _GROUP_TOKENS", " and False", T_MASK),
    Mutant(
        "attention of other shapes is torch's", _MASK, "if is_alone and mask._fits", "if is_alone or mask._fits", T_MASK
    ),
    Mutant("what is written into a mask counts", _MASK, " and mask._all is None and", " and", T_MASK),
    Mutant("a mask is held as it is", _MASK, '{"detach", "clone", "contiguous"}', "set()", T_MASK),
    Mutant(
        "a window that shows is asked for",
        _ATTENTION,
        "range(longest + 2)",
        "range(2)",
        T_ATTENTION,
    ),
    Mutant(
        "rows longer than a window are asked for again",
        _ATTENTION,
        " or _windows_of[model][0] != window:",
        ":",
        T_ATTENTION,
    ),
    Mutant(
        "classes of the user make their own mask",
        _ATTENTION,
        ' or not type(owner).__module__.startswith("transformers.models.")',
        "",
        T_ATTENTION,
    ),
    Mutant(
        "routers with a loss read a mask",
        _ATTENTION,
        'getattr(config, "output_router_logits", False) or ',
        "",
        T_ATTENTION,
    ),
    Mutant("a compiler gets a mask", _ATTENTION, " or any(map(is_compiled, model.modules()))", "", T_ATTENTION),
    Mutant("chunks of a row are refused", _ATTENTION, 'if "chunked_attention" in kinds:', "if False:", T_ATTENTION),
    Mutant(
        "positions say where sequences begin",
        _PACKING,
        "prepend=torch.full_like(position_ids[:, :1], -1)",
        "prepend=position_ids[:, :1] - 1",
        T_ATTENTION,
    ),
    Mutant("positions count up by one", _PACKING, "| (steps == 1)", "| (steps > 0)", T_ATTENTION),
    Mutant("a first token has no label", _PACKING, "(IGNORED, *labels[i][part][1:])", "labels[i][part]", T_PACKING),
    Mutant(
        "a batch's first tokens have no labels",
        _LOADER,
        'without_first(batch["labels"], batch["position_ids"])',
        'batch["labels"]',
        T_DATA,
    ),
    Mutant(
        "a block that begins within a document begins at 0",
        _SAMPLES,
        "return [*range(first_end), *places[first_end:]]",
        "return places",
        T_DATA,
    ),
    Mutant(
        "few conversations have rows of their own",
        _DATA,
        "if len(rows) >= self.batch_size * self._world_size():",
        "if rows:",
        T_DATA,
    ),
)
