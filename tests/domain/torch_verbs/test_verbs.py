"""`iso.domain`'s verbs on torch tensors, in equal blocks and others, against the CPU."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.errors import ShardingError

SIZES = (5, 2, 7, 4)


@pytest.fixture
def mesh():
    return iso.make_mesh((4,), ("x",))


def laid(x, mesh, kind, axis=0):
    spec = P(*[None] * axis, "x")
    if kind == "even":
        return iso.shard(x.narrow(axis, 0, 16).clone(), mesh, spec)
    sizes = [SIZES if at == axis else None for at in range(x.dim())]
    return iso.shard(x, mesh, spec, uneven="pad", sizes=sizes)


def sample(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def same(ours, right):
    assert torch.allclose(ours.detach().cpu().double(), right.detach().double(), atol=1e-4)


def gradients(run, t):
    """What `run` gives, and the gradient of a weighted sum of it, on the device and on the CPU."""
    found = []
    for x in (t.detach().clone().requires_grad_(), t.detach().cpu().double().requires_grad_()):
        y = run(x)
        (
            y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).to(y.device)
        ).sum().backward()
        found.append((y, x.grad))
    (ours, our_gradient), (right, gradient) = found
    same(ours, right)
    same(our_gradient, gradient)
    return ours


def on_device(ours, right):
    """One function on the device, another on the CPU."""
    return lambda x: ours(x) if x.device.type == "jax" else right(x)


VERBS = {
    "conv": (lambda x, w: iso.domain.conv(x, w, padding=1), lambda x, w: F.conv2d(x, w, padding=1)),
    "max_pool": (lambda x, w: iso.domain.max_pool(x, 2), lambda x, w: F.max_pool2d(x, 2)),
    "cumsum": (lambda x, w: iso.domain.cumsum(x, 2), lambda x, w: x.cumsum(2)),
    "roll": (lambda x, w: iso.domain.roll(x, 3, 2), lambda x, w: x.roll(3, 2)),
}


def test_verbs_on_images(mesh):
    w = sample(2, 2, 3, 3)
    t = laid(sample(2, 2, 18, 5), mesh, "uneven", axis=2)

    def all_of_them(x):
        own = w.to("jax") if x.device.type == "jax" else w.double()
        found = [verb[x.device.type != "jax"](x, own) for verb in VERBS.values()]
        if x.device.type == "jax":
            xs.sync()
            assert all(y.block_sizes is not None for y in found)
        return torch.cat([y.flatten() for y in found])

    gradients(all_of_them, t)
    with pytest.raises(ShardingError, match="conv"):  # the verb's own error
        iso.domain.conv(t, torch.ones(2, 3, 3, 3).to("jax"))


def test_messages_on_a_graph(mesh):
    nodes = laid(sample(18, 3), mesh, "even")
    count = len(nodes)
    senders = np.arange(2 * count) % count
    receivers = (senders * 5 + 3) % count
    graph = iso.domain.partition_graph(senders, receivers, iso.to_jax(nodes))

    def ours(x):
        return iso.domain.segment_sum(torch.tanh(graph.senders(x)), graph)

    def right(x):
        index = torch.from_numpy(receivers)[:, None].expand(-1, 3)
        return torch.zeros_like(x).scatter_add(0, index, torch.tanh(x[senders]))

    gradients(on_device(ours, right), nodes)


def test_a_recorded_tensor_and_a_captured_step(mesh):
    x = sample(18, 3)
    t = laid(x, mesh, "uneven")
    same(iso.domain.cumsum(torch.relu(t) * 2, 0), (x.relu() * 2).cumsum(0))

    @xs.compile
    def step(a):
        return iso.domain.cumsum(a, 0) * 2

    before = iso.metrics.counters()["compilations"]
    for _ in range(3):
        same(step(t), 2 * x.cumsum(0))
    assert iso.metrics.counters()["compilations"] - before < 3


def test_uneven_results_of_equal_blocks_stay_in_blocks(mesh):
    t = laid(sample(2, 2, 18, 5), mesh, "even", axis=2)
    y = iso.domain.conv(t, sample(2, 2, 3, 3).to("jax"))
    xs.sync()
    assert y.shape == (2, 2, 14, 3)
    assert y.block_sizes == (None, None, (3, 4, 4, 3), None)


def test_tensors_on_no_mesh(mesh):
    for x in (sample(4), sample(4).to("jax")):
        with pytest.raises(ShardingError, match="are on no mesh"):
            iso.domain.cumsum(x, 0)
    y = iso.domain.cumsum(sample(4).to("jax"), 0, mesh=mesh, spec=P("x"))
    same(y, sample(4).cumsum(0))


def test_meshes_that_differ(mesh):
    other = iso.make_mesh((8,), ("x",))
    points, queries = iso.shard(sample(16, 3), mesh, P("x")), iso.shard(sample(8, 3), other, P("x"))
    with pytest.raises(ShardingError, match="different meshes"):
        iso.domain.knn(points, queries, 2)


def test_keys_of_jax_are_constants():
    mesh = iso.make_mesh((1,), ("x",))
    t = iso.shard(sample(1, 8, 1, 4), mesh, P())
    options = {"mesh": mesh, "axis": "x", "dropout": 0.5}
    one, two = (
        iso.domain.ring_attention(t, t, t, key=jax.random.key(n), **options).cpu() for n in (0, 1)
    )
    again = iso.domain.ring_attention(t, t, t, key=jax.random.key(0), **options).cpu()
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
