"""ManualTensor: one tensor per device, written as one.

Between `enable_manual_sharding` and `disable_manual_sharding` a tensor is each device's own piece.
Underneath, the pieces are stacked along a leading axis that is split over all devices, and every
operation is mapped over that axis with `torch.vmap`; so each device computes on its piece alone.

A tensor that is not manual takes part as it is, the same on every device, and its gradient is the
sum of theirs. Random numbers differ from device to device. In-place operations and views work. A
value can be read where all devices have the same (`agreed_value`), and otherwise is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto, same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.torch_bridge import naming
from isoshard.torch_bridge._torch_internals import pytree, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import is_excluded, set_excluded
from isoshard.torch_bridge._torch_internals.tensor_fields import make_wrapper_subclass
from isoshard.torch_bridge.argument_types import DeviceTensor, Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import graph_calls
from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.layout.shard_snapshots import XLAShard, name_of
from isoshard.torch_bridge.tensor import XLAShardedTensor

from .agreed_value import HOW, agreed
from .stacked_shards import laid_whole, stacked_shape, whole_shape

_KEYS = tuple(
    getattr(torch.DispatchKey, name)
    for name in (
        "FuncTorchDynamicLayerFrontMode",
        "FuncTorchDynamicLayerBackMode",
        "FuncTorchBatched",
        "FuncTorchVmapMode",
        "FuncTorchGradWrapper",
        "PythonTLSSnapshot",
    )
)


class ManualTensor(XLAShardedTensor):
    """Each device's own piece of a tensor; see the module's description.

    Attributes:
        stacked: the pieces, of shape (devices, *shape).
        home: the devices, in the order of the pieces.
    """

    stacked: XLAShardedTensor
    home: jax.sharding.Mesh

    def __getattr__(self, name: str) -> Any:
        """Refuse what the verbs for other tensors ask for first: the memory, the view, the size."""
        if name in ("_storage", "_chain", "_aval"):
            raise RuntimeError(f"a manual tensor has a value per device; {HOW}")
        raise AttributeError(f"'ManualTensor' object has no attribute {name!r}")

    @classmethod
    def of(cls, stacked: DeviceTensor, mesh: jax.sharding.Mesh) -> ManualTensor:
        """The tensor whose pieces are stacked.

        Args:
            stacked: of shape (devices of `mesh`, *shape of the result).
            mesh: the devices.
        """
        result: Any = make_wrapper_subclass(
            cls,
            stacked.shape[1:],
            strides=stacked.stride()[1:],
            dtype=stacked.dtype,
            device=torch.device("lazy", 0),
            _extra_dispatch_keys=lazy_tensor.AUTOCAST,
        )
        result.stacked, result.home = stacked, mesh
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let ordinary tensors that require a gradient take part by a copy on every device."""
        given: Any = (args, kwargs or {})
        if torch.is_grad_enabled() and getattr(func, "__module__", "") != "torch.autograd":
            leaves = pytree.tree_leaves(given)
            homes = [leaf.home for leaf in leaves if isinstance(leaf, ManualTensor)]
            if homes and any(map(_needs_sum, leaves)):
                copies = NamedSharding(homes[0], P())
                given = pytree.tree_map(
                    lambda leaf: pieces_of(leaf, copies) if _needs_sum(leaf) else leaf, given
                )
        with torch.DisableTorchFunctionSubclass():
            return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Map one operation over the devices."""
        if func.name() in _READS:
            return func(*pytree.tree_map_only(ManualTensor, ManualTensor._agreed, args))
        if func.name() == "aten::equal":
            return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())
        flat, structure = pytree.tree_flatten((args, kwargs or {}))
        places = [n for n, leaf in enumerate(flat) if isinstance(leaf, ManualTensor)]
        mesh = flat[places[0]].home
        for place in places:
            if not same_grid(flat[place].home, mesh):
                raise ShardingError(
                    f"{func} has manual operands over two meshes, {mesh} and {flat[place].home}; "
                    "enable manual sharding for both over one mesh"
                )
        if _leaves_device(kwargs):
            return func(*pytree.tree_map_only(ManualTensor, ManualTensor._agreed, args), **kwargs)
        _check_written(func, args)

        def run(*pieces: Any) -> Any:
            leaves = list(flat)
            for place, piece in zip(places, pieces, strict=True):
                leaves[place] = piece
            given, named = pytree.tree_unflatten(leaves, structure)
            return func(*given, **named)

        with _vmap_allowed():
            got = torch.vmap(run, randomness="different")(*[flat[n].stacked for n in places])
        if schema_of(func).is_mutable:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, lambda leaf: cls.of(leaf, mesh), got)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """What torch traces of it: the stacked pieces; and the number of its devices' layout."""
        return ["stacked"], layout_numbers.intern(NamedSharding(self.home, P()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], number: int, _size: Opaque, _stride: Opaque
    ) -> ManualTensor:
        """The tensor of stacked pieces that torch traces."""
        whole: Any = layout_numbers.as_named(number)
        return ManualTensor.of(inner["stacked"], mesh_of(whole))

    def wait(self) -> ManualTensor:
        """The tensor: JAX waits for a collective where its value is read."""
        return self

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the manual region."""
        return self.home

    @property
    def named_sharding(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def partition_spec(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def placements(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def device_mesh(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def sharding_spec(self) -> str:
        """XLA's word for it."""
        return "{manual}"

    @property
    def sharding_type(self) -> ShardingType:
        """Always MANUAL."""
        return ShardingType.MANUAL

    @property
    def local_shards(self) -> list[XLAShard]:
        """Copies of each device's piece; executes what is recorded."""
        pieces = self.stacked.detach().cpu()
        found = [
            XLAShard(piece, ..., name_of(device), 0)
            for piece, device in zip(pieces, self.home.devices.flat, strict=True)
        ]
        return sorted(found, key=lambda shard: shard.rank)

    def _agreed(self) -> torch.Tensor:
        return agreed(self.stacked, self.home)

    def tolist(self) -> Any:
        """The elements as nested lists, where all devices have the same."""
        return self._agreed().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shape, dtype and devices; values would have to be executed."""
        return (
            f"ManualTensor(shape={tuple(self.shape)}, dtype={self.dtype}, one on each of "
            f"{self.home.size} devices)"
        )

    __str__ = __repr__


def _needs_sum(leaf: Any) -> bool:
    """Whether the gradient of an ordinary tensor has to be summed over the devices."""
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, ManualTensor)
        and leaf.requires_grad
        and (isinstance(leaf, XLAShardedTensor) or graph_calls.is_traced(leaf))
    )


_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero"})


def _leaves_device(kwargs: Any) -> bool:
    """Whether an operation is asked for a result on another device."""
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device).type not in naming.OURS


def _check_written(func: Any, args: Any) -> None:
    """Refuse to write a manual tensor into another."""
    if schema_of(func).is_mutable and not isinstance(args[0], ManualTensor | list | tuple):
        raise RuntimeError(
            f"{func} would write one value per device into a tensor that has one in all; {HOW}"
        )


@contextlib.contextmanager
def _vmap_allowed() -> Iterator[None]:
    """Let torch's transforms see the operations of this thread."""
    before = [is_excluded(key) for key in _KEYS]
    for key in _KEYS:
        set_excluded(key, False)
    try:
        yield
    finally:
        for key, excluded in zip(_KEYS, before, strict=True):
            set_excluded(key, excluded)


