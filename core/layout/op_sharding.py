"""OpSharding strings: XLA's and torch_xla's notation for a layout.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from jax.sharding import PartitionSpec as P
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> tiles = Tiles.from_spec(P(None, "y"), mesh, 2)
>>> to_op_sharding(tiles)                                # V1: every device written out
'{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}'
>>> to_op_sharding(tiles, iota=True)                     # V2: as a transposed count
'{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}'
>>> parse_op_sharding("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}") == tiles
True

`devices=[..]` gives the number of blocks per tensor axis, and with `last_tile_dim_replicate` the
replicas last. `{replicated}` and `{maximal device=3}` do not say for how many tensor axes and
devices: pass them. `manual`, `unknown` and `unreduced` are no layouts, and refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import SpecError, UnrepresentableError

from .mesh import describe_mesh
from .spec import register_spelling
from .tiles import Tiles

MOST_DEVICES = 1 << 16
"""In a string whose number of devices nobody says beside it."""
MOST_AXES = 32
"""What every NumPy has."""

_LONGEST = 300
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_REPLICATE = ("last_tile_dim_replicate", "last_tile_dims={replicated}")
_LAST_DIMS = re.compile(r"last_tile_dims=\{([^}]*)\}")
_METADATA = "metadata={"
_NO_LAYOUT = {
    "manual": "is partitioned by hand, inside shard_map",
    "unknown": "is left to the compiler",
    "unreduced": "is a sum that was not taken yet",
}
_DEVICES = re.compile(
    r"devices=\[(?P<counts>[^\]]*)\]"
    r"(?:<=\[(?P<dims>[^\]]*)\](?:T\((?P<order>[^)]*)\))?|(?P<listed>[-\d,\s]*))"
)


def to_op_sharding(tiles: Tiles, *, iota: bool = False) -> str:
    """Print a layout the way XLA does.

    Args:
        tiles: the layout.
        iota: write the devices as `<=[dims]T(order)` if they are a transposed count (they are for
            every spec over a mesh), else one by one.

    Returns:
        The string, braces included.

    Example:
        >>> to_op_sharding(Tiles([[[3]]], num_devices=8))
        '{maximal device=3}'
    """
    if tiles.grid.size < tiles.num_devices:
        return _print_partial(tiles)
    if math.prod(tiles.blocks) == 1:
        return "{replicated}"
    shape = tiles.grid.shape if tiles.replicas > 1 else tiles.blocks
    devices = (_print_iota(tiles.grid) if iota else None) or _join(tiles.grid.ravel())
    tail = " " + _REPLICATE[0] if tiles.replicas > 1 else ""
    return f"{{devices=[{_join(shape)}]{devices}{tail}}}"


def parse_op_sharding(
    text: str, ndim: int | None = None, *, num_devices: int | None = None
) -> Tiles:
    """Read a layout as XLA and torch_xla print it.

    Args:
        text: the string, e.g. `"{devices=[2,4]<=[8]}"`.
        ndim: rank of the tensor; checked if the string says it, needed if it does not.
        num_devices: devices in all; the same.

    Returns:
        The layout.

    Raises:
        SpecError: the string is malformed, or means another rank or number of devices.
        UnrepresentableError: it is no layout (manual, unknown, a tuple of several).

    Example:
        >>> parse_op_sharding("{devices=[2,2]0,1,2,9}")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: OpSharding '{devices=[2,2]0,1,2,9}': the devices [0, 1, 2, 9] are not the numbers 0..3, each once
    """  # noqa: E501
    body = _strip_braces(text)
    if body == "replicated":
        return Tiles.replicated(*_need(text, ndim, num_devices))
    if found := re.fullmatch(r"maximal device=(\d+)", body):
        [device] = _numbers(text, "device", found[1])
        return _maximal(text, device, *_need(text, ndim, num_devices))
    return _parse_devices(text, body, ndim, num_devices)


def digits(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Read device numbers as a mixed-radix count: peel off the longest even run, repeat.

    Args:
        numbers: of one axis.

    Returns:
        Pairs of size and stride, outermost first.

    Example:
        >>> digits(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
        [(4, 1), (2, 4)]
    """
    found: list[tuple[int, int]] = []
    while len(numbers) > 1:
        step = int(numbers[1] - numbers[0])
        uneven = np.flatnonzero(np.diff(numbers) != step)
        size = int(uneven[0]) + 1 if len(uneven) else len(numbers)
        found.insert(0, (size, step))
        numbers = numbers[::size]
    return found or [(1, 1)]


