import contextlib
import copy
import gc
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import lightning_cxl
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.weights.files import UnreadWeight
from tests.cases import every_value, others_full
from tests.distributed import lightning_runs
from tests.distributed.training import assert_same_weights, cut_model, device, error_of, loss_of, place, whole_weights
from tests.integration.weight_memory import Peak
from tests.models import TINY_LLAMA

BF16 = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a model each.

    ``llama`` has several files, whose rows no number of processes divides, and tied weights. ``mixtral`` is as it is
    published: transformers makes one weight of the experts of a layer. ``clip`` has a parameter without dimensions.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TINY_LLAMA, "intermediate_size": 47}, tie_word_embeddings=True))
    assert len(lightning_cxl.save_pretrained(llama, folder / "llama", max_shard_bytes="16KiB")) > 1
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY_LLAMA, tie_word_embeddings=False)).save_pretrained(folder / "untied")
    experts = hf.MixtralConfig(**TINY_LLAMA, num_local_experts=4, num_experts_per_tok=2)
    hf.MixtralForCausalLM(experts).save_pretrained(folder / "mixtral")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    hf.CLIPModel(hf.CLIPConfig(text_config=sizes, vision_config=sizes)).save_pretrained(folder / "clip")
    return folder


@pytest.fixture
def untied(folders):
    return folders / "untied"


def load(folder: Path, **options: Any) -> Any:
    kind = hf.CLIPModel if folder.name == "clip" else hf.AutoModelForCausalLM
    return lightning_cxl.from_pretrained(kind, folder, **options)


def begin(model: nn.Module) -> UserLoop:
    """Cut a model and let a run of it begin."""
    session = cut_model(model) if place()[1] > 1 else Session()
    loop = UserLoop(session, device(), Loop())
    loop.prepare(model, [])
    return loop


def changed(model: Any, change: str) -> Any:
    """Return a model as users change one before they train it."""
    torch.manual_seed(7)
    if change == "adapters":
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that peft uses
            return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    if change == "more words":
        model.resize_token_embeddings(TINY_LLAMA["vocab_size"] + 5, mean_resizing=False)
    if change == "half frozen":
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    return model


