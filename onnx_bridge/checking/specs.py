"""Whether one ShardingSpecProto makes sense for its tensor, whatever the operator.

Source: onnx.in.proto and docs/IR.md of onnx; where they are silent, docs/onnx.md says how it is
read here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx

from .placement import expand

Dims = Sequence[int | str | None]


class SpecProblem(NamedTuple):
    """What is wrong with a spec.

    Attributes:
        rule: its name.
        message: in words.
        axis: of the tensor, if the error lies with one.
    """

    rule: str
    message: str
    axis: int | None = None


def spec_problems(
    spec: onnx.ShardingSpecProto, shape: Dims | None, num_devices: int
) -> Iterator[SpecProblem]:
    """Look at one spec."""
    yield from _axes(spec, shape)
    yield from _groups(spec)
    yield from _devices(spec, num_devices)
    for dim in spec.sharded_dim:
        yield from _shards(dim, shape)
    yield from _fit(spec, num_devices)


def _axes(spec: onnx.ShardingSpecProto, shape: Dims | None) -> Iterator[SpecProblem]:
    rank = None if shape is None else len(shape)
    axes = []
    for dim in spec.sharded_dim:
        if not dim.HasField("axis"):
            yield SpecProblem(
                "structure.axis-missing", "a split does not say which axis: set `axis`"
            )
        elif rank is not None and not -rank <= dim.axis < rank:
            valid_axes = f"axes -{rank} to {rank - 1}" if rank else "no axes"
            yield SpecProblem("structure.axis-range", f"the tensor has {valid_axes}", dim.axis)
        else:
            axes.append(dim.axis % rank if rank else dim.axis)
    for axis, count in Counter(axes).items():
        if count > 1:
            yield SpecProblem(
                "structure.axis-twice", f"it is split {count} times: list it once", axis
            )
    if axes != sorted(axes):
        yield SpecProblem(
            "structure.axis-order",
            f"axes are listed as {axes[:8]}, so shards are counted with axis {axes[0]} outermost",
        )


def _groups(spec: onnx.ShardingSpecProto) -> Iterator[SpecProblem]:
    entries = spec.index_to_device_group_map
    for key, count in Counter(entry.key for entry in entries).items():
        if count > 1:
            yield SpecProblem("structure.group-twice", f"the map has {count} groups {key}")
    for entry in entries:
        if not entry.value:
            yield SpecProblem("structure.group-empty", f"group {entry.key} has no devices")


def _devices(spec: onnx.ShardingSpecProto, num_devices: int) -> Iterator[SpecProblem]:
    keys = {entry.key for entry in spec.index_to_device_group_map}
    last = f"0 to {num_devices - 1}" if num_devices > 0 else "not known"
    named: list[int] = []
    for entry in dict.fromkeys(spec.device):
        if entry < 0 and entry not in keys:
            have = ", ".join(map(str, sorted(keys)[:8])) or "none"
            yield SpecProblem(
                "structure.group-missing", f"there is no group {entry}; the map has {have}"
            )
    for group in expand(spec, 0) if spec.device else ():
        named += group
    for device in dict.fromkeys(named):
        grouped = device < 0 and device in spec.device
        if not grouped and (device < 0 or 0 < num_devices <= device):
            message = f"there is no device {device}; the configuration's are {last}"
            yield SpecProblem("structure.device-unknown", message)
    for device, count in Counter(named).items():
        if count > 1 and device >= 0:
            yield SpecProblem("structure.device-twice", f"device {device} is named {count} times")
    sizes = {len(group) for group in expand(spec, 0)} if spec.device else set()
    if len(sizes - {0}) > 1 and _product(spec) != 1:
        yield SpecProblem(
            "structure.group-sizes",
            f"its shards have {sorted(sizes)} copies, and a NamedSharding has as many of each",
        )


def _shards(dim: onnx.ShardedDimProto, shape: Dims | None) -> Iterator[SpecProblem]:
    axis = dim.axis if dim.HasField("axis") else None
    if not dim.simple_sharding:
        yield SpecProblem(
            "structure.sharding-missing", "say how: `simple_sharding { num_shards }`", axis
        )
        return
    for entry in dim.simple_sharding:
        if not entry.HasField("num_shards"):
            yield SpecProblem(
                "structure.shards-missing", "it does not say into how many: num_shards", axis
            )
        elif entry.num_shards < 1:
            message = f"num_shards is {entry.num_shards}, and the least is 1"
            yield SpecProblem("structure.shards-positive", message, axis)
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return
    yield from _sizes(dim, shape[axis])


def _sizes(dim: onnx.ShardedDimProto, size: int | str | None) -> Iterator[SpecProblem]:
    entries = dim.simple_sharding
    values = [entry.dim_value if entry.HasField("dim_value") else None for entry in entries]
    params = [entry.dim_param for entry in entries if entry.HasField("dim_param")]
    static_sizes = [value for value in values if value is not None]
    count = math.prod(entry.num_shards for entry in entries)
    if isinstance(size, int):
        if len(static_sizes) == len(values) and math.prod(static_sizes) != size:
            product_text = " x ".join(map(str, static_sizes))
            message = f"dim_value says {product_text}, and the tensor's size there is {size}"
            yield SpecProblem("structure.dim-value", message, dim.axis)
        if count > 0 and size % count:
            message = f"{count} shards do not divide its size {size}"
            yield SpecProblem("structure.uneven", message, dim.axis)
    elif isinstance(size, str) and len(entries) == 1 and params and params != [size]:
        message = f"dim_param says {params[0][:80]!r}, and the tensor's is {size[:80]!r}"
        yield SpecProblem("structure.dim-param", message, dim.axis)
    split = [index for index, entry in enumerate(entries) if entry.num_shards > 1]
    # Blocks of the last split factor are contiguous only if those before it are split to the end.
    if split and any(values[n] != entries[n].num_shards for n in range(split[-1])):
        yield SpecProblem(
            "structure.fused",
            "several factors of it are split, and a shard is not one range of indices",
            dim.axis,
        )


def _fit(spec: onnx.ShardingSpecProto, num_devices: int) -> Iterator[SpecProblem]:
    count = _product(spec)
    if count is None:
        return
    if not spec.device:
        if count == num_devices:
            yield SpecProblem(
                "structure.devices-implied", f"it is over all {num_devices}, in order"
            )
        elif count > 1:
            message = f"it has {count} shards, and names no devices to hold them"
            yield SpecProblem("structure.shards-devices", message)
    elif count not in (1, len(spec.device)):
        yield SpecProblem(
            "structure.shards-devices",
            f"it has {count} shards for {len(spec.device)} devices or groups: name one for each",
        )


def _product(spec: onnx.ShardingSpecProto) -> int | None:
    """The number of shards; None if one of its factors is missing or senseless."""
    counts = [entry.num_shards for dim in spec.sharded_dim for entry in dim.simple_sharding]
    all_counted = all(dim.simple_sharding for dim in spec.sharded_dim)
    return math.prod(counts) if all_counted and all(count > 0 for count in counts) else None
