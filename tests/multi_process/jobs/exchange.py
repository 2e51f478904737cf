"""Every rank's local tensor is its shard of a global array, and the reverse."""

import gc
import itertools

import isoshard as iso
from tests.calls import calls_of
from tests.multi_process.exchanging import copies, device_mesh, meshes, pointer, raises, whole
from tests.multi_process.jobs import exchange_layouts as layouts


def start():
    iso.distributed.init_distributed(timeout=60)


check_a_storage_of_the_padded_size_is_shared = layouts.check_a_storage_of_the_padded_size_is_shared
check_meshes_whose_ranks_do_not_ascend = layouts.check_meshes_whose_ranks_do_not_ascend
check_other_orders_and_shapes_of_the_mesh = layouts.check_other_orders_and_shapes_of_the_mesh
check_sub_meshes = layouts.check_sub_meshes
check_sums_to_be_taken = layouts.check_sums_to_be_taken
check_uneven_shards = layouts.check_uneven_shards
check_uneven_shards_on_the_jax_device = layouts.check_uneven_shards_on_the_jax_device


def check_every_placement_crosses_without_a_copy(world):
    import numpy as np
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    for mesh in meshes(world):
        options = (Replicate(), Shard(0), Shard(1))
        for placements in itertools.product(options, repeat=mesh.ndim):
            x = distribute_tensor(values, mesh, placements, src_data_rank=None)
            x = type(x).from_local(x.to_local().clone(), mesh, placements)  # memory of its own
            with copies(0):
                array = iso.to_jax(x, copy=False)
                assert pointer(array) == x.to_local().data_ptr()
                back = iso.to_dtensor(array, copy=False)
            assert back.to_local().data_ptr() == x.to_local().data_ptr()
            assert back.placements == x.placements and back.device_mesh == x.device_mesh
            assert back.shape == x.shape and back.stride() == x.stride()
            assert not back.requires_grad
            assert iso.to_dtensor(array, mesh).device_mesh is mesh
            assert array.sharding == iso.sharding_of(x)
            np.testing.assert_array_equal(whole(array), values.numpy())
            assert torch.equal(back.full_tensor(), values)


