"""Gradients of depthwise convolutions whose batch is split over one axis of a mesh of two."""

import jax
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.jax_faults import depthwise_on_a_part_of_a_mesh

GENERATOR = np.random.default_rng(0)
X, W, WEIGHTS = (
    GENERATOR.normal(size=size).astype(np.float32)
    for size in ((16, 8, 4, 4), (8, 1, 3, 3), (16, 8, 4, 4))
)


def gradient_of_torch(x, w):
    w = w.requires_grad_()
    out = torch.nn.functional.conv2d(x, w, padding=1, groups=8)
    (out * torch.from_numpy(WEIGHTS).to(out.device)).sum().backward()
    return w.grad.cpu().numpy()


WANT = gradient_of_torch(torch.from_numpy(X), torch.from_numpy(W))


@depthwise_on_a_part_of_a_mesh
def test_in_jax_alone():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def loss(w, x):
        out = jax.lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), feature_group_count=8)
        return (out * WEIGHTS).sum()

    got = jax.jit(jax.grad(loss))(W, jax.device_put(X, NamedSharding(mesh, P("y"))))
    np.testing.assert_allclose(got, WANT, rtol=1e-4, atol=1e-4)


def test_in_torch():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    x = xs.mark_sharding(torch.from_numpy(X).to("jax"), mesh, ("y", None, None, None))
    got = gradient_of_torch(x, torch.from_numpy(W).to("jax"))
    np.testing.assert_allclose(got, WANT, rtol=1e-4, atol=1e-4)
