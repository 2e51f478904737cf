"""Core's verbs over the devices of several processes: every value bit for bit against NumPy."""

from __future__ import annotations

import itertools
import sys

import numpy as np
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.multi_process.bitwise import (
    DTYPES,
    SPECS,
    assert_holds,
    bits,
    counted,
    meshes,
    raising,
    values,
)


def start():
    iso.distributed.init_distributed(local_devices=int(sys.argv[3]))


def check_ids_are_no_positions(world):
    import jax

    ids = [device.id for device in jax.devices()]
    assert ids != list(range(4)), ids
    assert len(jax.local_devices()) == 4 // world.size
    mesh = iso.make_mesh((2, 2), ("x", "y"))
    assert [d.id for d in mesh.devices.flat] == ids


def check_shard(world):
    for mesh, spec, dtype in itertools.product(meshes(), SPECS, DTYPES):
        host = values((64, 256), dtype)
        blocks = 4 // iso.sharding.Tiles.from_spec(spec, mesh, 2).replicas
        iso.metrics.reset()
        array = iso.shard(host, mesh, spec)
        assert_holds(array, host)
        for piece in iso.local_shards(array):
            want = host[piece.index]
            shared = piece.data.unsafe_buffer_pointer() == want.ctypes.data
            assert shared == want.flags.c_contiguous, (spec, dtype)
        copied = sum(not host[p.index].flags.c_contiguous for p in iso.local_shards(array))
        assert counted("copies") == copied
        assert counted("copied_bytes") == copied * array.nbytes // blocks


def check_shard_asks_nobody_if_told_so(world):
    """One process alone shards; and what the processes give need not be the same."""
    mesh = meshes()[0]
    if world.rank == world.size - 1:
        host = values((8, 8), np.int32)
        for spec in SPECS:
            assert_holds(iso.shard(host, mesh, spec, check="off"), host)
    mine = np.full((8, 8), world.rank, np.int32)
    array = iso.shard(mine, mesh, P(("x", "y")), check="off")
    assert_holds(array, mine)
    whole = np.asarray(iso.full(array))
    owners = [device.process_index for device in mesh.devices.flat]
    assert whole[::2, 0].tolist() == owners


def check_copy(world):
    mesh = meshes()[0]
    host = values((8, 16), np.float32)
    array = iso.shard(host, mesh, P("x", "y"), copy=True)
    before = host.copy()
    host[:] = 0
    assert_holds(array, before)
    iso.metrics.reset()
    rows = iso.shard(host, mesh, P(("x", "y")), copy=True)
    assert counted("copies") == 4 // world.size  # of its own slices, not of the whole
    assert counted("copied_bytes") == host.nbytes // world.size
    assert not any(
        p.data.unsafe_buffer_pointer() == host[p.index].ctypes.data for p in iso.local_shards(rows)
    )
    number = [d.process_index for d in mesh.devices.flat].index(world.rank)
    with raising(iso.errors.CopyError, rf"w: .*device {number} is not contiguous"):
        iso.shard(host, mesh, P(None, "y"), copy=False, name="w")
    with raising(iso.errors.CopyError, r"w: .*starts 4 bytes past a 64-byte boundary"):
        iso.shard(host.reshape(-1)[1:65], mesh, P(("x", "y")), copy=False, name="w")
    moved = iso.to_jax(rows, copy=True)
    assert_holds(moved, host)
    for old, new in zip(iso.local_shards(rows), iso.local_shards(moved), strict=True):
        assert old.data.unsafe_buffer_pointer() != new.data.unsafe_buffer_pointer()
    with raising(iso.errors.CopyError, r"its data must move"):
        iso.to_jax(rows, iso.core.named_sharding(P("y"), mesh, 2), copy=False)


def check_narrow_integers(world):
    mesh = meshes()[1]
    host = np.arange(64).reshape(8, 8) - 32
    iso.metrics.reset()
    array = iso.shard(host, mesh, P("x"))
    assert_holds(array, host.astype(np.int32))
    assert (counted("narrowed"), counted("narrowed_bytes")) == (1, 8 * 8 * 4)
    with raising(iso.errors.CopyError, "do not fit"):
        iso.shard(host << 40, mesh, P("x"))