def pieces_of(t: torch.Tensor, sharding: jax.sharding.NamedSharding) -> ManualTensor:
    """Each device's own piece of a whole; of copies, the gradient is the sum of theirs.

    Args:
        t: on the `jax` device.
        sharding: how it is cut; its axes divide.
    """
    result: Any = _ToShards.apply(t, sharding, "copy")
    return result


def whole_of(pieces: ManualTensor, sharding: jax.sharding.NamedSharding) -> XLAShardedTensor:
    """The whole that pieces make; of copies, that of the first device.

    Args:
        pieces: of its shards' shape.
        sharding: how they lie in the whole.
    """
    result: Any = _ToWhole.apply(pieces, sharding, "first")
    return result


class _ToShards(torch.autograd.Function):
    """From a whole to pieces, "copy" or "first" (see `_cut`); the transpose of `_ToWhole`."""

    @staticmethod
    def forward(ctx: Any, whole: Any, sharding: Any, how: str) -> Any:
        ctx.sharding, ctx.how = sharding, how
        return _cut_pieces(whole, sharding, how)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _ToWhole.apply(gradient[0], ctx.sharding, _TRANSPOSE[ctx.how]), None, None


class _ToWhole(torch.autograd.Function):
    """From pieces to a whole, "sum" or "first" (see `_join`); the transpose of `_ToShards`."""

    @staticmethod
    def forward(ctx: Any, pieces: Any, sharding: Any, how: str) -> Any:
        ctx.sharding, ctx.how = sharding, how
        return _joined_pieces(pieces, sharding, how)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _ToShards.apply(gradient[0], ctx.sharding, _TRANSPOSE[ctx.how]), None, None


