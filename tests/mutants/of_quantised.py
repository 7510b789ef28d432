"""Protections of quantised weights: while they load, when they move, and in the backward of their layers."""

from tests.mutants.mutant import Mutant

_STREAMED = "lightning_cxl/streaming/quantised.py"
_QUANTISE = "lightning_cxl/weights/quantise.py"
_SAVED = "lightning_cxl/weights/saved_quantised.py"
_QUANTIZER = "lightning_cxl/weights/hf_quantizer.py"
_SAVE = "lightning_cxl/weights/save.py"
_INVENTORY = "lightning_cxl/inventory/inventory.py"
_HOST_WEIGHTS = "lightning_cxl/run/host_weights.py"
_UNIT_WEIGHTS = "lightning_cxl/streaming/unit_weights.py"
_HEAP = "lightning_cxl/memory/heap.py"
_CUTTING = "lightning_cxl/run/cutting.py"
_MODELS = "tests/integration/test_qlora_models.py"
_UNIT = "tests/unit/streaming/test_quantised.py"
_RUN = "tests/integration/test_qlora.py"
_LOAD = "tests/unit/weights/test_hf_quantised.py"
_RANKS = "tests/distributed/test_qlora.py"
T_RANKS_AHEAD = (f"{_RANKS}::test_every_rank_streams_the_whole_base_ahead",)
T_RANKS_REFUSED = (f"{_RANKS}::test_refused_by_name",)
T_RUN = (f"{_RUN}::test_is_the_run_without_us",)
T_CPU = (f"{_RUN}::test_is_the_run_without_us_on_the_cpu",)
T_EVALUATED = (f"{_RUN}::test_evaluation_on_a_cpu_that_repacks_leaves_the_weights_alone",)
T_REPACKED = (f"{_RUN}::test_weights_that_are_repacked_already_are_refused",)
T_UNKNOWN = (f"{_RUN}::test_a_layer_whose_backward_is_not_known_is_refused",)
T_LAST = (f"{_MODELS}::test_is_the_run_without_us",)
T_DORA = (f"{_MODELS}::test_is_the_run_without_us_where_the_cpu_computes",)
T_NO_INPUT = (f"{_UNIT}::test_an_8_bit_layer_keeps_no_input",)
T_REPLACED = (f"{_UNIT}::test_a_parameter_that_its_module_has_replaced_by_its_like_is_put_back",)
T_HEAP = ("tests/unit/memory/test_heap.py::test_large_blocks_have_pages_of_their_own_inside",)
T_MOVED = (f"{_RUN}::test_what_belongs_to_a_weight_moves_with_it_where_the_cpu_computes",)
T_ROUNDED = (f"{_LOAD}::test_weights_are_rounded_to_the_models_type_first",)
T_DAMAGED = (f"{_LOAD}::test_damaged_quantised_files_are_named",)
T_SETTINGS = (f"{_LOAD}::test_settings_that_are_refused",)
T_MISSING = (f"{_LOAD}::test_a_weight_that_no_file_holds_cannot_be_quantised",)
T_WAYS = (f"{_LOAD}::test_the_model_is_the_one_that_transformers_quantises",)
T_SAVED = (f"{_LOAD}::test_what_is_quantised_is_saved_and_loads",)
T_PLANNED = ("tests/integration/test_planned_lora.py::test_quantised_products_count_and_their_inputs_do_not_stay",)

