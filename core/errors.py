"""The errors of isoshard: what is wrong, what is possible, and how to fix it.

Every fault of a layout is a `ShardingError`, which is a `ValueError`; its subclasses tell the kind.

>>> try:
...     raise UnevenError("weight: axis 0 has size 6, which 4 shards do not divide")
... except ShardingError as error:
...     print(error)
weight: axis 0 has size 6, which 4 shards do not divide

A verb that meets many leaves looks at all of them before it touches one, and reports every fault
at once: see `raise_collected`.

Each class has a short code, which stands below the traceback and leads to its section of
docs/troubleshooting.md:

>>> UnevenError.code, UnevenError("..").__notes__
('ISO003', ['ISO003: cause and fix in docs/troubleshooting.md#iso003-unevenerror'])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class Coded:
    """Base of classes with a short code; a private subclass without one has that of its base.

    A code is given once and never to another class. The message of an error stays as it was
    raised, since others contain it; a warning has no traceback for notes, so its message has it.

    Attributes:
        code: such as "ISO003".
        section: the title of its section in docs/troubleshooting.md.
    """

    code: ClassVar[str]
    section: ClassVar[str]

    def __init_subclass__(cls, *, code: str | None = None, **more: object) -> None:
        """Take the class's code."""
        super().__init_subclass__(**more)
        if code is not None:
            cls.code, cls.section = code, f"{code} {cls.__name__}"


class CodedError(Coded, Exception):
    """An error with a code, as a note (PEP 678) that tracebacks end with."""

    @property
    def __notes__(self) -> list[str]:
        """The line with the code, and what `add_note` adds."""
        anchor = self.section.lower().replace(" ", "-")
        line = f"{self.code}: cause and fix in docs/troubleshooting.md#{anchor}"
        return self.__dict__.setdefault("_notes", [line])

    @__notes__.setter
    def __notes__(self, notes: list[str]) -> None:
        self.__dict__["_notes"] = notes


class CodedWarning(Coded, UserWarning):
    """A warning with a code, at the end of its message."""

    def __str__(self) -> str:
        """The message and the code."""
        return f"{super().__str__()} [{self.code}]"


class ShardingError(CodedError, ValueError, code="ISO001"):
    """A sharding, or an argument that requests one, is not possible.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> try:
        ...     shard([1.0, 2.0], make_mesh((8,), ("x",)), ("x",))
        ... except ShardingError as error:
        ...     print(type(error).__name__)
        UnevenError
    """


class SpecError(ShardingError, code="ISO002"):
    """A spec names no axis of the mesh, names one twice, or does not fit the rank.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.layout.spec import normalize_spec
        >>> normalize_spec(("x", "x"), make_mesh((8,), ("x",)), 2, name="w")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: w: spec ('x', 'x') does not fit: mesh axis 'x' is used 2 times. The mesh axes are 'x' (8): name them, or give their indices 0..0.
    """  # noqa: E501


class RecompilationWarning(CodedWarning, code="ISO021"):
    """Programs that differ only in a shape or a constant are compiled again and again.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():                  # a test may take it for an error
        ...     warnings.simplefilter("error", RecompilationWarning)
        ...     warnings.warn("train.py:31: 9 programs were compiled", RecompilationWarning)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.RecompilationWarning: train.py:31: 9 programs were compiled [ISO021]
    """


class ReplicationWarning(CodedWarning, code="ISO017"):
    """Data is replicated where a sharding splits it, or could.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():                  # a test may take it for an error
        ...     warnings.simplefilter("error", ReplicationWarning)
        ...     warnings.warn("the plan replicates 90 % of the bytes", ReplicationWarning)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ReplicationWarning: the plan replicates 90 % of the bytes [ISO017]
    """


class UnevenError(ShardingError, code="ISO003"):
    """A tensor axis cannot be split into equal shards.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> shard([1.0, 2.0, 3.0], make_mesh((2,), ("x",)), ("x",), name="rows")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: rows: shape (3,) does not split evenly by P('x',): axis 0 has size 3, which is no multiple of its 2 shards. Pad it to 4, or split another axis.
    """  # noqa: E501


class UnrepresentableError(ShardingError, code="ISO004"):
    """The layout exists, but the requested notation has no words for it.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.layout.tiles import Tiles
        >>> Tiles([[1], [0]]).to_spec(make_mesh((2,), ("x",)))
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnrepresentableError: blocks (2,) on devices [1, 0] follow no order of the mesh axes 'x' (2); reorder the mesh's devices, or reshard first
    """  # noqa: E501


class CopyError(ShardingError, code="ISO005"):
    """A conversion would copy or change values where that was forbidden.

    Example:
        >>> import numpy as np
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> shard(np.ones(8), make_mesh((8,), ("x",)), ("x",), copy=False, name="w")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.CopyError: w: cannot share memory under copy=False: float64 is stored as float32 while jax_enable_x64 is off. Pass copy=None or copy=True.
    """  # noqa: E501


