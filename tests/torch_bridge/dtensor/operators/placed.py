"""Operators on distributed tensors, beside the same on the CPU in float64."""

import torch
from torch.distributed.tensor import Replicate, Shard

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import distribute_tensor

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
MESHES = {(4,): "t", (2, 4): "dt"}
PLACEMENTS = [
    ((4,), [S0]),
    ((4,), [S1]),
    ((2, 4), [R, R]),
    ((2, 4), [S0, R]),
    ((2, 4), [S0, S1]),
    ((2, 4), [S1, S0]),
    ((2, 4), [S0, S0]),
]
"""Meshes of 4 and 8 devices with ways to lie on them, for a tensor of rank 2 or more."""


def data(*shape, seed=0):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.double()


def mesh_of(shape):
    return init_device_mesh("jax", shape, mesh_dim_names=tuple(MESHES[shape]))


def on(whole, mesh, placements):
    """A tensor on a mesh, in single precision; what has no such axis, or one of 1, is whole."""
    kept = [p if p == R or whole.shape[p.dim :][:1] > (1,) else R for p in placements]
    given = whole.detach().float() if whole.is_floating_point() else whole
    placed = distribute_tensor(given, mesh, kept)
    return placed.requires_grad_(whole.requires_grad)


def leaves(results):
    return list(results) if isinstance(results, tuple | list) else [results]


def gradients(results, inputs):
    """Of a sum of the results, each with weights of its own."""
    parts = [
        (one * (1 + torch.arange(one.numel(), device=one.device).reshape(one.shape) % 7)).sum()
        for one in leaves(results)
        if one.requires_grad
    ]
    wanted = [one for one in inputs if one.requires_grad]
    return list(torch.autograd.grad(sum(parts), wanted)) if parts else []


def check(cases, shape):
    """Results and gradients agree with the CPU's, of all cases as one program.

    Args:
        cases: by name a function of tensors, its operands on the CPU (in double precision, which
            require a gradient, or whole numbers), and several choices of a placement of each.
        shape: of the mesh.
    """
    mesh, found = mesh_of(shape), []
    for name, (function, wholes, layouts) in cases.items():
        want = function(*wholes)
        want = leaves(want) + gradients(want, wholes)
        for placements in layouts:
            given = [on(one, mesh, own) for one, own in zip(wholes, placements, strict=True)]
            got = function(*given)
            found.append((f"{name} {placements}", leaves(got) + gradients(got, given), want))
    xs.sync()
    for where, got, want in found:
        for here, there in zip(got, want, strict=True):
            compare(here, there, where)


def compare(here, there, where):
    assert here.device_mesh is not None, where
    assert tuple(here.shape) == tuple(there.shape), where
    torch.testing.assert_close(
        here.detach().cpu().to(there.dtype),
        there.detach(),
        rtol=2e-4,
        atol=2e-4,
        msg=lambda text: f"{where}: {text}",
    )
