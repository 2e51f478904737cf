"""Addresses that distinguish storages of the `jax` device, and their sizes.

Libraries that write checkpoints look for tensors that share memory: `tensor.data_ptr()` and
`tensor.untyped_storage()` answer that. There is nothing to read at such an address: the memory
belongs to JAX, one buffer on each device, and programs replace it.

>>> x = torch.ones(3, device="jax")
>>> x[1:].data_ptr() - x.data_ptr(), x[1:].untyped_storage() == x.untyped_storage()
(4, True)
>>> x.untyped_storage().nbytes(), torch.ones(3, device="jax").data_ptr() == x.data_ptr()
(12, False)
>>> x.untyped_storage().tolist()
Traceback (most recent call last):
...
RuntimeError: the memory of a tensor on the jax device belongs to JAX, and tolist() would read \
or change it; use isoshard.to_jax(tensor), or tensor.cpu() for a CPU tensor with a torch storage

Creating a torch storage on the device raises too: torch would call the device's allocator in C++,
and the process would end.

>>> torch.UntypedStorage(4, device="jax")  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
RuntimeError: the memory of a tensor on the jax device belongs to JAX, and UntypedStorage(..) ...
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, NoReturn

import torch

from ..common import naming
from ..engine.recording import lazy_tensor
from ..engine.values.value import Storage

_FIRST = 1 << 60  # beyond what any process has mapped: who reads there is stopped
_ALIGNED = 512  # bytes, as blocks of torch's CUDA allocator

_lock = threading.Lock()
_next = _FIRST
_addresses: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()


def address_of(tensor: lazy_tensor.LazyTensor) -> int:
    """Where a tensor begins; 0 for one without elements, as in torch."""
    if not tensor.numel():
        return 0
    first = _address(tensor._storage)
    return first + int(tensor.storage_offset()) * tensor.element_size()


def _address(storage: Storage) -> int:
    global _next
    with _lock:
        address = _addresses.get(storage)
        if address is None:
            address = _addresses[storage] = _next
            _next += -(-max(_size(storage), 1) // _ALIGNED) * _ALIGNED
    return address


def _size(storage: Storage) -> int:
    """Bytes of a memory, of all devices together."""
    meta = storage.aval.meta
    return torch.Size(meta.size).numel() * meta.dtype.itemsize


class MemoryHandle:
    """The result of `untyped_storage()`: identity and size of a storage, not its contents.

    Args:
        storage: the memory.
    """

    def __init__(self, storage: Storage) -> None:
        """See the class."""
        self._memory = storage

    def data_ptr(self) -> int:
        """The address that no other memory has; 0 for an empty one."""
        return _address(self._memory) if self.nbytes() else 0

    def nbytes(self) -> int:
        """Bytes, over all devices together."""
        return _size(self._memory)

    size = nbytes
    __len__ = nbytes

    @property
    def device(self) -> torch.device:
        """The logical device."""
        return naming.current()

    @property
    def is_cuda(self) -> bool:
        """It is not torch's CUDA memory, whatever the devices are."""
        return False

    def element_size(self) -> int:
        """As torch's, it counts bytes."""
        return 1

    def is_shared(self) -> bool:
        """Never with another process."""
        return False

    def resizable(self) -> bool:
        """Never."""
        return False

    def _fix_weakref(self) -> MemoryHandle:
        """Itself, as torch's: fake tensors keep storages weakly."""
        return self

    def __eq__(self, other: object) -> bool:
        """Whether it is the same memory."""
        return isinstance(other, MemoryHandle) and other._memory is self._memory

    def __hash__(self) -> int:
        """Of the memory."""
        return hash(self._memory)

    def __repr__(self) -> str:
        """Device, size and address."""
        return f"<memory of {self.nbytes()} bytes on {self.device} at {self.data_ptr():#x}>"

    def __getattr__(self, name: str) -> Any:
        """Raises: what torch's storages have besides would read or change the memory."""
        if name.startswith("__") or not hasattr(torch.UntypedStorage, name):
            raise AttributeError(f"the memory of a tensor on the jax device has no {name!r}")

        def method(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise RuntimeError(refusal(f"{name}()"))

        return method

    def __getitem__(self, index: Any) -> Any:
        """Raises, likewise."""
        raise RuntimeError(refusal("indexing"))

    def __setitem__(self, index: Any, value: Any) -> Any:
        """Raises, likewise."""
        raise RuntimeError(refusal("indexing"))


def refusal(what: str) -> str:
    """Why `what` cannot be done with memory, and what to do instead."""
    return (
        f"the memory of a tensor on the {naming.current().type} device belongs to JAX, and "
        f"{what} would read or change "
        "it; use isoshard.to_jax(tensor), or tensor.cpu() for a CPU tensor with a torch storage"
    )


def register() -> None:
    """Let `torch.UntypedStorage`, which every new storage goes through, reject the device."""
    theirs = torch.UntypedStorage.__new__

    @functools.wraps(theirs)
    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in naming.OURS:
            raise RuntimeError(refusal(f"{cls.__name__}(..)"))
        return theirs(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