_TRANSPOSE = {"copy": "sum", "sum": "copy", "first": "first"}


def _cut_pieces(whole: Any, sharding: Any, how: str) -> ManualTensor:
    stacked = graph_calls.laid_by(_cut_stacked, stacked_shape, whole, sharding, how)
    return ManualTensor.of(stacked, mesh_of(sharding))


def _joined_pieces(pieces: ManualTensor, sharding: Any, how: str) -> Any:
    return graph_calls.laid_by(_joined_stacked, whole_shape, pieces.stacked, sharding, how)


def _cut_stacked(whole: Any, sharding: Any, how: str) -> Any:
    (value,) = tapes.recorder().record(_cut(sharding, how), [lazy_tensor.read(whole)])
    shape = stacked_shape(tuple(whole.shape), sharding)
    return lazy_tensor.fresh(Aval.contiguous(shape, whole.dtype), value)


def _joined_stacked(stacked: Any, sharding: Any, how: str) -> Any:
    (value,) = tapes.recorder().record(_join(sharding, how), [lazy_tensor.read(stacked)])
    return laid_whole(value, stacked, sharding)


def _others(sharding: Any) -> tuple[str, ...]:
    """The mesh axes along which devices hold copies."""
    used = {name for entry in sharding.spec for name in axis_names(entry)}
    return tuple(name for name in sharding.mesh.axis_names if name not in used)


def _is_first(sharding: Any) -> jax.Array:
    """On a device: whether it is the first of those that hold its piece."""
    first = jax.numpy.array(True)
    for axis in _others(sharding):
        first &= jax.lax.axis_index(axis) == 0
    return first


@functools.lru_cache(maxsize=1024)
def _cut(sharding: Any, how: str) -> Recipe:
    """From a whole to stacked pieces: the same on copies, or zeros on all but the first."""

    def local(piece: jax.Array) -> jax.Array:
        if how == "first":
            piece = jax.numpy.where(_is_first(sharding), piece, jax.numpy.zeros_like(piece))
        return piece[None]

    mesh = auto(mesh_of(sharding))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return Recipe(f"manual_{how}", lambda arrays, _scalars, _key: [mapped(arrays[0])], 1)


@functools.lru_cache(maxsize=1024)
def _join(sharding: Any, how: str) -> Recipe:
    """From stacked pieces to a whole: of copies the first, or their sum."""

    def local(stacked: jax.Array) -> jax.Array:
        piece = stacked[0]
        if how == "first":
            piece = jax.numpy.where(_is_first(sharding), piece, jax.numpy.zeros_like(piece))
        others = _others(sharding)
        if not others:
            return piece
        wide = piece.astype("int32") if piece.dtype == bool else piece
        return jax.lax.psum(wide, others).astype(piece.dtype)

    mesh = auto(mesh_of(sharding))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return Recipe(f"manual_{how}", lambda arrays, _scalars, _key: [mapped(arrays[0])], 1)
