"""Marks hold: through writes, training and views; and the RFC's examples."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh, metrics
from tests.torch_bridge.engine.test_sync import batch, mlp, train_step


@pytest.fixture
def grid() -> xs.Mesh:
    """The mesh of torch_xla's users."""
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


# --- Annotations ---------------------------------------------------------------------------------


def spec(t: torch.Tensor) -> tuple:
    return tuple(t.partition_spec)


def real_spec(t: torch.Tensor) -> jax.sharding.Sharding:
    """The layout of the buffers, whatever the annotation says."""
    return iso.to_jax(t.detach()).sharding.spec


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(torch.ones(8, 4, device="jax")),
    "copy_ from cpu": lambda t: t.copy_(torch.ones(8, 4)),
    "fill_": lambda t: t.fill_(3),
    "zero_": lambda t: t.zero_(),
    "setitem": lambda t: t.__setitem__(0, 5.0),
    "through a view": lambda t: t.t()[1].mul_(2),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 2.0),
    "uniform_": lambda t: t.uniform_(),
    "init": lambda t: torch.nn.init.xavier_uniform_(t),
    "product": lambda t: t.copy_(t.t().contiguous().t() @ torch.ones(4, 4, device="jax")),
}


@pytest.mark.parametrize("synced", [True, False])
def test_an_annotation_survives_in_place_updates(synced, grid):
    marked = {
        name: xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("y", "x")) for name in IN_PLACE
    }
    if synced:
        xs.sync()
    for _ in range(2):
        for name, t in marked.items():
            IN_PLACE[name](t)
        xs.sync()
        for name, t in marked.items():
            assert spec(t) == ("y", "x"), name
            assert real_spec(t) == P("y", "x"), name


def test_a_parameters_layout_survives_training_and_its_state_follows(grid):
    model = mlp().to("jax")
    xs.mark_sharding(model[0].weight, grid, ("y", None))
    xs.mark_sharding(model[2].weight, grid, (None, 1))
    xs.mark_sharding(model[0].bias, grid, ("y",))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    x, y = (t.to("jax") for t in batch())
    for _ in range(3):
        train_step(model, optimizer, xs.mark_sharding(x.clone(), grid, ("x", None)), y)
        xs.sync()
    for parameter, want in ((model[0].weight, P("y")), (model[2].weight, P(None, "y"))):
        state = optimizer.state[parameter]
        assert parameter.is_leaf and isinstance(parameter, torch.nn.Parameter)
        assert real_spec(parameter) == want
        assert [real_spec(state[k]) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")] == [
            want
        ] * 3


class Marked(torch.nn.Module):
    """A model that marks its activation, as SPMD scripts do."""

    def __init__(self, mesh: xs.Mesh):
        super().__init__()
        self.inner = mlp()
        self.mesh = mesh
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner[0](x)
        xs.mark_sharding(h, self.mesh, ("x", "y"))
        self.seen.append(h.detach())
        return self.inner[2](torch.tanh(h))


def test_activations_can_be_marked_inside_forward(grid):
    model, (x, y) = Marked(grid), batch()
    plain = mlp()
    model.to("jax")
    torch.nn.functional.mse_loss(model(x.to("jax")), y.to("jax")).backward()
    torch.nn.functional.mse_loss(plain(x), y).backward()
    xs.sync()
    assert spec(model.seen[0]) == ("x", "y")
    assert real_spec(model.seen[0]) == P("x", "y")
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad)


def test_a_view_can_be_marked(grid):
    x = torch.arange(64.0).to("jax").reshape(8, 8)
    base = x + 1
    view = xs.mark_sharding(base.t(), grid, ("x", "y"))
    assert torch.equal(view.cpu(), (torch.arange(64.0).reshape(8, 8) + 1).t())
    view.mul_(2)
    assert torch.equal(base.cpu(), (torch.arange(64.0).reshape(8, 8) + 1) * 2)