def _print_partial(tiles: Tiles) -> str:
    if tiles.grid.size > 1:
        raise UnrepresentableError(
            f"devices {tiles.grid.ravel().tolist()} of {tiles.num_devices} hold data, and an "
            "OpSharding names all devices or one; make a mesh of those devices alone"
        )
    return f"{{maximal device={tiles.grid.item()}}}"


def _print_iota(grid: np.ndarray) -> str | None:
    """Write a device order as a transposed count, or None if it is none."""
    flat = grid.ravel()
    radix = digits(flat)
    by_stride = sorted(range(len(radix)), key=lambda i: -radix[i][1])
    dims = [radix[i][0] for i in by_stride]
    order = [by_stride.index(i) for i in range(len(radix))]
    if math.prod(dims) != flat.size:
        return None
    if not np.array_equal(np.arange(flat.size).reshape(dims).transpose(order).ravel(), flat):
        return None
    turned = "" if order == sorted(order) else f"T({_join(order)})"
    return f"<=[{_join(dims)}]{turned}"


def _strip_braces(text: str) -> str:
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise _fault(text, "it must stand in braces, like '{replicated}'")
    body = _without_metadata(body[1:-1]).strip()
    if body.startswith("{"):
        raise UnrepresentableError(
            f"OpSharding {_cut(text)!r} is a tuple of layouts, one per result; pass them one by one"
        )
    last = _LAST_DIMS.search(body)
    words = [body.partition(" ")[0], *re.split(r"[\s,]+", last[1] if last else "")]
    if why := next((_NO_LAYOUT[word] for word in words if word in _NO_LAYOUT), None):
        raise UnrepresentableError(
            f"OpSharding {_cut(text)!r} is no layout: the tensor {why}; give a spec of devices"
        )
    return body


def _without_metadata(body: str) -> str:
    kept = []
    at = 0
    while (begin := body.find(_METADATA, at)) >= 0:
        end = body.find("}", begin)
        if end < 0:
            break
        kept.append(body[at:begin].rstrip())
        at = end + 1
    return "".join([*kept, body[at:]])


def _maximal(text: str, device: int, ndim: int, num_devices: int) -> Tiles:
    if device >= num_devices:
        raise _fault(text, f"there is no device {device} among {num_devices}")
    return Tiles(np.full((1,) * (ndim + 1), device), num_devices)


def _need(text: str, ndim: int | None, num_devices: int | None) -> tuple[int, int]:
    if ndim is None or num_devices is None:
        given = {
            "the tensor's rank as ndim=": ndim,
            "the devices in all as num_devices=": num_devices,
        }
        missing = " and ".join(what for what, value in given.items() if value is None)
        raise _fault(text, f"it does not say everything; pass {missing}")
    return ndim, num_devices


