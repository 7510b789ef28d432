"""Protections of the main job and of exports: what of a conversation is learned, which numbers are written."""

from tests.mutants.mutant import Mutant

_CHAT = "lightning_cxl/finetune/chat.py"
_CONVERSATIONS = "lightning_cxl/finetune/conversations.py"
_LOADER = "lightning_cxl/finetune/loader.py"
_SAMPLES = "lightning_cxl/finetune/samples.py"
_DATA = "lightning_cxl/finetune/data.py"
T_CHAT = ("tests/unit/finetune/test_chat.py",)
T_CONVERSATIONS = ("tests/unit/finetune/test_conversations.py",)
T_DATA = ("tests/unit/finetune/test_data.py",)
T_LOADER = ("tests/unit/finetune/test_loader.py",)

_ADAPTERS = "lightning_cxl/commands/export/adapters.py"
_MODEL = "lightning_cxl/finetune/model.py"
_ADAPTERS_SAVED = "lightning_cxl/finetune/saved_adapters.py"
T_RESUMED = ("tests/integration/test_main_job.py::test_a_checkpoint_has_adapters_alone_and_resumes_exactly",)
_EXPORT = "lightning_cxl/commands/export/export.py"
_LAYOUTS = "lightning_cxl/commands/export/layouts.py"
_MASTERS = "lightning_cxl/commands/export/masters.py"
T_MASTERS = ("tests/integration/test_exported_masters.py",)
_SOURCES = "lightning_cxl/commands/export/model_sources.py"
_STORED = "lightning_cxl/commands/export/stored.py"
T_EXPORT = ("tests/unit/commands/export/test_export.py",)
T_MERGED = (f"{T_EXPORT[0]}::test_an_adapters_folder_merges_as_peft_merges",)
T_REFUSED = (f"{T_EXPORT[0]}::test_what_cannot_be_exported_is_refused_before_anything_is_written",)
T_QUANTISED = ("tests/unit/commands/export/test_quantised.py",)

