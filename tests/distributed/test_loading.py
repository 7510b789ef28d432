"""Several processes load a model from files: each reads its part, and the values are those of one process."""

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lightning_cxl
from tests.cases import every_value
from tests.distributed import loading_runs
from tests.models import TINY_LLAMA

BF16 = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with several files, whose rows no number of processes divides, with tied weights."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY_LLAMA, "intermediate_size": 47}, tie_word_embeddings=True)
    files = lightning_cxl.save_pretrained(LlamaForCausalLM(config), folder, max_shard_bytes="16KiB")
    assert len(files) > 1
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    lightning_cxl.save_pretrained(LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=False)), folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A folder as it is published: transformers makes one weight of the experts of a layer."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = MixtralConfig(**TINY_LLAMA, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


CASES = {
    "as in the files": {},
    "converted": BF16,
    "adapters": {"change": "adapters"},
    "adapters, converted": {"change": "adapters", **BF16},
    "more words": {"change": "more words"},
    "more words, converted": {"change": "more words", **BF16},
    "half frozen": {"change": "half frozen", **BF16},
    "one process comes late": {"late_s": 3.0, **BF16},
}


@pytest.mark.parametrize(("case", "device"), every_value(CASES, ["cpu", "apart"]))
def test_weights_are_those_of_one_process(ranks, llama, case, device):
    wanted = loading_runs.weights(llama, **{**CASES[case], "late_s": 0})
    for found in ranks.of(2, device).run(loading_runs.weights, llama, **CASES[case]):
        assert_equal(found, wanted)


@pytest.mark.parametrize("options", [{}, BF16], ids=["as in the files", "converted"])
def test_weights_that_transformers_merges_are_those_of_one_process(ranks, mixtral, options):
    wanted = loading_runs.weights(mixtral, **options)
    for found in ranks.of(2).run(loading_runs.weights, mixtral, **options):
        assert_equal(found, wanted)
    assert "unread" in ranks.of(2).run(loading_runs.kinds, mixtral, **options)[0]


@pytest.mark.parametrize("options", [{}, BF16], ids=["as in the files", "converted"])
def test_a_parameter_without_dimensions_is_whole_on_every_process(ranks, tmp_path, options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    CLIPModel(CLIPConfig(text_config=sizes, vision_config=sizes)).save_pretrained(tmp_path)
    wanted = loading_runs.weights(tmp_path, kind="CLIPModel", **options)
    assert wanted["logit_scale"].shape == ()
    for found in ranks.of(2).run(loading_runs.weights, tmp_path, kind="CLIPModel", **options):
        assert_equal(found, wanted)


def test_what_is_converted_waits_in_the_files(ranks, untied):
    assert set(ranks.of(2).run(loading_runs.kinds, untied, **BF16)[0]) == {"unread"}
    assert set(ranks.of(2).run(loading_runs.kinds, untied, mapped=False, **BF16)[0]) == {"there"}
    assert set(loading_runs.kinds(untied, **BF16)) == {"there"}, "one process is on its own"


@pytest.mark.parametrize("options", [{}, BF16], ids=["as in the files", "converted"])
def test_a_model_can_be_used_before_it_is_cut(ranks, untied, tmp_path, options):
    wanted = loading_runs.uses(untied, tmp_path, **options)
    for found in ranks.of(2).run(loading_runs.uses, untied, tmp_path, **options):
        for each in ("state", "copy", "double"):
            assert_equal(found.pop(each), wanted[each])
        assert found == {name: value for name, value in wanted.items() if name in found}
    for rank in (0, 1):
        name = "model.safetensors"
        assert (tmp_path / f"saved-{rank}" / name).read_bytes() == (tmp_path / "saved-0" / name).read_bytes()


def test_an_unread_weight_is_not_written(ranks, untied):
    said = ranks.of(2).run(loading_runs.refusals, untied)[0]
    assert len(said) == 3 and all("mapped=False" in each for each in said)


def test_files_are_not_loaded_into_a_model_that_is_cut(ranks, untied):
    assert "is cut over processes already" in ranks.of(2).run(loading_runs.into_cut, untied)[0]


HALF = {"precision": "bf16-true"}


@pytest.mark.parametrize("options", [BF16, HALF], ids=["converted", "half"])
def test_the_trainer_trains_what_was_left_in_the_files(ranks, llama, options):
    wanted = ranks.of(2).run(loading_runs.trained, llama, mapped=False, **options)
    for found in ranks.of(2).run(loading_runs.trained, llama, **options):
        assert_equal(found, wanted[0])


@pytest.mark.parametrize("options", [{}, BF16], ids=["as in the files", "converted"])
def test_no_process_has_the_whole_model_in_memory(ranks, tmp_path, options):
    nbytes = loading_runs.save(tmp_path, 8, 512) // (2 if options else 1)
    pool = ranks.of(2)
    pool.run(loading_runs.memory, tmp_path, **options)  # modules are imported, arenas of the C library made
    for grown in pool.run(loading_runs.memory, tmp_path, **options):
        assert grown["loaded"] < 0.25 * nbytes and 0.4 * nbytes < grown["peak"] < 0.85 * nbytes
