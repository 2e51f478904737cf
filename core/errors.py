"""The errors of isoshard: what is wrong, what is possible, and the way out.

Every fault of a layout is a `ShardingError`, which is a `ValueError`; its subclasses tell the kind.

>>> try:
...     raise UnevenError("weight: axis 0 has size 6, which 4 shards do not divide")
... except ShardingError as error:
...     print(error)
weight: axis 0 has size 6, which 4 shards do not divide

A verb that meets many leaves looks at all of them before it touches one, and reports every fault
at once: see `raise_collected`.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShardingError(ValueError):
    """A layout, or an argument that asks for one, is not possible as given."""


class SpecError(ShardingError):
    """A spec names no axis of the mesh, names one twice, or does not fit the rank."""


class RecompilationWarning(UserWarning):
    """Programs that differ only in a shape or a constant are compiled again and again."""


class UnevenError(ShardingError):
    """A tensor axis cannot be split into equal shards."""


class UnrepresentableError(ShardingError):
    """The layout exists, but the requested notation has no words for it."""


class CopyError(ShardingError):
    """A conversion would copy or change values where that was forbidden."""


class DeviceError(RuntimeError):
    """There are too few devices, or the backend has started already."""


class PrivateNameError(RuntimeError):
    """The installed torch or JAX lacks a private name that is needed for what was asked."""


class DistributedError(RuntimeError):
    """The processes of a run cannot be started together, do not agree, or one of them failed."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, lacks something, or was altered after it was written."""


def no_sharing(name: str, why: str) -> CopyError:
    """The error of an array that cannot be shared where `copy=False` asks for it.

    Args:
        name: of the array.
        why: what stands against it.

    Returns:
        The error, to be raised.

    Example:
        >>> print(no_sharing("weight", "the devices are cuda"))
        weight: cannot share memory under copy=False: the devices are cuda. Pass copy=None or copy=True.
    """  # noqa: E501
    return CopyError(
        f"{name}: cannot share memory under copy=False: {why}. Pass copy=None or copy=True."
    )


def raise_collected(faults: Sequence[ShardingError]) -> None:
    """Raise what was collected over many leaves as one error.

    Args:
        faults: the errors, each naming its leaf; may be empty.

    Raises:
        ShardingError: if there are any; the error itself if there is one, the common class if all
            are of one class.

    Example:
        >>> raise_collected([])
        >>> raise_collected([SpecError("a: no axis 'z'"), SpecError("b: no axis 'z'")])
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: 2 leaves cannot be laid out, and nothing was changed:
          a: no axis 'z'
          b: no axis 'z'
    """
    if not faults:
        return
    if len(faults) == 1:
        raise faults[0] from None
    kinds = {type(fault) for fault in faults}
    kind = kinds.pop() if len(kinds) == 1 else ShardingError
    lines = "".join(f"\n  {fault}" for fault in faults)
    raise kind(
        f"{len(faults)} leaves cannot be laid out, and nothing was changed:{lines}"
    ) from None