MUTANTS = (
    Mutant(
        "Python code of a model is neither run nor asked about",
        "lightning_cxl/weights/hf.py",
        "load(name, trust_remote_code=False, **options)",
        "load(name, **options)",
        ("tests/unit/weights/test_hf.py::test_code_of_a_model_is_neither_run_nor_asked_about",),
    ),
    Mutant(
        "an error about a file does not advise to run its code",
        "lightning_cxl/run/checkpoint_file.py",
        "            raise needs_code(path, error) from error  #",
        "            raise  #",
        ("tests/unit/run/test_folder_pickles.py::test_no_error_advises_to_run_code",),
    ),
    Mutant(
        "an error about a folder does not advise to run its code",
        "lightning_cxl/run/sharded_reading.py",
        "            return needs_code(self._path, error)\n",
        "            pass\n",
        ("tests/unit/run/test_folder_pickles.py::test_no_error_advises_to_run_code",),
    ),
    Mutant(
        "nobody else enters a cache that was there before",
        "lightning_cxl/cache.py",
        "        folder.chmod(0o700)\n",
        "        pass\n",
        ("tests/unit/finetune/test_corpus.py::test_nobody_else_enters_the_cache_of_texts",),
    ),
    Mutant(
        "an export writes no names of a checkpoint's own",
        _LAYOUTS,
        "for name, text in found.items() if name not in left_out}",
        "for name, text in found.items()}",
        (f"{T_EXPORT[0]}::test_only_config_and_tokenizer_are_written_whatever_a_checkpoint_names",),
    ),
    Mutant(
        "an export does not write through links",
        _EXPORT,
        "            (folder / name).unlink(missing_ok=True)  # what it links to, if it is a link, stays\n"
        '            with open(folder / name, "xb") as file:\n',
        '            with open(folder / name, "wb") as file:\n',
        (f"{T_EXPORT[0]}::test_what_a_file_of_the_folder_links_to_stays",),
    ),
    Mutant(
        "an adapter's name is no path",
        _ADAPTERS,
        '    if "/" in adapter or "\\\\" in adapter:',
        "    if False:",
        (f"{T_EXPORT[0]}::test_an_adapter_whose_name_is_a_path_is_refused",),
    ),
    Mutant(
        "a checkpoint folder names no files elsewhere",
        "lightning_cxl/run/folder_pickles.py",
        "            if not _IS_DATA(each.relative_path):\n",
        "            if False:\n",
        ("tests/unit/run/test_folder_pickles.py::test_a_list_of_tensors_that_names_files_elsewhere_is_refused",),
    ),
    Mutant(
        "an answer's header is not learned",
        _CHAT,
        "max(len(self.before), min(found, default=0))",
        "len(self.before)",
        T_CHAT,
    ),
    Mutant(
        "an answer is looked for where the template shows it",
        _CHAT,
        "text.startswith(answer.after) and ",
        "",
        T_CHAT,
    ),
    Mutant(
        "what comes before an answer is its sample's beginning",
        _CHAT,
        " and answer.after.startswith(answer.before)",
        "",
        T_CHAT,
    ),
    Mutant(
        "letters that an answer shares with its opening are the answer's",
        _CHAT,
        "None if opened and after.startswith(opened) else self._with_another_answer(index)",
        "None",
        T_CHAT,
    ),
    Mutant(
        "arguments of calls are not put into quotes twice",
        _CONVERSATIONS,
        "        if calls:\n",
        "        if False:\n",
        T_CONVERSATIONS,
    ),
    Mutant("a document ends once", _SAMPLES, "document if document[-1:] == [end_of_text] else ", "", T_DATA),
    Mutant("marks of a template are used", _CHAT, "if _MARKS.search(", "if None and _MARKS.search(", T_CHAT),
    Mutant("someone must answer", _CONVERSATIONS, 'message["role"] == "assistant" for', "True for", T_CONVERSATIONS),
    Mutant(
        "a weight is not passed over", _CONVERSATIONS, 'if message.get("weight", 1) != 1:', "if False:", T_CONVERSATIONS
    ),
    Mutant("padding has no labels", _LOADER, "padding_value=IGNORED", "padding_value=pad_id", T_LOADER),
    Mutant(
        "a first token, which nothing predicts, is no answer",
        _SAMPLES,
        "for label in labels[1:]",
        "for label in labels",
        ("tests/unit/finetune/test_samples.py",),
    ),
    Mutant("samples without an answer are left out", _SAMPLES, "samples.select(kept)", "samples", T_DATA),
    Mutant("an error in a line says where", _DATA, "raise error.located(files) from error", "raise", T_DATA),
    Mutant(
        "a sample goes on from a token",
        _DATA,
        "max(1, int((labels != IGNORED).nonzero()[0]))",
        "int((labels != IGNORED).nonzero()[0])",
        ("tests/unit/finetune/test_data.py::test_a_held_out_sample_that_begins_with_its_answer_has_a_prompt",),
    ),
    # -- exports
    Mutant("float32 is written from masters", _EXPORT, "masters=dtype in _NEED_MASTERS", "masters=False", T_MASTERS),
    Mutant("split masters have their remainder", _MASTERS, "joined(weights, remainder)", "weights.float()", T_MASTERS),
    Mutant(
        "tied weights have one master",
        _MASTERS,
        "    if not isinstance(inner, StoredTensor):\n",
        "    if True:\n",
        T_MASTERS,
    ),
    Mutant("masters on SSD are not passed over", _MASTERS, "if is_reference(remainder):", "if False:", T_MASTERS),
    Mutant("masters of other names are not passed over", _MASTERS, "if masters and not count:", "if False:", T_MASTERS),
    Mutant("an adapter and a model in one folder are refused", _EXPORT, "if found is not None:", "if False:", T_EXPORT),
    Mutant(
        "files of another tokenizer do not stay",
        _EXPORT,
        "            (folder / name).unlink(missing_ok=True)\n",
        "            pass\n",
        T_EXPORT,
    ),
    Mutant(
        "a merged weight is let go of",
        _ADAPTERS,
        "            base._parameters.update(before)\n",
        "            pass\n",
        (f"{T_EXPORT[0]}::test_weights_are_in_memory_one_at_a_time",),
    ),
    Mutant("a layer can be merged again", _ADAPTERS, "            layer.merged_adapters.clear()\n", "", T_MERGED),
    Mutant(
        "16-bit adapters merge in float32",
        _ADAPTERS,
        'value.float() if ".lora_" in name else value',
        "value",
        T_MERGED,
    ),
    Mutant("a merge does not untie weights", _ADAPTERS, "if both is not None:", "if False:", T_REFUSED),
    Mutant("an adapter fits its config", _ADAPTERS, "if given != own:", "if False:", T_REFUSED),
    Mutant("what is given wins over the base", _SOURCES, " and id(weights[name]) not in given", "", T_EXPORT),
    Mutant(
        "tied weights that differ are refused",
        _SOURCES,
        "not read.source.holds(values_of(first))",
        "False",
        T_REFUSED,
    ),
    Mutant("a model that is there twice is refused", _SOURCES, "most[0][1] == most[1][1]", "False", T_REFUSED),
    Mutant("bytes without scales are refused", _STORED, "not _SCALES & (group or {}).keys()", "False", T_QUANTISED),
    Mutant(
        "a plain checkpoint has one master for tied weights",
        "lightning_cxl/run/checkpoint.py",
        "by_memory.get(memory(value), value)",
        "changed.get(name, value)",
        T_MASTERS,
    ),
    # -- adapters on quantised weights
    Mutant(
        "a checkpoint has adapters alone",
        _MODEL,
        "for name, value in state.items() if name in trained",
        "for name, value in state.items()",
        T_RESUMED,
    ),
    Mutant("adapters of another shape are refused", _ADAPTERS_SAVED, "if saved.keys() != own:", "if False:", T_RESUMED),
    Mutant("adapters that scale otherwise are refused", _ADAPTERS_SAVED, "if other != mine:", "if False:", T_RESUMED),
    Mutant(
        "quantised weights are not trained",
        _MODEL,
        "self.quantization is not None and self.lora is None",
        "False",
        ("tests/integration/test_main_job.py::test_what_cannot_be_is_refused",),
    ),
    Mutant(
        "an export of adapters is no export of the model",
        "lightning_cxl/finetune/export.py",
        "if module.lora is not None:",
        "if False:",
        ("tests/integration/test_main_job.py::test_exports_of_a_run_are_the_adapter_and_the_merged_model",),
    ),
    Mutant(
        "experts that stay wide beside quantised weights are told of",
        "lightning_cxl/streaming/quantised.py",
        "if said := wide_experts(model):",
        "if False:",
        ("tests/integration/test_planned_lora.py::test_a_run_warns_of_experts_that_transformers_has_loaded_wide",),
    ),
    Mutant(
        "a sequence that a model has no positions for is not planned",
        "lightning_cxl/commands/planned_model.py",
        "0 < longest < settings.sequence",
        "False",
        ("tests/unit/commands/test_plan.py::test_a_sequence_that_is_longer_than_the_model_has_positions_for",),
    ),
    Mutant(
        "adapters are planned in the type that they train in",
        "lightning_cxl/commands/planned_model.py",
        "parameter.data.to(model.dtype)",
        "parameter.data",
        ("tests/integration/test_planned_lora.py::test_planned_bytes_of_every_role_are_what_a_run_holds",),
    ),
)
