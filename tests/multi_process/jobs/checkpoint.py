"""One checkpoint of several processes: written together, read by each its own part."""

import isoshard as iso
from tests.multi_process.exchanging import raises
from tests.multi_process.jobs.fsdp import batches, plain, sharded, start, torch_steps

__all__ = ["start"]


def check_arrays(world):
    import jax
    import numpy as np

    folder = world.scratch / "arrays"
    mesh = iso.make_mesh((world.size,), ("x",))
    values = {
        "w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64),
        "whole": np.arange(4096.0, dtype=np.float32),
        "small": np.arange(8, dtype=np.int32),
        "host": np.arange(1024.0),
    }
    specs = {"w": iso.P("x"), "whole": iso.P(), "small": iso.P("x")}
    placed = {name: iso.shard(values[name], mesh, spec) for name, spec in specs.items()}
    local = jax.numpy.float32(7)  # each process has its own
    tree = {**placed, "host": values["host"], "local": local, "n": 3}
    iso.save(folder, tree)
    turned = iso.NamedSharding(mesh, iso.P(None, "x"))
    like = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in placed.items()}
    like["w"] = jax.ShapeDtypeStruct((64, 64), "float32", sharding=turned)
    found = iso.restore(folder, {**like, "host": values["host"], "local": local, "n": 0}, mesh=None)
    assert found["w"].sharding == turned and found["n"] == 3 and float(found["local"]) == 7
    for shard in found["w"].addressable_shards:
        assert (np.asarray(shard.data) == values["w"][shard.index]).all()
    for name in ("whole", "small", "host"):
        assert (np.asarray(found[name]) == values[name]).all()
    files = {path.name for path in folder.rglob("c.*")}
    assert {f"c.{rank}.0" for rank in range(world.size)} <= files
    saving = iso.save(folder, {**tree, "n": 4}, asynchronous=True)
    saving.wait()
    assert iso.restore(folder, {"n": 0}, partial=True)["n"] == 4


def check_blocks(world):
    import jax
    import numpy as np

    folder = world.scratch / "blocks"
    mesh = iso.make_mesh((world.size,), ("x",))
    values = np.arange(40 * 64, dtype=np.float32).reshape(40, 64)

    def laid(values, sizes):
        return iso.shard(values, mesh, iso.P("x"), uneven="pad", sizes={0: sizes})

    one = (1, *[13] * (world.size - 2), 39 - 13 * (world.size - 2))  # files have several owners
    other = (*[0] * (world.size - 2), 33, 7)
    for number, (first, then) in enumerate([(one, other), (other, one)]):
        iso.save(folder, {"w": laid(values + number, first), "few": laid(values[:, 0], first)})
        like = {"w": laid(values * 0, then), "few": laid(values[:, 0] * 0, first)}
        found = iso.restore(folder, like)
        for name, wanted in (("w", values + number), ("few", values[:, 0])):
            assert found[name].sizes == like[name].sizes
            for shard in iso.local_shards(found[name]):
                assert (np.asarray(shard.data) == wanted[shard.index]).all(), (name, number)
        even = jax.ShapeDtypeStruct(
            values.shape, values.dtype, sharding=iso.NamedSharding(mesh, iso.P("x"))
        )
        found = iso.restore(folder, {"w": even}, partial=True)["w"]
        for shard in found.addressable_shards:
            assert (np.asarray(shard.data) == (values + number)[shard.index]).all()
    assert not [path for path in folder.rglob("*") if "lock" in path.name]


def check_a_file_that_is_missing_is_told_in_every_process(world):
    import numpy as np
    import torch.distributed as dist

    folder = world.scratch / "damaged"
    mesh = iso.make_mesh((world.size,), ("x",))
    w = iso.shard(np.arange(64 * 64, dtype=np.float32).reshape(64, 64), mesh, iso.P("x"))
    for step in (1, 2):
        iso.save(folder, {"w": w}, step=step)
    dist.barrier()
    if world.rank == 0:
        sorted((folder / "2").rglob("c.*"))[-1].unlink()
    dist.barrier()
    try:
        iso.restore(folder, {"w": w})
    except iso.CheckpointError as error:  # though one of them alone has looked at that file
        assert "is damaged" in str(error) and "is missing" in str(error), error
        assert "The folder also has checkpoints of other steps: 1" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    assert iso.restore(folder, {"w": w}, step=1)["w"].sharding == w.sharding


