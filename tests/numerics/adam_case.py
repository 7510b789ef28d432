"""One span for the Adam kernel in any formats: its tensors, its row of the table, what the definition makes of it."""

import itertools
from array import array
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from lightning_cxl.native import _adam, _cpu
from lightning_cxl.optim import kernels as formats
from lightning_cxl.optim.kernels import BLOCK_SIZE
from lightning_cxl.optim.parameter_state import scalars_of
from tests.numerics.reference import blockwise
from tests.numerics.reference.adam import adam_update, read

ISAS = _cpu.supported_isas()
TENSORS = ("weights", "compute", "rest", "grads", "momentum", "variance", "momentum_scale", "variance_scale")
FIELDS = (*TENSORS, "key", "numel", "row", "formats", "team", "first")
"""Of a row of the table."""
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38]
SPECIAL += [1e-20, 1e19, -1e30, float("inf"), float("-inf"), float("nan")]
COMPUTE_DTYPES = {formats.WEIGHTS_BF16: torch.bfloat16, formats.WEIGHTS_FP16: torch.float16}


class Formats(NamedTuple):
    grad: torch.dtype
    weights: int
    state: formats.StatePrecision

    def __str__(self):
        grad = str(self.grad).removeprefix("torch.")
        return f"{grad}-{('fp32', 'fp32+bf16', 'fp32+fp16', 'split')[self.weights]}-{self.state}"

    @property
    def code(self):
        return formats.pack(formats.GRAD_FORMATS[self.grad], self.weights, formats.STATE_FORMATS[self.state])


COMBINATIONS = [Formats(*each) for each in itertools.product(formats.GRAD_FORMATS, range(4), formats.STATE_FORMATS)]
PLAIN = Formats(torch.float32, formats.WEIGHTS_FP32, "fp32")


class Case:
    """The tensors of one span, by field of the table; None where its formats have none."""

    def __init__(self, formats_, key, tensors):
        self.formats, self.key, self.tensors = formats_, key, tensors

    @classmethod
    def of(cls, master, grads, momentum, variance, formats_, key=0x9E3779B97F4A7C15):
        tensors: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
        tensors["grads"] = grads.to(formats_.grad)
        if formats_.weights == formats.WEIGHTS_SPLIT:
            tensors["compute"], tensors["rest"] = formats.split(master)
        else:
            tensors["weights"] = master.clone()
            if dtype := COMPUTE_DTYPES.get(formats_.weights):
                tensors["compute"] = torch.full_like(master, -7.0, dtype=dtype)
        if formats_.state == "8bit":
            tensors["momentum"], tensors["momentum_scale"] = blockwise.quantize(momentum, unsigned=False)
            tensors["variance"], tensors["variance_scale"] = blockwise.quantize(variance.abs(), unsigned=True)
        else:
            dtype = torch.bfloat16 if formats_.state == "bf16" else torch.float32
            tensors["momentum"], tensors["variance"] = (t.to(dtype, copy=True) for t in (momentum, variance))
        return cls(formats_, key, tensors)

    @classmethod
    def random(cls, size, formats_=PLAIN, seed=0, *, special=False, fill=1.0, ratio=0.0):
        """Draw normal numbers times `fill`, and times up to ten to the power of plus or minus `ratio`.

        With `special`, two fifths of all elements are special values.
        """
        rng = np.random.default_rng(seed)
        numbers = rng.standard_normal((4, size)) * fill * 10 ** (rng.uniform(-ratio, ratio, (4, size)))
        with np.errstate(over="ignore"):
            values = numbers.astype(np.float32)
        values[3] = np.abs(values[3])
        if special:
            mask = rng.random((4, size)) < 0.4
            values[mask] = rng.choice(np.array(SPECIAL, dtype=np.float32), mask.sum())
        return cls.of(*torch.from_numpy(values).unbind(), formats_, key=formats.mix_key(seed))

    @property
    def numel(self):
        return self["grads"].numel()

    def __getitem__(self, field):
        tensor = self.tensors[field]
        assert tensor is not None
        return tensor

    def clone(self):
        return Case(self.formats, self.key, {k: None if t is None else t.clone() for k, t in self.tensors.items()})

    def part(self, start, stop):
        """Return the elements from `start`, a whole number of blocks, to `stop`, in the same memory."""
        parts = {}
        for name, tensor in self.tensors.items():
            size = BLOCK_SIZE if name.endswith("_scale") else 1
            parts[name] = None if tensor is None else tensor[start // size : -(-stop // size)]
        return Case(self.formats, self.key, parts)

    def span(self, row=0, team=0, first=0):
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors.values()]
        return [*addresses, self.key, self.numel, row, self.formats.code, team, first]

    def run(self, scalars, isa=ISAS[-1], num_threads=1):
        update([self.span()], [scalars], isa, num_threads)
        return self

    def defined(self, scalars, first=0):
        """Return what the definition in plain torch makes of it; `first` is the number of its first element."""
        new = self.clone()
        adam_update(new.tensors, scalars, self.key, first)
        return new

    def master(self):
        if self.formats.weights == formats.WEIGHTS_SPLIT:
            return formats.join(self["compute"], self["rest"])
        return self["weights"]

    def state(self):
        """Return momentum and variance as float32."""
        momentum = read(self["momentum"], self.tensors["momentum_scale"], unsigned=False)
        return momentum, read(self["variance"], self.tensors["variance_scale"], unsigned=True)

    def assert_same(self, other, context=""):
        """Every bit is equal; one NaN is as good as another, as is what belongs to a NaN."""
        for name, tensor in self.tensors.items():
            if tensor is None:
                continue
            same = equal_bits(tensor, other[name])
            if name == "rest":
                same |= self["compute"].isnan()
            elif tensor.dtype == torch.uint8:
                same |= self[f"{name}_scale"].isnan().repeat_interleave(BLOCK_SIZE)[: self.numel]
            bad = (~same).nonzero().flatten()[:3]
            assert not len(bad), f"{self.formats} {name}{bad.tolist()}: {tensor[bad]} {other[name][bad]} {context}"


