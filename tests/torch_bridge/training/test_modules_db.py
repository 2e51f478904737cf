"""Modules of torch's own module database equal the CPU, in evaluation too where that differs.

Compared are the outputs, the gradients of inputs and parameters, and the buffers afterwards
(BatchNorm statistics), for the first of the float32 samples that torch gives; `tests/conformance`
takes them all. Each module is recorded as a whole before anything is executed.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs

INFOS = {info.formatted_name.removeprefix("nn_"): info for info in module_db}

DIFFER = ("Norm", "Dropout", "RReLU", "TransformerEncoderLayer", "MultiheadAttention")
"""Modules of these names do something else in evaluation."""

NEEDS_X64 = {
    "BatchNorm2d": "torch keeps the statistics of an empty batch in float64",
    "FractionalMaxPool2d": "the samples give the random regions in float64, as the input then is",
    "FractionalMaxPool3d": "as FractionalMaxPool2d",
}

LAZY = (
    "torch makes the parameters of a lazy module of an UninitializedParameter, a class of its own"
)
FAILS = {name for name in INFOS if name.startswith("Lazy")}
"""Modules that do not equal the CPU. Strict: one that passes fails the test."""

pytestmark = [  # torch's own, about its own samples
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored"),
    pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning"),
]


@dataclasses.dataclass
class Run:
    """What one sample left behind, on one device."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def move(tree: Any, device: str) -> Any:
    """Inputs on a device, as leaves of their own that require what the sample's require."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)

    return pytree.tree_map(leaf, tree)


def run(module: torch.nn.Module, inputs: Any, device: str) -> Run:
    """One forward and backward pass."""
    module = module.to(device)
    args, kwargs = move((inputs.args, inputs.kwargs), device)
    outputs = leaves(module(*args, **kwargs))
    torch.manual_seed(1)
    wanted = [out for out in outputs if out.requires_grad]
    if wanted:
        seeds = [torch.randn(out.shape, dtype=out.dtype).to(device) for out in wanted]
        torch.autograd.backward(wanted, seeds)
    gradients = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves((args, kwargs)))}
    gradients |= {name: p.grad for name, p in module.named_parameters()}
    return Run(outputs, gradients, dict(module.named_buffers()))


def samples(name: str, training: bool) -> list[tuple[torch.nn.Module, Any]]:
    """CPU modules and their inputs, from the database."""
    info = INFOS[name]
    dtype = torch.float64 if name.startswith("Fractional") else torch.float32
    torch.manual_seed(0)
    found = [
        sample
        for sample in info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        if sample.forward_input is not None
    ]
    made = []
    for sample in found[:1]:
        given = sample.constructor_input
        module = info.module_cls(*given.args, **given.kwargs)
        made.append((module.train(training), sample.forward_input))
    return made


def check(names: Iterable[str]) -> None:
    """Compare modules' samples, all of one program."""
    found = []
    for name in names:
        modes = (True, False) if any(word in name for word in DIFFER) else (True,)
        for module, inputs in [pair for training in modes for pair in samples(name, training)]:
            got = run(copy.deepcopy(module), inputs, "jax")
            found.append((f"{name} {module.training}", got, run(module, inputs, "cpu")))
    xs.sync()
    assert {where.partition(" ")[0] for where, _, _ in found} == {*names}
    for where, got, want in found:
        compare(got, want, where)


def compare(got: Run, want: Run, where: str) -> None:
    for number, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        close(g, w, f"{where} output {number}")
        assert g.requires_grad == w.requires_grad, f"{where} output {number} requires_grad"
    for kind, mine, theirs in (
        ("gradient of", got.gradients, want.gradients),
        ("buffer", got.buffers, want.buffers),
    ):
        assert mine.keys() == theirs.keys()
        for key, w in theirs.items():
            if w is None:
                assert mine[key] is None, f"{where} {kind} {key} is not None"
            else:
                close(mine[key], w, f"{where} {kind} {key}")


def close(got: Any, want: torch.Tensor, where: str) -> None:
    assert isinstance(got, xs.XLAShardedTensor), where
    torch.testing.assert_close(
        got.detach().cpu(),
        want.detach(),
        rtol=1e-3,
        atol=5e-5,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


FUNCTIONS = re.compile(
    r"Pad\dd|(Avg|Max)Pool|LU6?$|Hard|^(Log)?Soft(max|min|plus|shrink|sign)|Tanh|Sigmoid|Threshold|Mish"
    r"|Conv(Transpose)?[13]d|BatchNorm[13]d|InstanceNorm[12]d"
    r"|LPPool[12]d|Cell$|^RNN$|^TransformerEncoder$|DecoderLayer|^(?!.*CrossEntropy).*Loss"
)
"""Modules whose functions the tests of lowerings compare, and those of other numbers of axes,
and what others consist of."""
USUAL = [
    name for name in INFOS if not (name in FAILS or name in NEEDS_X64 or FUNCTIONS.search(name))
]


@pytest.mark.parametrize("part", range(2))
def test_modules_equal_the_cpu_in_training_and_evaluation(part):
    check(USUAL[part::2])


@pytest.mark.usefixtures("x64")
def test_modules_that_need_64_bits_equal_the_cpu():
    check(NEEDS_X64)


@pytest.mark.xfail(reason=LAZY)
@pytest.mark.parametrize("name", sorted(FAILS)[:2])
def test_modules_that_do_not_equal_the_cpu(name):
    check([name])
