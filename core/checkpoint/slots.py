"""The leaves that `iso.restore` fills, compared with those of a checkpoint.

>>> groups, _ = named_groups({"w": jax.ShapeDtypeStruct((4,), "float32"), "b": np.zeros(2)})
>>> saved = {"w": Entry((8,), "float32"), "gain": Entry((), "float32")}
>>> compare(slots_of(groups), saved, partial=False)
Traceback (most recent call last):
    ...
isoshard.core.errors.CheckpointError: the checkpoint does not fit `like`, and nothing was restored:
  b: not in the checkpoint (leave it out of `like`, or map its name with weights=..)
  w: shape (8,) in the checkpoint, (4,) in `like`
  gain: in the checkpoint, and not in `like` (partial=True leaves such leaves out)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.checkpoint.source import Destination, Entry, Memory, NamedState, TargetArray
from isoshard.core.errors import CheckpointError, CopyError
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_dtypes import device_dtype

from .leaf_groups import Group, is_value, named_groups

__all__ = ["Slot", "compare", "named_groups", "slots_of", "target_of"]

_SHOWN = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A leaf that a restore fills.

    Attributes:
        name: in full.
        part: its current value.
        target: the array that it will be; None for a number, a string, ..
        hyper: whether it is a value of an optimizer or the like, which may change its type.
    """

    name: str
    part: NamedState
    target: TargetArray | None
    hyper: bool = False

    def at(self, destination: Destination) -> Slot:
        """A copy of the slot with another destination."""
        assert self.target is not None
        return dataclasses.replace(
            self, target=dataclasses.replace(self.target, destination=destination)
        )


def slots_of(groups: Sequence[Group]) -> list[Slot]:
    """A slot for each part of the leaves of a tree, in order."""
    return [
        Slot(name, part, target_of(part.value), group.stateful)
        for group in groups
        for name, part in group.named()
    ]


def target_of(value: Any) -> TargetArray | None:
    """The array that something is restored to; None if it is no array.

    Args:
        value: an array of any framework, abstract or not, an `Entry`, a number, ..

    Raises:
        ShardingError: it is an `UnevenArray` on no mesh.
    """
    if isinstance(value, Entry):  # not created yet: as in the checkpoint
        return None if value.is_value else TargetArray(value.shape, value.dtype, Memory.HOST)
    if isinstance(value, np.ndarray | np.generic):
        return TargetArray(tuple(value.shape), value.dtype.name, Memory.HOST)
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _target_of_jax(value)
    if isinstance(value, UnevenArray):
        return TargetArray(value.shape, str(value.dtype), BlockLayout.of(value))
    if is_value(value):
        return None
    framework = framework_of(value)
    assert framework is not None
    return framework.target_array(value)


def compare(slots: Sequence[Slot], saved: Mapping[str, Entry], *, partial: bool) -> None:
    """Raise a `CheckpointError` with everything in which a checkpoint and the slots differ.

    Args:
        slots: that will be filled.
        saved: the entries of the checkpoint.
        partial: whether there may be entries without a slot.
    """
    mismatches = [mismatch for slot in slots if (mismatch := _mismatch(slot, saved.get(slot.name)))]
    if not partial:
        names = {slot.name for slot in slots}
        mismatches += [
            f"{name}: in the checkpoint, and not in `like` (partial=True leaves such leaves out)"
            for name in saved
            if name not in names
        ]
    if mismatches:
        lines = "".join(f"\n  {mismatch}" for mismatch in mismatches)
        raise CheckpointError(
            f"the checkpoint does not fit `like`, and nothing was restored:{lines}"
        )


def is_key(dtype: str) -> bool:
    """Whether a dtype is that of random keys.

    Example:
        >>> is_key(str(jax.random.key(0).dtype))
        True
    """
    return dtype.startswith("key<")


def _target_of_jax(value: Any) -> TargetArray:
    dtype = str(value.dtype)
    key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    shape = jax.eval_shape(jax.random.key_data, value).shape if key else value.shape
    destination = value.sharding
    if isinstance(value, jax.Array) and not value.committed:
        destination = None
    return TargetArray(tuple(shape), dtype, destination or Memory.DEFAULT_DEVICE)


def _mismatch(slot: Slot, entry: Entry | None) -> str:
    if entry is None:
        way = "leave it out of `like`, or map its name with weights=.."
        return f"{slot.name}: not in the checkpoint ({way})"
    if isinstance(entry.value, CheckpointError):
        return f"{slot.name}: {entry.value}"
    if slot.target is None or entry.is_value:
        return (
            ""
            if slot.target is None and entry.is_value and _compatible(slot, entry)
            else (f"{slot.name}: {_kind(entry)} in the checkpoint, {_kind(slot)} in `like`")
        )
    if entry.shape != slot.target.shape:
        return f"{slot.name}: shape {entry.shape} in the checkpoint, {slot.target.shape} in `like`"
    return _dtype_mismatch(slot.name, entry.dtype, slot.target)


def _dtype_mismatch(name: str, saved: str, target: TargetArray) -> str:
    if saved != target.dtype and not _same_integers(saved, target.dtype):
        return f"{name}: dtype {saved} in the checkpoint, {target.dtype} in `like`"
    if target.destination is not Memory.HOST and not target.wide and not is_key(saved):
        try:
            device_dtype(jax.numpy.dtype(saved), name)
        except CopyError as error:
            return str(error)
    return ""


def _same_integers(saved: str, target: str) -> bool:
    """Whether JAX stores both as one integer type, as int64 and int32 while x64 is off."""
    if is_key(saved) or is_key(target):
        return False
    kinds = [jax.numpy.dtype(name) for name in (saved, target)]
    if any(kind.kind not in "iu" for kind in kinds):
        return False
    return len({jax.dtypes.canonicalize_dtype(kind) for kind in kinds}) == 1


def _compatible(slot: Slot, entry: Entry) -> bool:
    """Whether a saved value may replace another: numbers numbers, otherwise of the same type."""
    if slot.hyper:
        return True
    number = bool | int | float | complex
    current, saved = slot.part.value, entry.value
    return type(current) is type(saved) or (
        isinstance(current, number) and isinstance(saved, number)
    )


def _kind(of: Slot | Entry) -> str:
    if isinstance(of, Slot):
        target = of.target
        return f"{target.dtype}{list(target.shape)}" if target else type(of.part.value).__name__
    return type(of.value).__name__ if of.is_value else f"{of.dtype}{list(of.shape)}"