def check_trees_and_plans(world):
    mesh = meshes()[0]
    params = {"a": {"kernel": values((8, 16), np.float32)}, "norm": values((16,), np.float32, 1)}
    plan = iso.Plan({"*.kernel": ("x", "y"), "norm": None})
    resolved = plan.resolve(params, mesh)
    assert resolved.specs == {"a.kernel": P("x", "y"), "norm": P()}
    assert resolved.bytes_per_device == 8 * 16 * 4 // 4 + 16 * 4
    assert "mesh (x=2, y=2)" in str(resolved)
    placed = iso.shard(params, mesh, plan)
    assert_holds(placed["a"]["kernel"], params["a"]["kernel"])
    assert_holds(placed["norm"], params["norm"])
    assert plan.resolve(placed, mesh).specs == resolved.specs
    with raising(iso.errors.SpecError, r"(?s)2 leaves.*net\.a\.kernel: .*'z'.*net\.norm: .*'z'"):
        iso.shard(params, mesh, P("z"), name="net")


def check_jax_arrays(world):
    import jax

    host = values((8, 8), np.int32)
    mine = jax.device_put(host, jax.local_devices()[0])
    for mesh, spec in itertools.product(meshes(), SPECS):
        assert_holds(iso.shard(mine, mesh, spec), host)
    first, second = meshes()[0], iso.make_mesh((2,), ("z",))
    replicated = iso.shard(host, first, P())
    assert_holds(iso.shard(replicated, second, P("z")), host)
    split = iso.shard(host, first, P("x", "y"))
    outside = all(d.process_index != world.rank for d in second.devices.flat)
    if outside:
        assert iso.local_shards(iso.shard(split, second, P("z"))) == []
    else:
        with raising(iso.ShardingError, r"w: .*4 devices of processes 0, 1.*iso\.full"):
            iso.shard(split, second, P("z"), name="w")
    assert_holds(iso.shard(iso.full(split), second, P("z")), host)


def check_reshard(world):
    """Every kind of move: each is a program to compile, so not all pairs."""
    every = meshes()
    host = values((8, 8), np.float32)
    array = iso.shard(host, every[1], SPECS[-1])
    for spec in SPECS:
        array = iso.reshard(array, spec)
        assert array.sharding.spec == spec
        assert_holds(array, host)
    for old, new in itertools.pairwise([*every, every[0]]):
        array = iso.reshard(iso.shard(host, old, P("x", "y")), new, P("y"))
        assert iso.sharding_of(array).mesh == new
        assert_holds(array, host)


def check_full(world):
    for number, dtype in enumerate(DTYPES):
        host = values((8, 8), dtype)
        array = iso.shard(host, meshes()[number % 4], SPECS[3 + number % 5])
        iso.metrics.reset()
        whole = iso.full(array)
        assert counted("gathers") == 1
        assert iso.full(whole) is whole
        assert counted("gathers") == 1
        assert_holds(whole, host)
        assert bits(whole) == bits(host)


def check_local_shards(world):
    mesh = meshes()[1]
    host = values((8, 4), np.float32)
    array = iso.shard(host, mesh, P("y"))
    pieces = iso.local_shards(array)
    at = {device: number for number, device in enumerate(mesh.devices.flat)}
    slices = iso.sharding.Tiles.from_sharding(array.sharding, 2).slices(host.shape)
    for piece in pieces:
        number = at[piece.device]
        found = tuple(slice(*part.indices(n)) for part, n in zip(piece.index, (8, 4), strict=True))
        assert found == tuple(slice(s.start, s.stop, 1) for s in slices[number])
        assert piece.replica_id == number // 2
    for piece in iso.local_shards(array, framework="torch"):
        assert bits(piece.data.numpy()) == bits(host[piece.index])
        assert piece.data.data_ptr() in [p.data.unsafe_buffer_pointer() for p in pieces]


def check_visualize(world):
    mesh = meshes()[0]
    array = iso.shard(values((8, 4), np.float32), mesh, P(None, "x"))
    text = iso.visualize(array)
    mine = ["0,1", "2,3"][world.rank]
    assert text.splitlines() == [
        "float32[8, 4]  P(None, 'x')  mesh (x=2, y=2)",
        "2 blocks of [8, 2], each on 2 devices",
        f"process {world.rank} has devices {mine}",
        "       0:2     2:4",
        "    ┌───────┬───────┐",
        "0:8 │  0,1  │  2,3  │",
        "    └───────┴───────┘",
    ], text
    assert (
        iso.visualize(P(None, "x"), shape=(8, 4), mesh=mesh).splitlines()[3:]
        == (text.splitlines()[3:])
    )


