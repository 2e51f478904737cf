"""OpSharding strings: XLA's and torch_xla's notation for a sharding.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from jax.sharding import PartitionSpec as P
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> tiles = Tiles.from_spec(P(None, "y"), mesh, 2)
>>> to_op_sharding(tiles)                                # V1: every device written out
'{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}'
>>> to_op_sharding(tiles, iota=True)                     # V2: as a transposed iota
'{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}'
>>> parse_op_sharding("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}") == tiles
True

`devices=[..]` gives the number of blocks per tensor axis, and with `last_tile_dim_replicate` the
replicas last. `{replicated}` and `{maximal device=3}` do not include the rank and the number of
devices: pass them. `manual`, `unknown` and `unreduced` are no shardings of data, and raise.
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

MAX_DEVICES = 1 << 16
"""The most devices of a string without `num_devices=`, so that text cannot allocate at will."""
MAX_AXES = 32
"""The most axes of a NumPy 1 array (NumPy 2 has 64)."""

_MAX_TEXT = 300
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
    """Print a sharding the way XLA does.

    Args:
        tiles: the sharding.
        iota: write the devices as `<=[dims]T(order)` if they are a transposed iota (they are for
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
    """Read a sharding as XLA and torch_xla print it.

    Args:
        text: the string, e.g. `"{devices=[2,4]<=[8]}"`.
        ndim: rank of the tensor; checked if the string has it, required if not.
        num_devices: the number of all devices; the same.

    Returns:
        The sharding.

    Raises:
        SpecError: the string is malformed, or means another rank or number of devices.
        UnrepresentableError: it is no layout (manual, unknown, a tuple of several).

    Example:
        >>> parse_op_sharding("{devices=[2,2]0,1,2,9}")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: OpSharding '{devices=[2,2]0,1,2,9}': the devices [0, 1, 2, 9] are not 0..3, each once
    """  # noqa: E501
    body = _strip_braces(text)
    if body == "replicated":
        return Tiles.replicated(*_need(text, ndim, num_devices))
    if match := re.fullmatch(r"maximal device=(\d+)", body):
        [device] = _integers(text, "device", match[1])
        return _maximal(text, device, *_need(text, ndim, num_devices))
    return _parse_devices(text, body, ndim, num_devices)


def digits(devices: np.ndarray) -> list[tuple[int, int]]:
    """Device positions as a mixed-radix iota: (size, stride) pairs, the outermost first.

    The longest run of constant stride is split off, repeatedly.

    Example:
        >>> digits(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
        [(4, 1), (2, 4)]
    """
    radix: list[tuple[int, int]] = []
    while len(devices) > 1:
        step = int(devices[1] - devices[0])
        uneven = np.flatnonzero(np.diff(devices) != step)
        size = int(uneven[0]) + 1 if len(uneven) else len(devices)
        radix.insert(0, (size, step))
        devices = devices[::size]
    return radix or [(1, 1)]


def _print_partial(tiles: Tiles) -> str:
    if tiles.grid.size > 1:
        raise UnrepresentableError(
            f"devices {tiles.grid.ravel().tolist()} of {tiles.num_devices} have data, and an "
            "OpSharding names all devices or one; make a mesh of those devices alone"
        )
    return f"{{maximal device={tiles.grid.item()}}}"


def _print_iota(grid: np.ndarray) -> str | None:
    """A device order as a transposed iota, or None if it is none."""
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
        raise _error(text, "it must be in braces, like '{replicated}'")
    body = _without_metadata(body[1:-1]).strip()
    if body.startswith("{"):
        raise UnrepresentableError(
            f"OpSharding {_truncated(text)!r} is a tuple of layouts, one per result; "
            "pass them one by one"
        )
    last = _LAST_DIMS.search(body)
    kinds = [body.partition(" ")[0], *re.split(r"[\s,]+", last[1] if last else "")]
    if reason := next((_NO_LAYOUT[word] for word in kinds if word in _NO_LAYOUT), None):
        raise UnrepresentableError(
            f"OpSharding {_truncated(text)!r} is no layout: the tensor {reason}; give a "
            "spec of devices"
        )
    return body


def _without_metadata(body: str) -> str:
    segments = []
    at = 0
    while (begin := body.find(_METADATA, at)) >= 0:
        end = body.find("}", begin)
        if end < 0:
            break
        segments.append(body[at:begin].rstrip())
        at = end + 1
    return "".join([*segments, body[at:]])


def _maximal(text: str, device: int, ndim: int, num_devices: int) -> Tiles:
    if device >= num_devices:
        raise _error(text, f"there is no device {device} among {num_devices}")
    return Tiles(np.full((1,) * (ndim + 1), device), num_devices)


def _need(text: str, ndim: int | None, num_devices: int | None) -> tuple[int, int]:
    if ndim is None or num_devices is None:
        required = {
            "the tensor's rank as ndim=": ndim,
            "the number of all devices as num_devices=": num_devices,
        }
        missing = " and ".join(label for label, value in required.items() if value is None)
        raise _error(text, f"it is incomplete; pass {missing}")
    return ndim, num_devices


def _parse_devices(text: str, body: str, ndim: int | None, num_devices: int | None) -> Tiles:
    match = _DEVICES.match(body)
    if not match:
        at = text.find(body)
        raise _error(
            text,
            f"at position {at}: expected 'replicated', 'maximal device=', or "
            f"'devices=[blocks]' with a list of devices or '<=[dims]', found {_truncated(body)!r}",
        )
    tail = body[match.end() :].strip()
    if tail not in ("", *_REPLICATE):
        raise _error(
            text,
            f"at position {text.find(tail)}: expected nothing or '{_REPLICATE[0]}', found "
            f"{_truncated(tail)!r}",
        )
    counts = _sizes(text, "blocks", match["counts"])
    if tail == "":
        counts = [*counts, 1]
    order: list[int] = []
    if match["dims"] is None:
        devices = _integers(text, "devices", match["listed"])
        if sorted(devices) != list(range(len(devices))):
            raise _error(
                text,
                f"the devices {_shown(devices)} are not 0..{len(devices) - 1}, each once",
            )
        dims = [len(devices)]
    else:
        dims = _sizes(text, "dims after '<='", match["dims"])
        order = _order(text, dims, match["order"])
        devices = []
    _check(text, counts, math.prod(dims), ndim, num_devices)
    # Nothing of the size that the string declares is allocated before the checks.
    if not devices:
        devices = np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()
    return Tiles(np.array(devices).reshape(counts))


def _check(
    text: str, counts: list[int], count: int, ndim: int | None, num_devices: int | None
) -> None:
    """Compare the numbers of blocks and devices with each other, and with those requested."""
    if math.prod(counts) != count:
        raise _error(
            text, f"{_truncated(_join(counts))} blocks do not match {_count_text(count)} devices"
        )
    wrong = []
    if ndim not in (None, len(counts) - 1):
        wrong.append(f"it is for a tensor of rank {len(counts) - 1}, not {ndim}")
    if num_devices not in (None, count):
        wrong.append(f"it is over {_count_text(count)} devices, not {num_devices}")
    elif num_devices is None and count > MAX_DEVICES:
        wrong.append(
            f"it is over {_count_text(count)} devices, and the most is {MAX_DEVICES} unless "
            "num_devices= allows it"
        )
    if wrong:
        raise _error(text, " and ".join(wrong))


def _order(text: str, dims: list[int], items: str | None) -> list[int]:
    order = list(range(len(dims))) if items is None else _integers(text, "order after 'T'", items)
    if sorted(order) != list(range(len(dims))):
        turned = _truncated(f"T{tuple(order[:_MAX_TEXT])}")
        raise _error(text, f"the order {turned} does not permute the dims {_shown(dims)}")
    return order


def _sizes(text: str, label: str, items: str) -> list[int]:
    """Sizes of axes: positive, and no more than an array can have axes."""
    sizes = _integers(text, label, items)
    if len(sizes) > MAX_AXES:
        raise _error(text, f"the {label} are {len(sizes)}, and the most is {MAX_AXES}")
    if min(sizes) < 1:
        raise _error(text, f"the {label} {_shown(sizes)} are not all positive")
    return sizes


def _integers(text: str, label: str, items: str) -> list[int]:
    items_ = [item.strip() for item in items.split(",")]
    if not all(_INTEGER.fullmatch(item) for item in items_):
        raise _error(
            text,
            f"the {label} {_truncated(items)!r} are not integers (of 18 digits at most) "
            "separated by commas",
        )
    return [int(item) for item in items_]


def _error(text: str, reason: str) -> SpecError:
    return SpecError(f"OpSharding {_truncated(text)!r}: {reason}")


def _truncated(text: str) -> str:
    """A text, truncated for messages."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}.."


def _shown(values: list[int]) -> str:
    return _truncated(str(values[:_MAX_TEXT]))


def _count_text(count: int) -> str:
    return str(count) if count < 1 << 64 else "more than 2**64"


def _join(values: Iterable[Any]) -> str:
    return ",".join(str(int(n)) for n in values)


def _is_text(spec: Any) -> bool:
    return isinstance(spec, str)


def _tiles_of_spec(text: str, mesh: Mesh, ndim: int) -> Tiles:
    """The tiles of a tensor over a mesh whose spec is a string."""
    if not text.lstrip().startswith("{"):
        raise SpecError(
            f"spec {text!r} is no OpSharding string, which reads like '{{replicated}}'. To split "
            f"the first axis write ({text!r},) or P({text!r}). The mesh axes are "
            f"{describe_mesh(mesh)}."
        )
    return parse_op_sharding(text, ndim, num_devices=mesh.size)


register_spelling(_is_text, _tiles_of_spec)