def check_results_of_jitted_programs_come_back(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = meshes(world)[1]
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    torch.distributed.broadcast(a, 0)
    torch.distributed.broadcast(b, 0)
    left = iso.to_jax(distribute_tensor(a, mesh, (Shard(0), Shard(1))))
    right = iso.to_jax(distribute_tensor(b, mesh, (Shard(0), Shard(1))))
    product = jax.jit(lambda x, y: jnp.tanh(x @ y), out_shardings=left.sharding)(left, right)
    found = iso.to_dtensor(product, mesh, copy=False)
    assert found.to_local().data_ptr() == pointer(product)
    np.testing.assert_allclose(found.full_tensor(), torch.tanh(a @ b), atol=1e-5)
    apart = iso.to_dtensor(product, mesh, copy=True)
    assert apart.to_local().data_ptr() != pointer(product)
    assert torch.equal(apart.full_tensor(), found.full_tensor())


def check_dtypes(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    shared = "bfloat16 float16 float32 bool int8 uint8 int16 uint16 int32 uint32 complex64"
    shared += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
    for name in shared.split():
        dtype = getattr(torch, name)
        raw = (torch.arange(64) % 2).to(torch.uint8) if dtype is torch.bool else torch.arange(64)
        local = raw.to(torch.uint8).view(dtype).clone()
        with copies(0):
            array = iso.to_jax(DTensor.from_local(local, mesh, (Shard(0),)), copy=False)
            back = iso.to_dtensor(array, copy=False)
        assert array.dtype.name == name and pointer(array) == local.data_ptr(), name
        assert back.dtype == dtype and back.to_local().data_ptr() == local.data_ptr(), name
        bits = back.to_local().view(torch.uint8)
        assert torch.equal(bits, local.view(torch.uint8)), name


def check_wide_integers(world):
    import jax
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    x = DTensor.from_local(torch.arange(8) + world.rank, mesh, (Shard(0),))
    with copies(1):
        array = iso.to_jax(x)
    assert array.dtype == "int32" and (whole(array) == x.full_tensor().numpy()).all()
    with raises(iso.errors.CopyError, "int64", "int32", "jax_enable_x64"):
        iso.to_jax(x, copy=False)
    with raises(iso.errors.CopyError, "do not fit"):
        iso.to_jax(DTensor.from_local(torch.full((2,), 2**40), mesh, (Shard(0),)))
    with raises(iso.errors.CopyError, "float64", "precision"):
        iso.to_jax(DTensor.from_local(torch.ones(8, dtype=torch.float64), mesh, (Shard(0),)))
    with jax.enable_x64(True), copies(0):
        for local in (torch.arange(8), torch.ones(8, dtype=torch.float64)):
            array = iso.to_jax(DTensor.from_local(local, mesh, (Shard(0),)), copy=False)
            assert pointer(array) == local.data_ptr()
            assert iso.to_dtensor(array).dtype == local.dtype


def check_what_must_be_copied(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    strided = torch.randn(16, 8).t()
    unaligned = torch.randn(17)[1:]
    conjugated = torch.randn(16, dtype=torch.complex64).conj()
    for local, why in (
        (strided, "contiguous"),
        (unaligned, "64-byte"),
        (conjugated, "conjugated"),
    ):
        x = DTensor.from_local(local, mesh, (Shard(0),))
        with raises(iso.errors.CopyError, why, "copy=None"):
            iso.to_jax(x, copy=False)
        with copies(1):
            array = iso.to_jax(x)
        assert pointer(array) != local.data_ptr()
        assert (whole(array) == x.full_tensor().resolve_conj().numpy()).all()
    local = torch.randn(16)
    x = DTensor.from_local(local, mesh, (Shard(0),))
    with copies(1):
        mine = iso.to_jax(x, copy=True)
    shared = iso.to_jax(x)
    before = whole(mine)
    local.zero_()  # shows where memory is shared, as the module says
    assert (whole(mine) == before).all() and not whole(shared).any()


def check_the_graph_is_not_cut(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    leaf = torch.nn.Parameter(DTensor.from_local(torch.ones(16), mesh, (Shard(0),)))
    assert pointer(iso.to_jax(leaf, copy=False)) == leaf.to_local().data_ptr()
    with raises(iso.errors.CopyError, "torch_function", "detach"):
        iso.to_jax(leaf * 2)
    iso.to_jax((leaf * 2).detach())


def check_memory_outlives_either_side(world):
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    local = torch.full((1 << 20,), 7.0)
    x = DTensor.from_local(local, mesh, (Shard(0),))
    array = iso.to_jax(x)
    del local, x
    gc.collect()
    filler = [torch.zeros(1 << 20) for _ in range(8)]
    piece = np.asarray(array.addressable_data(0))
    assert (piece == 7.0).all()
    back = iso.to_dtensor(array)
    del array, piece, filler
    gc.collect()
    filler = [torch.zeros(1 << 20) for _ in range(8)]
    assert (back.to_local() == 7.0).all(), len(filler)


def check_donation_leaves_torch_alone(world):
    import jax
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    local = torch.ones(1024)
    array = iso.to_jax(DTensor.from_local(local, mesh, (Shard(0),)))
    doubled = jax.jit(lambda a: a * 2, donate_argnums=0)(array)
    doubled.block_until_ready()
    assert (local == 1).all() and array.is_deleted()
    kept = iso.to_dtensor(doubled)
    jax.jit(lambda a: a * 2, donate_argnums=0)(doubled).block_until_ready()
    assert (kept.to_local() == 2).all()


def check_trees_and_faults(world):
    import jax
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    tree = {
        "a": DTensor.from_local(torch.ones(16), mesh, (Shard(0),)),
        "b": [DTensor.from_local(torch.ones(16, 2), mesh, (Shard(0),))],
    }
    arrays = iso.to_jax(tree)
    back = iso.to_dtensor(arrays)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert old.to_local().data_ptr() == new.to_local().data_ptr()
    with raises(TypeError, "b.0 is str"):
        iso.to_dtensor({"a": arrays["a"], "b": ["x"]})
    alone = jax.numpy.ones(3)
    with raises(iso.ShardingError, "2 leaves", "x:", "y:", "iso.shard"):
        iso.to_dtensor({"x": alone, "y": alone, "z": arrays["a"]})
    with raises(iso.ShardingError, "traced"):
        jax.jit(iso.to_dtensor)(arrays["a"])
    with raises(iso.ShardingError, "iso.reshard", "iso.to_jax"):
        iso.shard(tree["a"], iso.sharding_of(tree["a"]).mesh, iso.P())


def check_core_verbs(world):
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = device_mesh(world.size, names=("x",))
    values = torch.arange(32.0).reshape(8, 4)
    x = distribute_tensor(values, mesh, (Shard(0),), src_data_rank=None)
    assert iso.sharding_of(x).spec == iso.P("x")
    (piece,) = iso.local_shards(x, framework="torch")
    (same,) = iso.local_shards(x)
    assert same.index == piece.index and same.data.unsafe_buffer_pointer() == piece.data.data_ptr()
    rows = 8 // world.size
    assert piece.index == (slice(world.rank * rows, (world.rank + 1) * rows), slice(None))
    assert piece.replica_id == 0 and piece.data.data_ptr() == x.to_local().data_ptr()
    (copy,) = iso.local_shards(iso.reshard(x, iso.P()), framework="torch")
    assert copy.replica_id == world.rank and torch.equal(copy.data, values)
    assert "x=" in iso.visualize(x)
    turned = iso.reshard(x, iso.P(None, "x"))
    assert turned.placements == (Shard(1),) and torch.equal(turned.full_tensor(), values)
    before = iso.metrics.counters()["gathers"]
    assert iso.full(x).placements == (Replicate(),)
    assert iso.metrics.counters()["gathers"] == before + 1


def check_a_wrong_local_tensor_is_refused(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    sizes = [1] * (world.size - 1) + [world.size + 1]  # no chunks of 2 * size rows
    x = DTensor.from_local(
        torch.ones(sizes[world.rank], 4),
        mesh,
        (Shard(0),),
        shape=torch.Size((2 * world.size, 4)),
        stride=(4, 1),
    )
    with raises((iso.ShardingError, iso.errors.DistributedError), "torch.chunk"):
        iso.to_jax(x)


def check_ranks_that_differ(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    odd = torch.ones(16, 3 + (world.rank == 1))
    with raises(
        iso.errors.DistributedError, "rank 1", "(16" if world.size == 1 else "do not agree"
    ):
        iso.to_jax(DTensor.from_local(odd, mesh, (Shard(0),)))
    iso.to_jax(DTensor.from_local(torch.ones(16, 5), mesh, (Shard(0),)))  # life goes on


def check_cost_is_small_and_does_not_depend_on_size(world):
    """In calls, as time depends on the machine: `benchmarks/dtensor.py` has the microseconds."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    found = {}
    for size in (1 << 10, 1 << 24):  # 4 KiB, 64 MiB
        x = DTensor.from_local(torch.zeros(size), mesh, (Shard(0),))
        array = iso.to_jax(x)
        there = calls_of(lambda x=x: iso.to_jax(x))
        found[size * 4] = there, calls_of(lambda array=array: iso.to_dtensor(array, mesh))
    small, large = found.values()
    for few, many in zip(small, large, strict=True):
        assert many <= few < 1000, found
