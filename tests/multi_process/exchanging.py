"""What jobs about DTensors and global arrays share."""

import contextlib

import isoshard as iso


@contextlib.contextmanager
def copies(expected):
    """That many buffers are copied between the frameworks."""
    before = iso.metrics.counters()["copies"]
    yield
    assert iso.metrics.counters()["copies"] - before == expected


@contextlib.contextmanager
def raises(kind, *parts):
    """An error of that class whose message has these parts, in every rank."""
    try:
        yield
    except kind as error:
        assert all(part in str(error) for part in parts), str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def device_mesh(*shape, names=None, ranks=None):
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(torch.tensor(shape).prod().item()) if ranks is None else ranks
    return DeviceMesh("cpu", torch.as_tensor(ranks).reshape(shape), mesh_dim_names=names)


def meshes(world):
    shapes = [(world.size,), (2, world.size // 2)]
    return [device_mesh(*shape) for shape in shapes]


def pointer(array):
    inner = array.array if isinstance(array, iso.UnevenArray) else array
    return inner.addressable_data(0).unsafe_buffer_pointer()


def whole(array):
    """The values, gathered by a jitted program."""
    import jax
    import numpy as np

    inner, keep = array, None
    if isinstance(array, iso.UnevenArray):
        inner, keep = array.array, array.sizes
    everywhere = jax.NamedSharding(inner.sharding.mesh, iso.P())
    found = np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(inner).addressable_data(0))
    for axis, sizes in enumerate(keep or ()):
        if sizes is not None:
            block = found.shape[axis] // len(sizes)
            at = [b * block + n for b, size in enumerate(sizes) for n in range(size)]
            found = found.take(at, axis)
    return found