def test_heads_of_attention_can_be_marked(grid):
    """What tensor-parallel scripts do: a reshaped and transposed activation is marked."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    h = x.to("jax").mul(1.0).view(2, 8, 4, 8).transpose(1, 2)
    xs.mark_sharding(h, grid, (None, "y", None, None))
    out = torch.softmax(h @ h.transpose(-1, -2), -1) @ h
    want = x.view(2, 8, 4, 8).transpose(1, 2)
    want = torch.softmax(want @ want.transpose(-1, -2), -1) @ want
    torch.testing.assert_close(out.cpu(), want)


def test_results_are_laid_out_by_the_partitioner(grid):
    x = xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("x", None))
    w = xs.mark_sharding(torch.ones(4, 8).to("jax"), grid, (None, "y"))
    product = x @ w
    xs.sync()
    assert real_spec(product) == P("x", "y")
    assert spec(product) == ("x", "y")


SHARDING_STRINGS = {
    ("x", "y"): (xs.ShardingType.TILED, "{devices=[2,4]0,1,2,3,4,5,6,7}"),
    (1, 0): (xs.ShardingType.TILED, "{devices=[4,2]0,4,1,5,2,6,3,7}"),
    (0, None): (
        xs.ShardingType.PARTIAL,
        "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
    ),
    (None, 1): (
        xs.ShardingType.PARTIAL,
        "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}",
    ),
    ((0, 1), None): (xs.ShardingType.TILED, "{devices=[8,1]0,1,2,3,4,5,6,7}"),
    ((1, 0), None): (xs.ShardingType.TILED, "{devices=[8,1]0,4,1,5,2,6,3,7}"),
    (None, (0, 1)): (xs.ShardingType.TILED, "{devices=[1,8]0,1,2,3,4,5,6,7}"),
    (None, None): (xs.ShardingType.REPLICATED, "{replicated}"),
}


def test_types_and_strings_are_torch_xlas(grid):
    """Observed on torch_xla 2.9."""
    marked = []
    for partition, wanted in SHARDING_STRINGS.items():
        t = xs.mark_sharding(torch.arange(64.0).to("jax").reshape(8, 8) + 0, grid, partition)
        assert (t.sharding_type, t.sharding_spec) == wanted
        marked.append(t)
    xs.sync()
    for t in marked:
        for shard in t.local_shards:
            where = ... if shard.indices is ... else tuple(shard.indices)
            assert torch.equal(t.cpu()[where], shard.data)
            assert shard.shard_device == f"CPU:{shard.rank}"


def test_clear_sharding_makes_whole(grid):
    t = xs.mark_sharding(torch.arange(8.0).to("jax"), grid, ("y",))
    xs.sync()
    xs.clear_sharding(t)
    xs.sync()
    assert all(shard.data.shape == (8,) for shard in t.local_shards)
    assert t.tolist() == list(range(8))


def test_a_spec_waits_for_its_tensor(grid):
    waiting = xs.ShardingSpec(grid, (0, None))
    t = torch.ones(8, 4, device="jax")
    assert waiting.can_apply(t) and not waiting.can_apply(t[0])
    assert str(waiting.xla_spec(t)).startswith("{devices=[2,1,4]")
    assert waiting.xla_spec(t[0]) is None
    assert tuple(waiting.apply(t).partition_spec) == ("x",)


# --- The RFC -------------------------------------------------------------------------------------


def test_the_example_of_the_rfc_runs_with_its_imports_changed(capsys):
    import isoshard.torch_bridge as xs
    import isoshard.torch_bridge.torch_xla.core.xla_model as xm
    import isoshard.torch_bridge.torch_xla.runtime as xr
    from isoshard.torch_bridge import Mesh, XLAShardedTensor

    # fmt: off
    mesh_shape = (2, 4) # device mesh
    num_devices = xr.global_runtime_device_count() # the RFC: len(xm.get_xla_supported_devices())
    device_ids = np.array(range(num_devices))
    mesh = Mesh(device_ids, mesh_shape, ('x', 'y'))
    t = torch.randn(8, 4).to(xm.xla_device())

    # Mesh partitioning, each device holds 1/8-th of the input
    partition_spec = (0, 1)
    m1_sharded = xs.mark_sharding(t, mesh, partition_spec)

    # XLAShardedTensor behaves like a unpartitioned native tensor:
    # - we can apply native torch.Tensor ops and nn.layers
    # - print the unpartitioned tensor when sent to CPU
    # - provides access to the list of local shards after lazy execution
    assert isinstance(m1_sharded, XLAShardedTensor) == True  # noqa: E712
    # fmt: on

    assert (m1_sharded + 1).local_shards is None  # before execution
    layer = torch.nn.Linear(4, 2).to(xm.xla_device())
    out = layer(torch.relu(m1_sharded) + m1_sharded.t().t())
    assert isinstance(out, XLAShardedTensor) and out.local_shards is None
    xs.sync()
    assert [s.data.shape for s in m1_sharded.local_shards] == [(4, 1)] * 8
    assert [s.rank for s in m1_sharded.local_shards] == list(range(8))
    print(m1_sharded.cpu())
    whole = capsys.readouterr().out
    assert whole.count("[") == 9 and "device" not in whole
    assert torch.equal(m1_sharded.global_tensor.cpu(), m1_sharded.cpu())
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert dict(mesh.shape()) == {"x": 2, "y": 4}


def test_the_other_examples_of_the_rfc():
    mesh_shape = (4, 2)
    device_ids = np.array(range(len(jax.devices())))
    mesh = xs.Mesh(device_ids, mesh_shape, ("x", "y"))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert list(mesh.shape().items()) == [("x", 4), ("y", 2)]
    data = torch.randn(8, 32)
    inputs = data.to(xs.xla_device())
    xs.mark_sharding(inputs, mesh, (0, None))  # 4-way data parallel
    linear = torch.nn.Linear(32, 10).to(xs.xla_device())
    xs.mark_sharding(linear.weight, mesh, (None, 1))  # 2-way model parallel
    want = data @ linear.weight.detach().cpu().t() + linear.bias.detach().cpu()
    torch.testing.assert_close(linear(inputs).detach().cpu(), want, rtol=1e-5, atol=1e-5)
    assert [s.data.shape for s in linear.weight.local_shards] == [(10, 16)] * 8


def test_program_text_shows_the_collectives_of_a_marked_program():
    """`sync` compiles the whole tape, so the partitioner sees forward and backward at once."""
    mesh = make_mesh((8,), ("x",))
    before = metrics.counters()["executions"]
    w = iso.shard(torch.ones(16, 16), mesh, P(None, "x"))
    x = iso.shard(torch.ones(8, 16), mesh, P(None, "x"))
    assert (x @ w.t()).sum().item() == 8 * 16 * 16
    assert metrics.counters()["executions"] == before + 1
