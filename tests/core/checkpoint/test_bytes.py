"""How much is read: each device's share and little else, onto whatever mesh."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.checkpoint import opened
from isoshard.core.checkpoint.source import Block
from isoshard.core.checkpoint.stored_shards import bounded

SHAPES = {
    "up": (512, 2048),
    "down": (2048, 512),
    "norm": (512,),
    "bias": (2048,),
    "heads": (8, 512, 96),
    "tok": (3072, 512),
}
SAVED = {
    "up": P("x", "y"),
    "down": P("y", "x"),
    "bias": P("y"),
    "heads": P("x", "y"),
    "tok": P(("x", "y")),
}
MESHES = {
    (4, 2): {**SAVED, "norm": P()},
    (8, 1): {name: P("x") for name in SHAPES},
    (1, 8): {"up": P("y"), "down": P(None, "y"), "tok": P("y"), "heads": P(None, "y")},
    (3, 2): {"up": P(None, "y"), "tok": P("x", "y"), "heads": P(None, None, "x"), "down": P("y")},
}


def tree():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_rea")
    return sum(value["value"] for metric in found for value in metric["values"])


def read_by_the_process():
    """What the operating system has counted, which sees every read of every thread."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("shape", "saved_on"),
    [((4, 2), None), ((8, 1), (2, 4)), ((1, 8), None), ((3, 2), (2, 4))],
    ids=str,
)
def test_each_device_reads_its_shards_and_a_tenth_more_at_most(tmp_path, shape, saved_on):
    values = tree()
    placed = values
    if saved_on:
        mesh = iso.make_mesh(saved_on, ("x", "y"))
        placed = {name: iso.shard(a, mesh, SAVED.get(name, P())) for name, a in values.items()}
    iso.save(tmp_path, placed)
    mesh = iso.make_mesh(shape, ("x", "y"), devices=jax.devices()[: shape[0] * shape[1]])
    specs = MESHES[shape]
    source = opened(tmp_path)
    for device in mesh.devices.flat:
        blocks = []
        for name, a in values.items():
            sharding = NamedSharding(mesh, specs.get(name, P()))
            index = bounded(sharding.devices_indices_map(a.shape)[device], a.shape)
            blocks.append(Block(name, index, np.empty_like(a[index])))
        before, seen = bytes_read(), read_by_the_process()
        source.read(blocks)
        read, also = bytes_read() - before, read_by_the_process() - seen
        mine = sum(block.out.nbytes for block in blocks)
        assert mine <= read <= 1.1 * mine
        assert read <= also <= read + (16 << 10)  # the reading of /proc is in it
        for block in blocks:
            assert block.out.tobytes() == values[block.name][block.index].tobytes()


def test_a_process_reads_a_block_once_for_all_its_devices(tmp_path):
    values = tree()
    iso.save(tmp_path, values)
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    before = read_by_the_process()
    found = iso.restore(
        tmp_path,
        {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in values.items()},
        mesh=mesh,
        plan=P("x"),
    )
    read = read_by_the_process() - before
    total = sum(a.nbytes for a in values.values())
    assert total <= read <= 1.05 * total
    assert all(found[name].tobytes() == a.tobytes() for name, a in values.items())


def test_what_is_not_wanted_is_not_read(tmp_path):
    values = tree()
    iso.save(tmp_path, values)
    before = read_by_the_process()
    iso.restore(tmp_path, {"norm": np.zeros(512, np.float32)}, partial=True)
    assert read_by_the_process() - before < 32 << 10
