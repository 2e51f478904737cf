"""Steps of users (`programs.py`) in each way to run them, against CPU torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.distributed.tensor import Replicate

import isoshard as iso
import isoshard.torch_bridge as xs

from .known_faults import marked
from .programs import ARGUMENTS, OF_SCOPE, SIZE, ran, stateful, verbs

IN_GRAPHS = ("shard to nothing", "full", "mark_sharding_with_gradients", "redistribute")


def cases(programs):
    """A case for each program and way; those that fail are marked.

    `torch.compile`, whose guards are torch's own, gets each change of a state once, and each verb
    that `distributed/test_fullgraph` has not.
    """
    found = []
    seen = {(verb, given) for verb in IN_GRAPHS for given in ARGUMENTS}
    for group in programs:
        program = group[0]
        for way in OF_SCOPE[program.scope]:
            if way == "torch.compile":
                kind = program.traits[:2] if len(program.traits) == 2 else program.traits[1]
                if kind in seen:
                    continue
                seen.add(kind)
            name = f"{program.title}, {way}"
            found.append(pytest.param(*group, way, id=name, marks=marked(program, way)))
    return found


@pytest.fixture(scope="module")
def known():
    """What the programs with verbs refer to: a mesh, functions and modules of both frameworks."""
    weight = np.linspace(0.5, 2, SIZE, dtype=np.float32)

    class Scale(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.asarray(weight))

        def __call__(self, value):
            return self.weight[...] * value

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight))

        def forward(self, value):
            return self.weight * value

    def cleared(value):
        xs.clear_sharding(value)
        return value

    return {
        "MESH": iso.make_mesh((8,), ("a",)),
        "TRIPLE": iso.torch_function(lambda value: value * 3),
        "LAYER": iso.jax_function(Layer()),
        "MODULE": iso.torch_module(Scale()),
        "WEIGHT": torch.tensor(weight),
        "cleared": cleared,
        "Replicate": Replicate,
        "checkpoint": torch.utils.checkpoint.checkpoint,
    }


def agree(found, truth):
    for call, (values, wanted) in enumerate(zip(found, truth, strict=True)):
        assert len(values) == len(wanted)
        for one, other in zip(values, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"call {call}")


@pytest.mark.parametrize(("program", "way"), cases((program,) for program in stateful()))
def test_state_of_a_step(program, way):
    agree(ran(program, "jax", way, {}), ran(program, "cpu", "lazy", {}))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # JAX 0.9's P
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # dynamo asks
@pytest.mark.parametrize(("with_it", "without", "way"), cases(verbs()))
def test_a_verb_within_a_step(with_it, without, way, known):
    agree(ran(with_it, "jax", way, known), ran(without, "cpu", "lazy", known))