class DeviceError(CodedError, RuntimeError, code="ISO010"):
    """There are too few devices, or the backend has started already.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> make_mesh((16,), ("x",))
        Traceback (most recent call last):
            ...
        isoshard.core.errors.DeviceError: a mesh of (16,) needs 16 devices, there are 8 (cpu). Make it smaller, or try it on virtual devices: call iso.simulate_devices(16) before anything else.
    """  # noqa: E501


class PrivateNameError(CodedError, RuntimeError, code="ISO012"):
    """The installed torch or JAX lacks a private name that is needed for a call.

    Example:
        >>> PrivateNameError("jax 0.13.0 has no jax._src.clusters").code
        'ISO012'
    """


class UntestedVersionWarning(CodedWarning, code="ISO015"):
    """The installed torch or JAX is outside the range that isoshard was tested with.

    Example:
        >>> print(UntestedVersionWarning("jax 0.13.0 is newer than 0.9 to 0.12"))
        jax 0.13.0 is newer than 0.9 to 0.12 [ISO015]
    """


class PrivateNameWarning(CodedWarning, code="ISO016"):
    """The installed torch or JAX lacks a private name, and a feature is off for it.

    Example:
        >>> print(PrivateNameWarning("torch 3.0 has no torch._C._swap_tensor_impl"))
        torch 3.0 has no torch._C._swap_tensor_impl [ISO016]
    """


class DistributedError(CodedError, RuntimeError, code="ISO011"):
    """The processes of a run cannot be started together, do not agree, or one of them failed.

    Example:
        >>> from isoshard.core.processes.launchers import launch_from
        >>> try:
        ...     launch_from({"RANK": "0", "WORLD_SIZE": "4"})
        ... except DistributedError as error:
        ...     print(str(error).splitlines()[:2])
        ['the environment of torchrun is not complete:', '  MASTER_ADDR is not set']
    """


class ClusterWarning(CodedWarning, code="ISO014"):
    """A process runs alone where there may be others, or what differs between machines may harm.

    Example:
        >>> print(ClusterWarning("the clock of rank 1 is 60 s behind"))
        the clock of rank 1 is 60 s behind [ISO014]
    """


class CheckpointError(CodedError, RuntimeError, code="ISO032"):
    """A checkpoint could not be written, lacks something, or was altered after it was written.

    Example:
        >>> from isoshard.core.checkpoint import restore
        >>> restore("nowhere", {})
        Traceback (most recent call last):
            ...
        isoshard.core.errors.CheckpointError: there is no checkpoint at nowhere: it does not exist
    """


def no_sharing(name: str, why: str) -> CopyError:
    """The error of an array that cannot be shared although `copy=False`.

    Example:
        >>> print(no_sharing("weight", "the devices are cuda"))
        weight: cannot share memory under copy=False: the devices are cuda. Pass copy=None or copy=True.
    """  # noqa: E501
    return CopyError(
        f"{name}: cannot share memory under copy=False: {why}. Pass copy=None or copy=True."
    )


class CaptureError(CodedError, RuntimeError, code="ISO020"):
    """A compiled step does something that a replay would not repeat.

    The message names the line and the fix.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> step = xs.compile(lambda x: x.item())
        >>> step(torch.ones((), device="jax"))          # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        isoshard.core.errors.CaptureError: ...: a compiled step needs the value of a tensor in ...
    """


class NoValueError(CodedError, TypeError, code="ISO023"):
    """Torch code that JAX traces needs the value of a tensor.

    Example:
        >>> import jax, isoshard as iso, isoshard.torch_bridge
        >>> function = iso.jax_function(lambda x: x if x.sum() > 0 else -x)
        >>> jax.jit(function)(jax.numpy.ones(2))            # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        isoshard.core.errors.NoValueError: ... needs the value of a tensor while JAX traces it ...
    """


def raise_collected(errors: Sequence[ShardingError]) -> None:
    """Raise the errors of many leaves as one error.

    Args:
        errors: the errors, each naming its leaf; may be empty.

    Raises:
        ShardingError: if there are any; the error itself if there is one, the common class if all
            are of one class.

    Example:
        >>> raise_collected([])
        >>> raise_collected([SpecError("a: no axis 'z'"), SpecError("b: no axis 'z'")])
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: 2 leaves cannot be sharded, and nothing was changed:
          a: no axis 'z'
          b: no axis 'z'
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0] from None
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else ShardingError
    lines = "".join(f"\n  {error}" for error in errors)
    raise kind(f"{len(errors)} leaves cannot be sharded, and nothing was changed:{lines}") from None
