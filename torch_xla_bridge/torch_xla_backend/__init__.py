"""One spec over torch_xla itself: its tensors marked, read and exchanged with JAX.

Where torch 2.9 and torch_xla 2.9 are installed, a `NamedSharding` annotates tensors of torch_xla,
their layouts are read back as one, and buffers are exchanged through DLPack::

    import torch_xla.runtime as xr
    from isoshard.torch_bridge import torch_xla_backend as backend

    xr.use_spmd()
    mesh = isoshard.make_mesh((2, 4), ("x", "y"))
    t = backend.mark(torch.ones(8, 8).to("xla"), mesh, P("x", None))
    backend.sharding_of(t)       # NamedSharding(.., P('x',)); of a result: what XLA gave it
    a = backend.to_jax(t)        # a jax.Array with that layout

Devices meet by their number: torch_xla's device `i` is `jax.devices()[i]`, so both need equally
many (`CPU_NUM_DEVICES=8`, `isoshard.simulate_devices(8)`). That torch cannot have the `jax` device,
and loading this registers none: `isoshard.sharding_of`, `to_jax` and `to_torch` then mean tensors
of torch_xla.
"""

if __name__ != "isoshard.torch_xla_bridge.torch_xla_backend":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla_backend, not {__name__}")

from . import backend_framework as _framework
from .backend_exchange import from_jax, to_jax
from .backend_marks import mark, sharding_of
from .backend_mesh import mesh_from_torch_xla, mesh_to_torch_xla

__all__ = [
    "from_jax",
    "mark",
    "mesh_from_torch_xla",
    "mesh_to_torch_xla",
    "sharding_of",
    "to_jax",
]

_framework.register_if_old()
