"""What `iso.restore` is to fill, compared with what a checkpoint has.

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
from isoshard.core.checkpoint.source import Entry, Memory, NamedState, Place, Wanted
from isoshard.core.errors import CheckpointError, CopyError
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_dtypes import device_dtype

from .leaf_groups import Group, is_value, named_groups

__all__ = ["Slot", "compare", "named_groups", "slots_of", "wanted_of"]

_SHOWN = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """One leaf that is to be filled.

    Attributes:
        name: in full.
        part: what stands there now.
        wanted: what is to come; None for a number, a string, ..
        hyper: whether it is a value of an optimizer or the like, which may change its type.
    """

    name: str
    part: NamedState
    wanted: Wanted | None
    hyper: bool = False

    def at(self, place: Place) -> Slot:
        """The same at another place."""
        assert self.wanted is not None
        return dataclasses.replace(self, wanted=dataclasses.replace(self.wanted, place=place))


def slots_of(groups: Sequence[Group]) -> list[Slot]:
    """The leaves of a tree as slots.

    Args:
        groups: as `named_groups` gives them.

    Returns:
        A slot for each part, in order.
    """
    return [
        Slot(name, part, wanted_of(part.value), group.whole)
        for group in groups
        for name, part in group.named()
    ]


def wanted_of(value: Any) -> Wanted | None:
    """What is to come in the place of something; None if that is no array.

    Args:
        value: an array of any framework, abstract or not, an `Entry`, a number, ..

    Raises:
        ShardingError: it is an `UnevenArray` that lies on no mesh.
    """
    if isinstance(value, Entry):  # not made yet: as in the checkpoint
        return None if value.is_value else Wanted(value.shape, value.dtype, Memory.HOST)
    if isinstance(value, np.ndarray | np.generic):
        return Wanted(tuple(value.shape), value.dtype.name, Memory.HOST)
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _wanted_jax(value)
    if isinstance(value, UnevenArray):
        return Wanted(value.shape, str(value.dtype), BlockLayout.of(value))
    if is_value(value):
        return None
    framework = framework_of(value)
    assert framework is not None
    return framework.wanted(value)


def compare(slots: Sequence[Slot], saved: Mapping[str, Entry], *, partial: bool) -> None:
    """Say everything in which a checkpoint and the wanted tree differ.

    Args:
        slots: what is wanted.
        saved: what there is.
        partial: whether there may be more than is wanted.

    Raises:
        CheckpointError: naming every leaf at fault.
    """
    faults = [fault for slot in slots if (fault := _fault(slot, saved.get(slot.name)))]
    if not partial:
        names = {slot.name for slot in slots}
        faults += [
            f"{name}: in the checkpoint, and not in `like` (partial=True leaves such leaves out)"
            for name in saved
            if name not in names
        ]
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
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


def _wanted_jax(value: Any) -> Wanted:
    dtype = str(value.dtype)
    key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    shape = jax.eval_shape(jax.random.key_data, value).shape if key else value.shape
    place = value.sharding
    if isinstance(value, jax.Array) and not value.committed:
        place = None
    return Wanted(tuple(shape), dtype, place or Memory.DEFAULT_DEVICE)


def _fault(slot: Slot, entry: Entry | None) -> str:
    if entry is None:
        way = "leave it out of `like`, or map its name with weights=.."
        return f"{slot.name}: not in the checkpoint ({way})"
    if isinstance(entry.value, CheckpointError):
        return f"{slot.name}: {entry.value}"
    if slot.wanted is None or entry.is_value:
        return (
            ""
            if slot.wanted is None and entry.is_value and _alike(slot, entry)
            else (f"{slot.name}: {_kind(entry)} in the checkpoint, {_kind(slot)} in `like`")
        )
    if entry.shape != slot.wanted.shape:
        return f"{slot.name}: shape {entry.shape} in the checkpoint, {slot.wanted.shape} in `like`"
    return _dtype_fault(slot.name, entry.dtype, slot.wanted)


def _dtype_fault(name: str, saved: str, wanted: Wanted) -> str:
    if saved != wanted.dtype and not _same_integers(saved, wanted.dtype):
        return f"{name}: dtype {saved} in the checkpoint, {wanted.dtype} in `like`"
    if wanted.place is not Memory.HOST and not wanted.wide and not is_key(saved):
        try:
            device_dtype(jax.numpy.dtype(saved), name)
        except CopyError as error:
            return str(error)
    return ""


def _same_integers(one: str, other: str) -> bool:
    """Whether JAX stores both as one integer type, as int64 and int32 while x64 is off."""
    if is_key(one) or is_key(other):
        return False
    kinds = [jax.numpy.dtype(name) for name in (one, other)]
    if any(kind.kind not in "iu" for kind in kinds):
        return False
    return len({jax.dtypes.canonicalize_dtype(kind) for kind in kinds}) == 1


def _alike(slot: Slot, entry: Entry) -> bool:
    """Whether one value may come for another: numbers for numbers, and otherwise of one type."""
    if slot.hyper:
        return True
    numbers = bool | int | float | complex
    here, there = slot.part.value, entry.value
    return type(here) is type(there) or (isinstance(here, numbers) and isinstance(there, numbers))


def _kind(of: Slot | Entry) -> str:
    if isinstance(of, Slot):
        wanted = of.wanted
        return f"{wanted.dtype}{list(wanted.shape)}" if wanted else type(of.part.value).__name__
    return type(of.value).__name__ if of.is_value else f"{of.dtype}{list(of.shape)}"