def _parse_devices(text: str, body: str, ndim: int | None, num_devices: int | None) -> Tiles:
    found = _DEVICES.match(body)
    if not found:
        at = text.find(body)
        raise _fault(
            text,
            f"at position {at}: expected 'replicated', 'maximal device=', or "
            f"'devices=[blocks]' with a list of devices or '<=[dims]', found {_cut(body)!r}",
        )
    tail = body[found.end() :].strip()
    if tail not in ("", *_REPLICATE):
        raise _fault(
            text,
            f"at position {text.find(tail)}: expected nothing or '{_REPLICATE[0]}', found "
            f"{_cut(tail)!r}",
        )
    counts = _sizes(text, "blocks", found["counts"])
    if tail == "":
        counts = [*counts, 1]
    order: list[int] = []
    if found["dims"] is None:
        devices = _numbers(text, "devices", found["listed"])
        if sorted(devices) != list(range(len(devices))):
            raise _fault(
                text,
                f"the devices {_shown(devices)} are not the numbers 0..{len(devices) - 1}, "
                "each once",
            )
        dims = [len(devices)]
    else:
        dims = _sizes(text, "dims after '<='", found["dims"])
        order = _order(text, dims, found["order"])
        devices = []
    _check(text, counts, math.prod(dims), ndim, num_devices)
    # Only now is anything made that is as large as the string says.
    if not devices:
        devices = np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()
    return Tiles(np.array(devices).reshape(counts))


def _check(
    text: str, counts: list[int], count: int, ndim: int | None, num_devices: int | None
) -> None:
    """Compare the numbers of blocks and of devices with each other, and with what is asked for."""
    if math.prod(counts) != count:
        raise _fault(text, f"{_cut(_join(counts))} blocks do not hold {_number(count)} devices")
    wrong = []
    if ndim not in (None, len(counts) - 1):
        wrong.append(f"it is for a tensor of rank {len(counts) - 1}, not {ndim}")
    if num_devices not in (None, count):
        wrong.append(f"it is over {_number(count)} devices, not {num_devices}")
    elif num_devices is None and count > MOST_DEVICES:
        wrong.append(
            f"it is over {_number(count)} devices, and the most is {MOST_DEVICES} unless "
            "num_devices= says so"
        )
    if wrong:
        raise _fault(text, " and ".join(wrong))


def _order(text: str, dims: list[int], given: str | None) -> list[int]:
    order = list(range(len(dims))) if given is None else _numbers(text, "order after 'T'", given)
    if sorted(order) != list(range(len(dims))):
        turned = _cut(f"T{tuple(order[:_LONGEST])}")
        raise _fault(text, f"the order {turned} does not permute the dims {_shown(dims)}")
    return order


def _sizes(text: str, what: str, items: str) -> list[int]:
    """Numbers of blocks or devices: positive, and as many as an array has axes."""
    sizes = _numbers(text, what, items)
    if len(sizes) > MOST_AXES:
        raise _fault(text, f"the {what} are {len(sizes)}, and the most is {MOST_AXES}")
    if min(sizes) < 1:
        raise _fault(text, f"the {what} {_shown(sizes)} are not all positive")
    return sizes


def _numbers(text: str, what: str, items: str) -> list[int]:
    parts = [item.strip() for item in items.split(",")]
    if not all(_INTEGER.fullmatch(part) for part in parts):
        raise _fault(
            text,
            f"the {what} {_cut(items)!r} are no numbers (of 18 digits at most) with commas between",
        )
    return [int(part) for part in parts]


def _fault(text: str, what: str) -> SpecError:
    return SpecError(f"OpSharding {_cut(text)!r}: {what}")


def _cut(text: str) -> str:
    """A text, or as much of it as a message can hold."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."


def _shown(numbers: list[int]) -> str:
    return _cut(str(numbers[:_LONGEST]))


def _number(count: int) -> str:
    return str(count) if count < 1 << 64 else "more than 2**64"


def _join(numbers: Iterable[Any]) -> str:
    return ",".join(str(int(n)) for n in numbers)


def _is_text(spec: Any) -> bool:
    return isinstance(spec, str)


def _tiles_of_spec(text: str, mesh: Mesh, ndim: int) -> Tiles:
    """The layout of a tensor over a mesh whose spec is a string."""
    if not text.lstrip().startswith("{"):
        raise SpecError(
            f"spec {text!r} is no OpSharding string, which reads like '{{replicated}}'. To split "
            f"the first axis write ({text!r},) or P({text!r}). The mesh axes are "
            f"{describe_mesh(mesh)}."
        )
    return parse_op_sharding(text, ndim, num_devices=mesh.size)


register_spelling(_is_text, _tiles_of_spec)
