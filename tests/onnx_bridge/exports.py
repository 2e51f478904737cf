"""What is exported end to end: modules with inputs, plans and stages. Each is exported once."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan
from isoshard.onnx_bridge import export_torch
from tests.onnx_bridge import torch_models as models


class Case(NamedTuple):
    """One export; `collectives` are those of each stage in the compiled programs."""

    module: Callable[[], nn.Module]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    plan: Plan
    stages: dict[str, int]
    collectives: list[dict[str, int]]
    options: Mapping[str, Any] = MappingProxyType({})


def _floats(*shape):
    return lambda rng: {"x": rng.standard_normal(shape).astype(np.float32)}


CASES = {
    "mlp": Case(
        models.MLP,
        _floats(8, 16),
        models.MLP_PLAN,
        {"up": 0, "down": 1},
        [{}, {"all-reduce": 1}],
        {"dynamic_shapes": {"x": {0: torch.export.Dim("batch")}}},
    ),
    "cnn": Case(
        models.CNN,
        _floats(4, 3, 16, 16),
        models.CNN_PLAN,
        {"re:(first|norm|pool)": 0, "re:(second|head)": 1},
        [{}, {"all-reduce": 1}],
    ),
    "gpt": Case(
        functools.partial(models.GPT, blocks=1),
        lambda rng: {"ids": rng.integers(0, 64, (4, 16))},
        models.GPT_PLAN,
        {"tokens": 0, "blocks.0*": 0, "head": 1},
        [{"all-reduce": 2}, {}],
        {"opset": 23},  # attention as one operator
    ),
}


class Exported(NamedTuple):
    """A case, done: `wanted` is what torch computes of `inputs`."""

    case: Case
    module: nn.Module
    model: Any
    inputs: dict[str, np.ndarray]
    wanted: np.ndarray

    @property
    def mesh(self):
        return make_mesh((2, 2), ("dp", "tp"))


def export(name: str) -> Exported:
    case = CASES[name]
    module = models.seeded(case.module)
    inputs = case.inputs(np.random.default_rng(0))
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    mesh = make_mesh((2, 2), ("dp", "tp"))
    model = export_torch(
        module, (), mesh, case.plan, kwargs=tensors, stages=case.stages, **case.options
    )
    with torch.no_grad():
        result = module(**tensors)
    return Exported(case, module, model, inputs, result.numpy())
