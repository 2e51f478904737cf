"""`DeviceMesh` with a single controller: its device type, and errors for ranks and groups."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import Opaque

_OTHER_NAMES = {"cuda": "gpu", "rocm": "gpu"}


class DeviceType(str):
    """The device type of a mesh: `"jax"`, which equals its other name `"xla"`.

    torch's `distribute_tensor` reads `"xla"` before it leaves a mesh to another library.

    >>> DeviceType("jax") == "xla", DeviceType("jax") == "cuda", str(DeviceType("jax"))
    (True, False, 'jax')
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """As strings, but for the names of the one device."""
        return str.__eq__(self, other) is True or other in ("jax", "xla")

    def __ne__(self, other: object) -> bool:
        """The opposite of `==`."""
        return not self == other

    __hash__ = str.__hash__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that makes it again, and the names in it; for graphs of `torch.compile`."""
        return f"DeviceType({str.__repr__(self)})", {"DeviceType": DeviceType}


class RankQueries:
    """The methods of torch's `DeviceMesh` that need the rank of a process; they raise."""

    def get_rank(self) -> NoReturn:
        """Not supported: one process drives all devices.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("get_rank")

    def get_local_rank(self, mesh_dim: int | str | None = None) -> NoReturn:
        """Not supported: one process drives all devices.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("get_local_rank")

    def get_coordinate(self) -> NoReturn:
        """Not supported: one process drives all devices.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("get_coordinate")

    def get_group(self, mesh_dim: int | str | None = None) -> NoReturn:
        """Not supported: there are no process groups.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("get_group")

    @staticmethod
    def from_group(*_: Opaque, **__: Opaque) -> NoReturn:
        """Not supported: there are no process groups.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("from_group")

    def get_all_groups(self) -> NoReturn:
        """Not supported: there are no process groups.

        Raises:
            RuntimeError: always.
        """
        _raise_unsupported("get_all_groups")


def check_type(device_type: str) -> None:
    """Raise ShardingError if JAX has no devices of a type."""
    kind = str(device_type)
    if kind in naming.OURS:
        return
    have = jax.default_backend()
    if have not in (kind, _OTHER_NAMES.get(kind)):
        raise ShardingError(
            f"a mesh of device type {kind!r} is not possible here: JAX has devices of type "
            f"{have!r}. Write 'jax', which is whatever JAX has, without an index."
        )


def check_backend(backend_override: Opaque) -> None:
    """Raise ShardingError if a communication backend is chosen."""
    if backend_override is not None:
        raise ShardingError(
            f"backend_override={backend_override!r} chooses how processes communicate, and here "
            "one process drives all devices; leave it out"
        )


def check_names(names: tuple[str, ...] | None, shape: tuple[int, ...]) -> None:
    """Raise RuntimeError unless the dimensions of a mesh have one name each, or none."""
    if names is None:
        return
    if len(names) != len(shape):
        raise RuntimeError(
            f"{len(names)} names {names} for a mesh of {len(shape)} dimensions {shape}; give one "
            "name per dimension"
        )
    if len(set(names)) < len(names):
        raise RuntimeError(f"the names of mesh dimensions must differ, and they are {names}")


def _raise_unsupported(method: str) -> NoReturn:
    raise RuntimeError(
        f"{method}() needs the rank of a process in the mesh, and one process drives all "
        "devices. Read all shards with tensor.local_shards; for code per device, see to_local() "
        "and local_map. Under torchrun use torch's own DeviceMesh."
    )
