"""Exchange, where shards are uneven, sums, or on meshes of another order: part of `exchange`."""

import isoshard as iso
from tests.multi_process.exchanging import copies, device_mesh, meshes, pointer, raises, whole


def check_uneven_shards(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    for mesh in meshes(world):
        for shape, placements in (
            ((5, 3), (Shard(0),) * mesh.ndim),
            ((3, 5), (Shard(1),) * mesh.ndim),
            ((5, 7), (Shard(0), Shard(1))[: mesh.ndim]),
            ((1, 4), (Shard(0),) * mesh.ndim),  # most ranks hold nothing
        ):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
            x = distribute_tensor(values, mesh, placements, src_data_rank=None)
            local = x.to_local()
            array = iso.to_jax(x)
            assert isinstance(array, iso.UnevenArray)
            assert array.shape == shape and (whole(array) == values.numpy()).all()
            back = iso.to_dtensor(array, copy=False)
            assert back.to_local().shape == local.shape and back.placements == x.placements
            assert torch.equal(back.full_tensor(), values)
            short = tuple(local.shape) != array.array.sharding.shard_shape(array.array.shape)
            own = DTensor.from_local(
                local.clone(), mesh, placements, shape=x.shape, stride=x.stride()
            )
            if short:
                with raises(iso.errors.CopyError, "must be padded"):
                    iso.to_jax(own, copy=False)
            else:
                iso.to_jax(own, copy=False)


def check_uneven_shards_on_the_jax_device(world):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    values = torch.randn((2 * world.size - 1, 3), generator=torch.Generator().manual_seed(6))
    x = distribute_tensor(values, device_mesh(world.size), (Shard(0),), src_data_rank=None)
    array = iso.to_jax(x)
    with copies(0):
        t = iso.to_torch(array)
        assert iso.to_jax(t).array is array.array
    assert t.block_sizes == array.sizes
    y = t.softmax(0).sort(0).values * 2
    back = iso.to_dtensor(iso.to_jax(y))
    assert back.placements == x.placements
    assert torch.allclose(back.full_tensor(), values.softmax(0).sort(0).values * 2, atol=1e-6)
    (shard,) = t.local_shards
    assert torch.equal(shard.data, x.to_local())
    sizes = tuple(3 * (rank % 2) for rank in range(world.size))
    mesh = iso.sharding_of(t).mesh
    z = iso.shard(values[: sum(sizes)], mesh, (0,), uneven="pad", sizes=(sizes, None))
    assert [len(piece.data) for piece in z.local_shards] == [sizes[world.rank]]
    assert torch.equal(iso.full(z).cpu(), values[: sum(sizes)])
    with raises(RuntimeError, "other processes"):
        z.cpu()


def check_a_storage_of_the_padded_size_is_shared(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = device_mesh(world.size)
    rows = 2 * world.size - 1
    mine = 1 if world.rank == world.size - 1 else 2
    storage = torch.full((2, 16), float(world.rank))
    x = DTensor.from_local(
        storage[:mine], mesh, (Shard(0),), shape=torch.Size((rows, 16)), stride=(16, 1)
    )
    with copies(0):
        array = iso.to_jax(x, copy=False)
        back = iso.to_dtensor(array)
    assert pointer(array) == back.to_local().data_ptr() == storage.data_ptr()
    assert (whole(array)[:, 0] == [r for r in range(world.size) for _ in range(2)][:rows]).all()


def check_sums_to_be_taken(world):
    import jax
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for mesh in meshes(world):
        placements = (Partial(), Shard(0))[: mesh.ndim]
        local = torch.arange(16.0).reshape(4, 4) * (world.rank + 1)
        x = DTensor.from_local(local, mesh, placements)
        with copies(0):
            array = iso.to_jax(x, copy=False)
        assert pointer(array) == local.data_ptr()
        assert array.sharding.spec.unreduced == {array.sharding.mesh.axis_names[0]}
        back = iso.to_dtensor(array)
        assert back.placements == placements and back.to_local().data_ptr() == local.data_ptr()
        expected = x.full_tensor().numpy()
        summed = jax.sharding.reshard(array, jax.NamedSharding(array.sharding.mesh, iso.P()))
        np.testing.assert_array_equal(summed.addressable_data(0), expected)
        np.testing.assert_array_equal(iso.full(array).addressable_data(0), expected)
        for holder in (x, array):
            with raises(iso.errors.UnrepresentableError, "is unreduced over", "has a term"):
                iso.local_shards(holder)
        reduced = iso.to_jax(x, reduce=True)
        assert not getattr(reduced.sharding.spec, "unreduced", None)
        np.testing.assert_array_equal(whole(reduced), expected)
    for op in ("avg", "min", "max", "product"):
        x = DTensor.from_local(torch.ones(4), device_mesh(world.size), (Partial(op),))
        with raises(iso.errors.UnrepresentableError, op, "reduce"):
            iso.to_jax(x)
        if op != "product":  # gloo's DTensor has no product
            same = whole(iso.to_jax(x, reduce=True))
            assert (same == x.redistribute(placements=[Replicate()]).to_local().numpy()).all()


def check_other_orders_and_shapes_of_the_mesh(world):
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(7))
    ranks = [0, 2, 1, 3] if world.size == 4 else [0, 1]
    odd = device_mesh(2, world.size // 2, ranks=ranks, names=("a", "b"))
    flat = device_mesh(world.size)
    x = distribute_tensor(values, odd, (Shard(0), Shard(1)), src_data_rank=None)
    array = iso.to_jax(x)
    assert [d.process_index for d in array.sharding.mesh.devices.flat] == ranks
    assert (whole(array) == values.numpy()).all() and torch.equal(x.full_tensor(), values)
    assert iso.to_dtensor(array).device_mesh == odd
    rows = iso.to_jax(distribute_tensor(values, odd, (Shard(0), Shard(0)), src_data_rank=None))
    assert (whole(rows) == values.numpy()).all()
    if world.size == 4:
        with raises(iso.errors.UnrepresentableError, "reshard"):
            iso.to_dtensor(rows, flat)
    same = distribute_tensor(values, odd, (Replicate(), Replicate()), src_data_rank=None)
    anywhere = iso.to_dtensor(iso.to_jax(same), flat)
    assert anywhere.placements == (Replicate(),) and torch.equal(anywhere.to_local(), values)


def check_meshes_whose_ranks_do_not_ascend(world):
    """Torch splits by place there and gathers by rank, so its own tensors come back in disorder."""
    import jax
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    values = torch.arange(16.0).reshape(8, 2)
    odd = device_mesh(world.size, ranks=[*reversed(range(world.size))], names=("x",))
    x = distribute_tensor(values, odd, (Shard(0),), src_data_rank=None)
    assert not torch.equal(x.full_tensor(), values)
    told = "do not ascend", "along its dimension 'x'", f"as {list(range(world.size))}"
    with raises(iso.errors.UnrepresentableError, *told):
        iso.to_jax(x)
    with raises(iso.errors.UnrepresentableError, *told):
        iso.torch_function(jax.numpy.cumsum)(x)
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("x",))
    array = iso.shard(values.numpy(), mesh, iso.P("x"))
    assert (whole(array) == values.numpy()).all()  # JAX goes by the place alone
    for given in (None, odd):
        with raises(iso.errors.UnrepresentableError, *told):
            iso.to_dtensor(array, given)
    if world.size == 4:
        square = device_mesh(2, 2, ranks=[3, 0, 2, 1], names=("a", "b"))
        y = DTensor.from_local(torch.ones(2), square, (Shard(0), Shard(0)))
        with raises(
            iso.errors.UnrepresentableError, "[3, 2] along its dimension 'a'", "as [[0, 2], [1, 3]]"
        ):
            iso.to_jax(y)


def check_sub_meshes(world):
    import jax
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    inner = device_mesh(world.size // 2)
    values = torch.arange(16.0).reshape(4, 4)
    x = distribute_tensor(values, inner, (Shard(0),), src_data_rank=None)
    array = iso.to_jax(x)
    assert array.shape == (4, 4) and array.dtype == "float32"
    inside = world.rank < world.size // 2
    assert len(array.addressable_shards) == len(iso.local_shards(x)) == inside
    back = iso.to_dtensor(array, inner)
    assert back.shape == (4, 4) and back.device_mesh == inner
    assert back.to_local().shape == ((8 // world.size, 4) if inside else (0,))
    if inside:
        assert back.to_local().data_ptr() == x.to_local().data_ptr()
        total = jax.jit(lambda a: a.sum())(array)
        assert float(total.addressable_data(0)) == 120.0
    torch.distributed.barrier()