def weights(folder: Path, change: str = "", late_s: float = 0, **options: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights that a run begins with; rank 1 comes late."""
    time.sleep(late_s * place()[0])
    model = changed(load(folder, **options), change)
    with contextlib.closing(begin(model)):
        return whole_weights(model)


def kinds(folder: Path, **options: Any) -> tuple[set[str], list[str]]:
    """Return how parameters are there once they are loaded, and what is said to who wants the memory of one."""
    model = load(folder, **options)
    weight = next(model.parameters())
    said = [error_of(act) for act in (weight.detach().zero_, lambda: weight.data[0].fill_(1), weight.data_ptr)]
    return {"unread" if isinstance(each, UnreadWeight) else "there" for each in model.parameters()}, said


def uses(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Return what is seen of a model that has been loaded and nothing else, and save it."""
    model = load(folder, **options)
    tokens = torch.arange(12).view(2, 6)
    lightning_cxl.save_weights(model, out / f"saved-{place()[0]}")
    model.load_state_dict(model.state_dict(), strict=True, assign=True)
    model.to(model.dtype).to("cpu").lm_head.weight.data = model.lm_head.weight.data  # nothing to convert
    return {
        "text": str(model),
        "loss": loss_of(model, tokens).item(),
        "generated": model.generate(tokens, max_new_tokens=3, do_sample=False).tolist(),
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "copy": {name: value.clone() for name, value in copy.deepcopy(model).state_dict().items()},
        "double": {name: value.clone() for name, value in model.double().state_dict().items()},
        "saved": lightning_cxl.load_weights(load(folder, **options), out / f"saved-{place()[0]}").missing_keys,
    }


def anonymous_bytes() -> int:
    """Return what this process holds that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines)}
    return found["Pss_Anon"] + found["Pss_Shmem"]  # a page that several processes map counts once in all


def memory(folder: Path, **options: Any) -> dict[str, int]:
    """Return the bytes that loading a model has added, and those at the peak until a run has begun."""
    gc.collect()  # models of earlier tests would leave meanwhile
    dist.barrier()  # and another process's share of a page would become this one's
    with Peak(anonymous_bytes) as seen:
        model = load(folder, **options)
        loaded = seen.look()
        loop = begin(model)
        dist.barrier()  # another process may still read
        loop.close()
    return {"loaded": loaded, "peak": seen.peak - seen.start}


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
OTHERS = [(model, case, "cpu") for model in ("mixtral", "clip") for case in ("as in the files", "converted")]
FIRST_OF = [("llama", "as in the files", "cpu"), *OTHERS[::2]]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "case", "device"), others_full([*every_value(["llama"], CASES, ["cpu", "apart"]), *OTHERS], FIRST_OF)
)
def test_weights_are_those_of_one_process(ranks, folders, model, case, device):
    wanted = weights(folders / model, **{**CASES[case], "late_s": 0})
    for found in ranks.of(2, device).run(weights, folders / model, **CASES[case]):
        assert_same_weights(found, wanted)
    if model == "mixtral":
        assert "unread" in ranks.of(2).run(kinds, folders / model, **CASES[case])[0][0]


def test_what_is_converted_waits_in_the_files_and_is_not_written(ranks, untied):
    unread, said = ranks.of(2).run(kinds, untied, **BF16)[0]
    assert unread == {"unread"} and all("mapped=False" in each for each in said)
    assert ranks.of(2).run(kinds, untied, mapped=False, **BF16)[0] == ({"there"}, ["", "", ""])
    assert kinds(untied, **BF16) == ({"there"}, ["", "", ""]), "one process is on its own"


@pytest.mark.parametrize("options", [BF16, {}], ids=["converted", "as in the files"])
def test_a_model_can_be_used_before_it_is_cut(ranks, untied, tmp_path, options):
    wanted = uses(untied, tmp_path, **options)
    for found in ranks.of(2).run(uses, untied, tmp_path, **options):
        for each in ("state", "copy", "double"):
            assert_same_weights(found.pop(each), wanted[each])
        assert found == {name: value for name, value in wanted.items() if name in found}
    for rank in (0, 1):
        name = "model.safetensors"
        assert (tmp_path / f"saved-{rank}" / name).read_bytes() == (tmp_path / "saved-0" / name).read_bytes()


@pytest.mark.parametrize("half", [False, True], ids=["converted by loading", "converted by the Trainer"])
def test_the_trainer_trains_what_was_left_in_the_files(ranks, folders, half):
    options, trainer = ({}, {"precision": "bf16-true"}) if half else (BF16, {})

    def trained(**loading):
        module = {"folder": str(folders / "llama"), "loading": {**options, **loading}}
        return ranks.of(2).run(lightning_runs.fit, 2, module=module, trainer=trainer)

    wanted = trained(mapped=False)[0]["weights"]
    for found in trained():
        assert_same_weights(found["weights"], wanted)


@pytest.mark.parametrize("options", [{}, BF16], ids=["as in the files", "converted"])
def test_no_process_has_the_whole_model_in_memory(ranks, tmp_path, options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4096}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=8))
    nbytes = sum(each.nbytes for each in model.parameters())
    lightning_cxl.save_pretrained(model, tmp_path, max_shard_bytes=nbytes // 4)
    del model
    nbytes //= 2 if options else 1
    pool = ranks.of(2)
    pool.run(memory, tmp_path, **options)  # modules are imported, arenas of the C library made
    for grown in pool.run(memory, tmp_path, **options):
        assert grown["loaded"] < 0.25 * nbytes and 0.4 * nbytes < grown["peak"] < 0.85 * nbytes
