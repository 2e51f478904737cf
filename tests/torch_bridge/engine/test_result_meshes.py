"""Tensors on meshes of every axis type: computed under Auto axes, said on the user's mesh."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P, Plan, metrics
from isoshard.torch_bridge.engine.compiling import program

KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[kind])


@pytest.fixture(params=KINDS)
def typed(request):
    return mesh_of(request.param)


def _pointers(x):
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


def test_a_tensor_is_said_on_the_users_mesh(typed):
    a = iso.shard(np.arange(32, dtype=np.float32).reshape(8, 4), typed, P("x", "y"))
    t = iso.to_torch(a)
    assert t.mesh == typed and t.partition_spec == P("x", "y")
    assert iso.sharding_of(t) == a.sharding
    back = iso.to_jax(t)
    assert jax.typeof(back) == jax.typeof(a) and back.sharding == a.sharding
    assert _pointers(back) == _pointers(a)
    copied = iso.to_jax(t, copy=True)
    assert copied.sharding == a.sharding and _pointers(copied) != _pointers(a)
    np.testing.assert_array_equal(copied, a)


def test_a_result_lies_on_the_mesh_of_its_first_operand(typed):
    t = iso.shard(torch.arange(32.0).reshape(8, 4), typed, P("x", None))
    other = iso.shard(torch.ones(4, 8), mesh_of("auto"), P(None, "y"))
    marked = xs.mark_sharding(torch.ones(8, 4, device="jax") * 3, typed, ("x", None))
    leaf = t.clone().requires_grad_()
    (leaf * leaf).sum().backward()
    for result in (t + 1, t @ other, t.sum(0), torch.relu(t)[2:], marked, marked + 1, leaf.grad):
        assert iso.sharding_of(result).mesh == typed
        assert iso.to_jax(result).sharding.mesh == typed
    assert marked.mesh == typed
    np.testing.assert_array_equal(iso.to_jax(leaf.grad), 2 * iso.to_jax(t))
    expected = jax.typeof(iso.shard(np.ones((8, 4), np.float32), typed, P("x")))
    assert jax.typeof(iso.to_jax(marked)) == expected


def _trained(kind, compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    mesh = mesh_of(kind)
    iso.shard(model, mesh, Plan({"*.weight": ("y",), "*": P()}))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x = iso.shard(torch.arange(64.0).reshape(8, 8) / 64, mesh, P("x"))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = xs.compile(step) if compiled else step
    texts, losses = [], []
    metrics.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_PROGRAMS", {})
        patch.setattr(program, "WATCHING", [lambda one, plan: texts.append(one.text())])
        for _ in range(3):
            losses.append(step(x))
            xs.sync()
    counts = metrics.counters()
    moved = {
        n: counts.get(n, 0) for n in ("compilations", "copied_bytes", "transfers.between_devices")
    }
    sent = [collectives.summarize(text) for text in texts]
    types = {name: jax.typeof(iso.to_jax(p.detach())) for name, p in model.named_parameters()}
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert iso.to_jax(state).sharding.mesh == mesh
    values = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return values, [loss.item() for loss in losses], moved, sent, types


@pytest.mark.parametrize(("kind", "compiled"), [("explicit", True), ("mixed", False)])
def test_training_is_that_on_auto_axes_and_types_stay(kind, compiled):
    values, losses, moved, sent, types = _trained(kind, compiled)
    expected, their_losses, theirs, their_sent, _ = _trained("auto", compiled)
    assert losses == their_losses
    assert moved == theirs and moved["copied_bytes"] == 0
    assert sent == their_sent and any(sent)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert str(types["0.weight"]) == ("float32[16@y,8]" if kind == "explicit" else "float32[16,8]")


def test_one_array_under_two_types_is_one_memory():
    mesh = mesh_of("explicit")
    a = iso.shard(np.ones((8, 4), np.float32), mesh, P("x"))
    t = iso.to_torch(a)
    t.add_(1)  # the array of JAX stays what it was
    np.testing.assert_array_equal(a, np.ones((8, 4)))
    np.testing.assert_array_equal(iso.to_jax(t), np.full((8, 4), 2))
    assert iso.to_jax(t).sharding == NamedSharding(mesh, P("x"))


OTHERS = {"equal grid": ((2, 4), ("dp", "tp")), "other grid": ((8,), ("all",))}


PAIRS = [("explicit", "equal grid"), ("mixed", "other grid")]


@pytest.fixture(params=PAIRS, ids="-".join)
def two(request):
    """Two meshes of the same devices, of one kind."""
    kind, other = request.param
    shape, names = OTHERS[other]
    return mesh_of(kind), jax.make_mesh(shape, names, axis_types=KINDS[kind][: len(shape)])


def _on(mesh, spec):
    return iso.shard(torch.arange(64.0).reshape(8, 8), mesh, spec)


def test_a_result_is_said_on_its_own_mesh_whatever_else_the_program_computes(two):
    mesh, other = two
    a, b = _on(mesh, P("x", "y")), _on(other, P(other.axis_names[0]))
    mine, theirs = a * 2, b * 3  # of one program
    torch.testing.assert_close(theirs.cpu(), torch.arange(64.0).reshape(8, 8) * 3)
    for t, known in ((a, mesh), (mine, mesh), (a + 1, mesh), (b, other), (theirs, other)):
        assert iso.sharding_of(t).mesh == known and t.device_mesh.get_jax_mesh() == known
        array = iso.to_jax(t)
        assert array.sharding.mesh == known and _pointers(array) == _pointers(iso.to_jax(t))
        np.testing.assert_array_equal(array, t.cpu())
    assert iso.to_jax(a).sharding.spec == iso.to_jax(mine).sharding.spec == P("x", "y")
    assert iso.to_jax(theirs).sharding.spec == P(other.axis_names[0])
    assert jax.typeof(iso.to_jax(mine)) == jax.typeof(iso.to_jax(a))


def test_of_two_meshes_a_result_is_said_on_the_first_that_something_is_split_over(two):
    mesh, other = two
    copied, split = _on(mesh, P()), _on(other, P(None, other.axis_names[-1]))
    both = copied + split
    torch.testing.assert_close(both.cpu(), torch.arange(64.0).reshape(8, 8) * 2)
    assert iso.sharding_of(both) == iso.sharding_of(split)
    again = _on(mesh, P("x")) + split
    assert iso.sharding_of(again).mesh == mesh


def test_gradients_and_optimizers_on_a_mesh_beside_another(two):
    mesh, other = two
    weight = torch.nn.Parameter(_on(mesh, P("x", "y")))
    plain = torch.nn.Parameter(torch.ones(8, device="jax"))
    optimizer = torch.optim.AdamW([weight, plain], 0.1)
    for step in range(4):
        x = _on(other, P(other.axis_names[0]))
        (x @ weight * plain).sum().backward()
        if step == 2:
            metrics.reset()
        optimizer.step()
        assert iso.sharding_of(weight.grad).mesh == mesh
        optimizer.zero_grad()
        xs.sync()
    assert metrics.counters().get("compilations", 0) == 0
    assert metrics.counters().get("transfers.between_devices", 0) == 0
    for t in (weight.detach(), optimizer.state[weight]["exp_avg"]):
        assert iso.sharding_of(t) == iso.to_jax(t).sharding == NamedSharding(mesh, P("x", "y"))