def check_part_of_the_processes(world):
    """A mesh of the first devices: the others get arrays without a piece, and may not give one."""
    import jax

    mesh = iso.make_mesh((1,), ("z",), devices=jax.devices()[:1])
    inside = any(d.process_index == world.rank for d in mesh.devices.flat)
    host = values((8, 8), np.float32)
    array = iso.shard(host, mesh, P("z"))
    assert len(iso.local_shards(array)) == inside
    assert_holds(array, host)
    assert_holds(iso.reshard(array, P(None, "z")), host)
    whole = iso.full(array)
    assert_holds(whole, host)
    doubled = jax.jit(lambda a: a * 2)(iso.shard(host.view(np.int32), mesh, P("z")))
    assert_holds(doubled, host.view(np.int32) * 2)
    assert iso.sharding_of(array).mesh == mesh
    if inside:
        mine = host[iso.local_shards(array)[0].index]
        assert_holds(iso.from_local(mine, mesh, P("z")), host)
    else:
        assert "has none of the devices" in iso.visualize(array)
        with raising(iso.ShardingError, rf"process {world.rank} owns no device of the mesh 'z'"):
            iso.from_local(host, mesh, P("z"))
    last = iso.make_mesh((1,), ("z",), devices=jax.devices()[-1:])
    assert len(iso.local_shards(iso.shard(host, last, P()))) == (world.rank == world.size - 1)