def check_uneven_dtensors(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = world.scratch / "uneven_dtensors"
    mesh = init_device_mesh("cpu", (world.size,))
    weight = torch.arange(9.0 * 33).reshape(9, 33)

    def module(values):
        made = torch.nn.Linear(33, 9, bias=False)
        made.weight = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
        return made

    saved = module(weight)
    optimizer = torch.optim.SGD(saved.named_parameters(), lr=0.5, momentum=0.9)
    saved.weight.sum().backward()
    optimizer.step()
    iso.save(folder, {"model": saved, "optimizer": optimizer, "bare": saved.weight})
    again = module(weight * 0)
    fresh = torch.optim.SGD(again.named_parameters(), lr=0.1, momentum=0.9)
    like = {"model": again, "optimizer": fresh}
    iso.restore(folder, like, partial=True)
    assert torch.equal(again.weight.to_local(), saved.weight.to_local())
    moment = fresh.state[again.weight]["momentum_buffer"]
    assert moment.placements == again.weight.placements
    kept = optimizer.state[saved.weight]["momentum_buffer"]
    assert torch.equal(moment.full_tensor(), kept.full_tensor())
    whole = iso.restore(folder, {"bare": torch.zeros(9, 33)}, partial=True)["bare"]
    assert torch.equal(whole, saved.weight.full_tensor())


def check_fsdp(world):
    import torch

    folder = world.scratch / "fsdp"
    given = batches(world)
    model = sharded()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    torch_steps(model, optimizer, given[:3], world)
    iso.save(folder, {"model": model, "optimizer": optimizer})
    expected = torch_steps(model, optimizer, given[3:6], world)

    again = sharded()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    fresh = torch.optim.AdamW(again.named_parameters(), lr=1.0)
    iso.restore(folder, {"model": again, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] == 1e-2
    assert torch_steps(again, fresh, given[3:6], world) == expected

    alone = plain()
    names = {name for name, _ in alone.named_parameters()}
    iso.restore(folder, {"model": alone}, partial=True)
    iso.save(folder, {"model": alone}, step=1)  # plain tensors: the first process writes them
    iso.restore(folder, {"model": again}, step=1)
    full = {name: iso.full(parameter).to_local() for name, parameter in again.named_parameters()}
    assert full.keys() == names
    for name, parameter in alone.named_parameters():
        assert torch.equal(full[name], parameter)


def check_fsdp_over_tensor_parallelism(world):
    """Parameters that tensor parallelism left alone lie on a slice of the mesh of the others."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))

    def made():
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # and "4" whole
        model = parallelize_module(plain(), mesh["tp"], styles)
        model = fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.named_parameters(), lr=1e-2)

    folder = world.scratch / "both"
    model, optimizer = made()
    torch.manual_seed(1)
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    iso.save(folder, {"model": model, "optimizer": optimizer})
    again, fresh = made()  # whose optimizer has no state yet
    iso.restore(folder, {"model": again, "optimizer": fresh})
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            kept, found = optimizer.state[one][kind], fresh.state[other][kind]
            assert found.placements == other.placements == kept.placements
            assert torch.equal(found.to_local(), kept.to_local()), kind
        assert torch.equal(fresh.state[other]["step"], optimizer.state[one]["step"])


def check_storage(world):
    folder = world.scratch / "storage"
    found = iso.checkpoint.check_storage(folder, 10**6)
    assert found.needed == 3 * 10**6 and found.rate > 0
    with raises(iso.CheckpointError, "of 931.3 GiB (keep=2", "free there"):
        iso.checkpoint.check_storage(folder, 10**12)
    with raises(
        iso.CheckpointError,
        "rank 1: CheckpointError"
        if world.rank != 1
        else "not the folder that the first process writes to",
    ):
        iso.checkpoint.check_storage(folder.with_name(f"own{world.rank == 1}"), 10**6)
    assert [*folder.iterdir()] == []


def check_faults(world):
    import numpy as np

    from isoshard.core.checkpoint import zarr_format

    folder = world.scratch / "faults"
    mesh = iso.make_mesh((world.size,), ("x",))
    w = iso.shard(np.ones((64, 64), np.float32), mesh, iso.P("x"))
    iso.save(folder, {"w": w, "n": 1})
    real = zarr_format.write_arrays

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        zarr_format.write_arrays = refuse
    try:
        kind = OSError if world.rank == 1 else iso.CheckpointError
        with raises(kind, "No space left"):
            iso.save(folder, {"w": w, "n": 2})
    finally:
        zarr_format.write_arrays = real
    assert iso.restore(folder, {"n": 0}, partial=True)["n"] == 1
    with raises(iso.errors.DistributedError, "the ranks do not agree"):
        iso.save(folder, {"w": w, "n": 2, **({"more": 1} if world.rank else {})})
    iso.save(folder, {"w": w, "n": 3})
    assert iso.restore(folder, {"n": 0}, partial=True)["n"] == 3
    assert [path.name for path in folder.iterdir()] == ["0"]
