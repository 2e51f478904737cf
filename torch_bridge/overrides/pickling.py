"""How tensors on the `jax` device are pickled: as torch pickles those of its other devices.

A pickle has the elements as a CPU tensor, and names only functions of torch that
`torch.load(weights_only=True)` allows. So a checkpoint written here is read like any other, also
where isoshard is not installed:

>>> import io
>>> file = io.BytesIO()
>>> torch.save(torch.nn.Linear(2, 1).to("jax").state_dict(), file)
>>> [torch.load(file, map_location=place)["weight"].device.type
...  for place in (None, "cpu", "jax") if file.seek(0) == 0]
['jax', 'cpu', 'jax']

Tensors over the same memory are gathered and written once, as in torch. The layout is not kept.

Loading to the device takes a way of its own: torch would allocate memory there, and the process
would end.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime.private_names import or_absent
from isoshard.torch_bridge._torch_internals.tensor_fields import rebuild_from_cpu, rebuild_parameter
from isoshard.torch_bridge._torch_internals.undocumented import WeakIdKeyDictionary
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.operators.reading import to_host
from isoshard.torch_bridge.engine.recording import lazy_tensor

# Gathered tensors that a pickler references, by the value they were gathered from, and the view.
_GATHERED: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
_VALUES: Any = or_absent(WeakIdKeyDictionary)


def reduced(tensor: lazy_tensor.LazyTensor) -> tuple[Any, tuple[Any, ...]]:
    """What `tensor.__reduce_ex__` returns.

    Args:
        tensor: on the `jax` device, any dtype; a parameter stays one.
    """
    if isinstance(tensor, torch.nn.Parameter):
        hooks: Any = collections.OrderedDict()
        return rebuild_parameter, (tensor.detach(), tensor.requires_grad, hooks)
    arguments = (_gathered(tensor), tensor.dtype, "jax:0", tensor.requires_grad)
    return rebuild_from_cpu, arguments


def _gathered(tensor: lazy_tensor.LazyTensor) -> torch.Tensor:
    """The elements on the CPU; the same tensor as before while that has a reference."""
    value = tensor._storage.value
    key = (id(value), tensor._chain)
    cached = _GATHERED.get(key)
    if cached is not None and cached.dtype == tensor.dtype:
        return cached
    metrics.count("gathers")
    host = to_host(tensor)
    _VALUES[host] = value  # as long as the key lives, no other value can have this one's id
    _GATHERED[key] = host
    return host


class _Arriving(torch.UntypedStorage):
    """Memory that `torch.load` read for the `jax` device: on the CPU until its tensors are created.

    Attributes:
        tensors: those made so far, by dtype and place in the memory: tied weights stay tied.
    """

    tensors: dict[Any, Any]

    @property
    def device(self) -> torch.device:
        """Where torch makes the tensor that will take this memory."""
        return torch.device("jax:0")


def _arrive(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """What `torch.load(map_location="jax")` does with each storage."""
    if location.partition(":")[0] not in naming.OURS:
        return None
    naming.check_index(location)
    arriving = _Arriving(storage.nbytes())
    arriving.copy_(storage)
    arriving.tensors = {}
    return arriving


def _set_storage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`set_(storage, offset, size, stride)`, by which torch builds a tensor that it loads."""
    target, storage, *view = args
    if not isinstance(storage, _Arriving):
        raise RuntimeError(
            f"a tensor on the {naming.current().type} device cannot take a torch storage as "
            "its memory; make a CPU "
            f"tensor of it and move that with {naming.moving()}"
        )
    key = (target.dtype, str(view))
    tensor: Any = storage.tensors.get(key)
    if tensor is None:
        host = torch.empty(0, dtype=target.dtype).set_(storage, *view)
        tensor = storage.tensors[key] = host.to("jax")
    lazy_tensor.adopt(target, tensor)
    return target


def register() -> None:
    """Teach `torch.load` the location `jax`; once, when the device is registered."""
    dispatch.SPECIAL["aten::set_.source_Storage_storage_offset"] = _set_storage
    # Before torch's own entry (23) for devices outside its tree, which would allocate memory.
    arrive: Any = _arrive
    torch.serialization.register_package(15, lambda storage: None, arrive)