def part_of(host, mesh, spec):
    """What NumPy says this process gives: its rows and columns, each once, in order."""
    import jax

    slices = iso.sharding.Tiles.from_spec(spec, mesh, host.ndim).slices(host.shape)
    mine = [
        slices[number]
        for number, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    rows = [sorted({i for s in mine for i in range(n)[s[a]]}) for a, n in enumerate(host.shape)]
    return host[np.ix_(*rows)]


def check_from_local(world):
    for mesh, spec in itertools.product(meshes(), SPECS):
        host = values((8, 16), np.float32)
        part = part_of(host, mesh, spec)
        assert_holds(iso.from_local(part, mesh, spec), host)
        assert_holds(iso.from_local(part, mesh, spec, shape=(8, 16)), host)
        assert_holds(iso.from_local(iso.to_jax(part), mesh, spec, shape=(8, 16)), host)
    for dtype in DTYPES:
        host = values((8, 16), dtype)
        assert_holds(iso.from_local(part_of(host, mesh, P("y")), mesh, P("y")), host)


def check_from_local_shares(world):
    mesh = meshes()[0]
    host = values((4 // world.size * 16, 16), np.float32, world.rank)
    iso.metrics.reset()
    array = iso.from_local(host, mesh, P(("x", "y")), copy=False)
    assert array.shape == (64, 16)
    pointers = [p.data.unsafe_buffer_pointer() for p in iso.local_shards(array)]
    assert pointers == [host.ctypes.data + 1024 * n for n in range(len(pointers))]
    assert counted("copies") == 0
    own = iso.from_local(host, mesh, P(("x", "y")), copy=True)
    assert counted("copied_bytes") == host.nbytes
    whole = np.asarray(iso.full(own))
    parts = [values(host.shape, np.float32, rank) for rank in range(world.size)]
    assert bits(whole) == bits(np.concatenate(parts))


def check_from_local_trees(world):
    import torch

    mesh = meshes()[0]
    host = {"a": values((8, 16), np.float32), "b": [values((16,), np.int32)]}
    specs = {"a": P("x"), "b": P("y")}
    part = {"a": part_of(host["a"], mesh, P("x")), "b": [part_of(host["b"][0], mesh, P("y"))]}
    tree = iso.from_local(part, mesh, specs)
    assert_holds(tree["a"], host["a"])
    assert_holds(tree["b"][0], host["b"][0])
    plan = iso.Plan({"a": P("x"), "b.*": P("y")})
    shapes = {"a": (8, 16), "b": [(16,)]}
    assert_holds(iso.from_local(part, mesh, plan, shape=shapes)["b"][0], host["b"][0])
    with raising(iso.errors.SpecError, "a Plan goes by global shapes"):
        iso.from_local(part, mesh, plan)
    mixed = {"a": torch.from_numpy(part["a"]), "b": part["b"]}
    tree = iso.from_local(mixed, mesh, specs)
    assert type(tree["a"]).__name__ == "XLAShardedTensor"
    assert_holds(iso.to_jax(tree["a"]), host["a"])


def check_from_local_refuses(world):
    mesh = meshes()[0]
    host = values((8, 16), np.float32)
    with raising(
        iso.errors.UnevenError, r"w: local shape \(3, 16\).*axis 0 has local size 3.*4 in"
    ):
        iso.from_local(host[:3], mesh, P(("x", "y")), name="w")
    with raising(iso.ShardingError, rf"process {world.rank} has shape .*, which is \[.*iso\.shard"):
        iso.from_local(host, mesh, P(("x", "y")), shape=(8, 16))
    with raising(iso.errors.UnevenError, "no multiple of its 4 shards"):
        iso.from_local(host, mesh, P(("x", "y")), shape=(6, 16))
    with raising(iso.ShardingError, "of another rank"):
        iso.from_local(host, mesh, P("x"), shape=(8, 16, 1))
    array = iso.shard(host, mesh, P("x"))
    with raising(iso.ShardingError, "on devices of several processes already"):
        iso.from_local(array, mesh, P("x"))
    assert iso.from_local({"a": 3}, mesh, P("x")) == {"a": 3}  # no array, so it stays
    with raising(TypeError, "only arrays"):
        iso.from_local("text", mesh, P("x"))
    rows = 8 if world.rank else 16
    with raising(iso.errors.DistributedError, r"(?s)rank 0: .*\(64, 16\)|\(32, 16\).*ranks? 1"):
        iso.from_local(values((rows, 16), np.float32), mesh, P("x"), name="batch")


def check_torch_tensors(world):
    import torch

    mesh = meshes()[0]
    host = values((8, 16), np.int32) % 1000
    source = torch.from_numpy(host.astype(np.float32))
    iso.metrics.reset()
    t = iso.shard(source, mesh, P("x", None))
    assert iso.sharding_of(t).spec == P("x")
    assert_holds(iso.to_jax(t), source.numpy())
    for piece in iso.local_shards(t, framework="torch"):
        assert piece.data.device.type == "cpu"
        assert bits(piece.data.numpy()) == bits(source.numpy()[piece.index])
    u = torch.relu(t * 2 + 1) - torch.ones(16, device="jax")
    want = torch.relu(source * 2 + 1) - 1
    assert_holds(iso.to_jax(iso.reshard(u, mesh, P(None, "y"))), want.numpy())
    u = torch.relu(iso.shard(source, mesh, P(("x", "y"))) * 2 + 1) - 1
    with raising(RuntimeError, r"(?s)other processes.*isoshard\.full.*full_tensor.*local_shards"):
        u.cpu()
    iso.metrics.reset()
    whole = iso.full(u)
    assert counted("gathers") == 1
    assert bits(whole.cpu().numpy()) == bits(want.numpy())
    assert float(u.sum()) == float(want.sum())
    back = iso.to_torch(iso.to_jax(t))
    assert bits(iso.full(back).numpy()) == bits(source.numpy())


def check_torch_from_local(world):
    import torch

    mesh = meshes()[2]
    host = values((8, 16), np.float32)
    part = torch.from_numpy(part_of(host, mesh, P("x")).copy())
    t = iso.from_local(part.requires_grad_(), mesh, P("x"))
    assert t.shape == (8, 16)
    assert t.requires_grad
    assert_holds(iso.to_jax(t.detach()), host)
    local = part.detach().to("jax")
    assert_holds(iso.to_jax(iso.from_local(local, mesh, P("x"))), host)
    with raising(iso.ShardingError, "requires? grad"):
        iso.from_local(part * 2, mesh, P("x"))
    with raising(TypeError, "not a Linear"):
        iso.from_local(torch.nn.Linear(2, 2), mesh, P("x"))


def check_torch_training(world):
    """The recorded programs run in every process: losses and weights as those of torch alone."""
    import torch

    def train(place, steps=3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
        )
        x, y = torch.randn(8, 16), torch.randn(8, 8)
        model, x, y = place(model, x, y)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses, dict(model.named_parameters())

    def sharded(model, x, y):
        plan = iso.Plan({"0.weight": P("y", None), "0.bias": P("y"), "2.weight": P(None, "y")})
        mesh = meshes()[0]
        return iso.shard(model, mesh, plan), iso.shard(x, mesh, P("x")), iso.shard(y, mesh, P("x"))

    losses, weights = train(sharded)
    want, reference = train(lambda *given: given)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    for name, weight in weights.items():
        found = iso.full(weight.detach()).cpu().numpy()
        np.testing.assert_allclose(found, reference[name].detach().numpy(), atol=2e-6)
