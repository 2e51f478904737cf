"""What a message may say, what it may not, and how the error is told."""

import pytest

from isoshard.core.layout.tiles import Tiles
from isoshard.onnx_bridge import AnnotationError
from isoshard.onnx_bridge.layouts.tiling import read_tiles, replicate_axes, uneven_axes
from tests.onnx_bridge.models import spec

TWO = "sharded_dim { axis: 0 simple_sharding { num_shards: 2 } }"
GROUPS = "index_to_device_group_map { key: -1 value: [0, 1] } "


def fused(*parts):
    """Axis 0, fused of several: pairs of size (or None) and number of shards."""
    inner = " ".join(
        "simple_sharding { "
        + (f"dim_value: {size} " if size is not None else "")
        + f"num_shards: {n} }}"
        for size, n in parts
    )
    return f"sharded_dim {{ axis: 0 {inner} }}"


@pytest.mark.parametrize(
    ("text", "shape", "devices", "expected"),
    [
        (TWO, (4,), 2, [[0], [1]]),  # no devices, as many as shards
        ("device: [2, 0]", (4,), 4, [[0, 2]]),  # one shard, several devices: copies
        (
            "device: [0, -1] index_to_device_group_map { key: -1 value: [1, 2] }",
            (4,),
            3,
            [[0, 1, 2]],
        ),
        ("device: [3]", (4,), 4, [[3]]),
        ("device: [7] index_to_device_group_map { key: 7 value: [0, 1] }", (4,), 2, [[0, 1]]),
        (
            "device: [0, 1] sharded_dim { axis: -1 simple_sharding { num_shards: 2 } }",
            (4,),
            2,
            [[0], [1]],
        ),
        ("device: [0, 1, 2, 3] " + fused((2, 2), (6, 2)), (12,), 4, [[0], [1], [2], [3]]),
        ("device: [0, 1] " + fused((1, 1), (6, 2)), (6,), 2, [[0], [1]]),
        ("device: [0, 1] " + fused((None, 2), (6, 1)), (12,), 2, [[0], [1]]),
    ],
)
def test_what_the_specification_leaves_open(text, shape, devices, expected):
    assert read_tiles(spec(text), shape, devices) == Tiles(expected, num_devices=devices)


def test_a_rank_that_is_not_known():
    text = "device: [0, 1] sharded_dim { axis: 1 simple_sharding { num_shards: 2 } }"
    assert read_tiles(spec(text)).blocks == (1, 2)


@pytest.mark.parametrize(("text", "match"), [
    ("device: [0, 1, 2] " + TWO, r"lists 3 devices or groups for 2 shards"),
    ("device: [0, 0] " + TWO, r"device 0 is named 2 times.*The devices are 0\.\.3"),
    ("device: [0, 9] " + TWO, r"there is no device 9"),
    ("device: [0, -7] " + TWO, r"-7 is neither a device nor a key of the map"),
    ("device: [-1, 2] " + GROUPS + TWO, r"groups of 2, 1 devices.*make the groups equal"),
    ("device: [-1, 1] " + GROUPS + TWO, r"device 1 is named 2 times"),
    (GROUPS + GROUPS + "device: [-1]", r"one key twice"),
    ("device: [-1] index_to_device_group_map { key: -1 }", r"groups is empty"),
    ("", r"lists 0 devices or groups for 1 shards"),
    ("sharded_dim { axis: 0 simple_sharding { num_shards: 8 } }", r"0 devices .* 8 shards"),
])  # fmt: skip
def test_faults_of_devices(text, match):
    with pytest.raises(AnnotationError, match=rf"^tensor 'w': .*{match}"):
        read_tiles(spec('tensor_name: "w" ' + text), (4, 4), 4)


@pytest.mark.parametrize(("text", "axis", "match"), [
    ("sharded_dim { axis: 7 simple_sharding { num_shards: 2 } }", 7, "has rank 2"),
    ("sharded_dim { axis: -3 simple_sharding { num_shards: 2 } }", -3, "has rank 2"),
    (TWO + TWO, 0, "listed twice"),
    ("sharded_dim { axis: 1 }", 1, "has no num_shards"),
    ("sharded_dim { axis: 1 simple_sharding { } }", 1, "num_shards is 0"),
    ("sharded_dim { axis: 1 simple_sharding { num_shards: -2 } }", 1, "num_shards is -2"),
    (fused((6, 2)), 0, "dim_value is 6, the tensor's size 4"),
    (fused((2, 1), (2, 2)), 0, r"2 x 2 fused, split 1 x 2: .*not contiguous.*before the Reshape"),
    (fused((None, 2), (2, 2)), 0, r"\? x 2 fused"),
])  # fmt: skip
def test_faults_of_axes_name_the_axis(text, axis, match):
    with pytest.raises(AnnotationError, match=match) as caught:
        read_tiles(spec('tensor_name: "w" device: [0, 1] ' + text), (4, 4), 4)
    assert (caught.value.tensor, caught.value.axis) == ("w", axis)


def test_an_axis_from_the_end_needs_a_rank():
    text = 'tensor_name: "w" sharded_dim { axis: -1 simple_sharding { num_shards: 2 } }'
    with pytest.raises(AnnotationError, match="rank of the tensor is not known"):
        read_tiles(spec(text))
    with pytest.raises(AnnotationError, match="names no axis"):
        read_tiles(spec("sharded_dim { simple_sharding { num_shards: 2 } }"))


@pytest.mark.parametrize("text", [
    "sharded_dim { axis: 0 simple_sharding { num_shards: 4611686018427387904 } }",
    "device: [0, 1] sharded_dim { axis: 4611686018427387904 simple_sharding { num_shards: 2 }}",
    "device: [0, 1] " + fused((1 << 62, 1 << 62), (1 << 62, 1 << 62)),
])  # fmt: skip
def test_gigantic_numbers_are_refused_at_once(text):
    with pytest.raises(AnnotationError):
        read_tiles(spec(text))


def test_axes_left_whole():
    tiles = Tiles([[[0], [1]], [[2], [3]]])
    assert uneven_axes(tiles, (3, "n")) == [0]
    assert replicate_axes(tiles, [0]) == Tiles([[[0, 2], [1, 3]]])
    assert replicate_axes(tiles, [0, 1]) == Tiles.replicated(2, 4)