MUTANTS = (
    Mutant(
        "what FSDP2 exchanges is no look at weights that stream",
        _UNIT_WEIGHTS,
        "[m for m in module.modules() if any(id(p) in ids for p in m.parameters(recurse=False))]",
        "list(module.modules())",
        T_RANKS_AHEAD,
    ),
    Mutant(
        "ranks with different bases are refused",
        _CUTTING,
        "found.get(name) != expected",
        "False",
        T_RANKS_REFUSED,
    ),
    Mutant(
        "trained biases of layers that are whole are refused",
        _STREAMED,
        "    if trained is not None:\n",
        "    if False:\n",
        T_RANKS_REFUSED,
    ),
    Mutant(
        "the backward of a 4-bit layer reads the weight of then",
        _STREAMED,
        "        node.tensors = _BytesOfThen(parameter)\n",
        "        pass\n",
        T_RUN,
    ),
    Mutant(
        "a unit is computed again before the backward of its last layer",
        _STREAMED,
        "    node.register_prehook(functools.partial(_compute_again, saved.grad_fn))\n",
        "",
        T_LAST,
    ),
    Mutant("8-bit layers keep no input", _STREAMED, "setattr(node, attribute, value)", "pass", T_NO_INPUT),
    Mutant("only layers that stream are refused", _STREAMED, "    if not streams:\n", "    if False:\n", T_UNKNOWN),
    Mutant(
        "a parameter that was replaced is put back",
        _UNIT_WEIGHTS,
        "self.module._parameters[name] = self.parameter",
        "pass",
        (*T_REPLACED, *T_DORA),
    ),
    Mutant("large blocks have pages of their own", _HEAP, "mallopt(_MMAP_THRESHOLD, limit)", "pass", T_HEAP),
    Mutant(
        "until the last has left",
        _HEAP,
        "_num_inside, _num_inside + change",
        "_num_inside, max(0, change)",
        T_HEAP,
    ),
    Mutant("the user's limit stays", _HEAP, "text in os.environ[name]", "False", T_HEAP),
    Mutant(
        "a backward that is not known is refused",
        _STREAMED,
        '        raise UnsupportedError(\n            f"a layer of class',
        '        return\n        raise UnsupportedError(\n            f"a layer of class',
        T_UNKNOWN,
    ),
    Mutant(
        "layers do not repack in a run",
        _STREAMED,
        "        setattr(module, _MAY_REPACK, False)\n",
        "        pass\n",
        T_EVALUATED,
    ),
    Mutant("after a run layers may repack", _STREAMED, "setattr(module, _MAY_REPACK, value)", "pass", T_EVALUATED),
    Mutant(
        "after a run no hooks are left", _STREAMED, "            hook.remove()\n", "            pass\n", T_EVALUATED
    ),
    Mutant(
        "repacked weights are refused",
        _STREAMED,
        '"quant_state", None), "packing_format_for_cpu", False):',
        '"quant_state", None), "no such thing", False):',
        T_REPACKED,
    ),
    Mutant(
        "what belongs to a weight is planned where the CPU computes",
        _INVENTORY,
        "sum(local(t).nbytes for t in tensors[id(parameter)])",
        "parameter.nbytes",
        T_CPU,
    ),
    Mutant(
        "what belongs to a weight moves where the CPU computes",
        _HOST_WEIGHTS,
        "            show(module, parameter, moved)\n",
        '            parameter.data = moved[""]\n',
        T_MOVED,
    ),
    Mutant("rounded to the model's type first", _QUANTISE, "yield part.to(dtype)", "yield part", T_ROUNDED),
    Mutant(
        "whole rows", _QUANTISE, "_CHUNK_NUMBERS // row) * row", "_CHUNK_NUMBERS // row) * 2 * row // 2 + 1", T_WAYS
    ),
    Mutant("biases are as transformers leaves them", _QUANTIZER, "bias.requires_grad_(True)", "pass", T_WAYS),
    Mutant("tied weights are not quantised", _QUANTIZER, "if both is not None:", "if False:", T_SETTINGS),
    Mutant("no layer without a weight", _QUANTIZER, "        if missing:\n", "        if False:\n", T_MISSING),
    Mutant("what lies beside a weight is complete", _SAVED, "        if missing:\n", "        if False:\n", T_DAMAGED),
    Mutant(
        "sizes of quantised files are checked", _SAVED, "dtype.itemsize != nbytes:", "dtype.itemsize < 0:", T_DAMAGED
    ),
    Mutant("old layouts are refused", _SAVED, "int(self._small(_FORMAT, staging)) != 0", "int(0) != 0", T_DAMAGED),
    Mutant("codes are saved as they are", _SAVE, "is_floating_point() and not parts", "is_floating_point()", T_SAVED),
    Mutant(
        "a dry run prepares quantised layers as a run does",
        "lightning_cxl/inventory/dry_run.py",
        "        stack.callback(prepare_layers(model, ()))\n",
        "",
        T_PLANNED,
    ),
    Mutant(
        "quantised products are counted",
        "lightning_cxl/inventory/dry_run.py",
        "if str(func.overloadpacket) in _QUANTISED_PRODUCTS:",
        "if False:",
        T_PLANNED,
    ),
)
