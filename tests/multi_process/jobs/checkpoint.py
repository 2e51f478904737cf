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


def check_faults(world):
    import numpy as np

    from isoshard.jax_bridge.checkpoint import zarr

    folder = world.scratch / "faults"
    mesh = iso.make_mesh((world.size,), ("x",))
    w = iso.shard(np.ones((64, 64), np.float32), mesh, iso.P("x"))
    iso.save(folder, {"w": w, "n": 1})
    real = zarr.write

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        zarr.write = refuse
    try:
        kind = OSError if world.rank == 1 else iso.CheckpointError
        with raises(kind, "No space left"):
            iso.save(folder, {"w": w, "n": 2})
    finally:
        zarr.write = real
    assert iso.restore(folder, {"n": 0}, partial=True)["n"] == 1
    with raises(iso.DistributedError, "the ranks do not agree"):
        iso.save(folder, {"w": w, "n": 2, **({"more": 1} if world.rank else {})})
    iso.save(folder, {"w": w, "n": 3})
    assert iso.restore(folder, {"n": 0}, partial=True)["n"] == 3
    assert [path.name for path in folder.iterdir()] == ["0"]