def update(spans, rows, isa=ISAS[-1], num_threads=1, cpus=None):
    table = array("Q", [number for span in spans for number in span])
    scalars = array("f", [number for row in rows for number in row])
    _adam.update(table, scalars, num_threads, isa, None if cpus is None else array("q", cpus))


INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def equal_bits(a, b):
    """Every bit equal, so -0.0 is not 0.0; one NaN is as good as another."""
    assert a.dtype == b.dtype
    if not a.is_floating_point():
        return a == b
    return (a.view(INTEGERS[a.dtype]) == b.view(INTEGERS[a.dtype])) | (a.isnan() & b.isnan())


def step_scalars_of(step, *, decoupled, grad_scale=1.0, **options):
    return scalars_of({**options, "decoupled_weight_decay": decoupled}, step, grad_scale)


def scalars_at(step=3.0, **changes):
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
    return step_scalars_of(step, **(options | changes))  # type: ignore[arg-type]


seeds = st.integers(0, 2**31)
hyper_parameters = st.fixed_dictionaries(
    {
        "lr": st.just(0.0) | st.floats(1e-8, 10),
        "betas": st.tuples(*[st.just(0.0) | st.floats(1e-6, 0.999999)] * 2),
        "eps": st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.1, 2.0]),
        "decoupled": st.booleans(),
        "grad_scale": st.sampled_from([1.0, 0.0, 2.0**-16, 0.3, 1e-20, 1e4]),
    }
)
steps = st.integers(1, 10**6).map(float)
step_scalars = st.builds(lambda step, options: step_scalars_of(step, **options), steps, hyper_parameters)


def examples(count):
    """Return settings for `count` examples, or the share of them that the profile in use asks for."""
    share = settings.get_profile(settings.get_current_profile_name()).max_examples / 100
    return settings(max_examples=max(3, round(count * share)))
