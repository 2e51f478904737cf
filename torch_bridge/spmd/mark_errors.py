"""Errors of marks and meshes, also subclasses of what torch_xla raises, for its scripts.

torch_xla asserts that a mesh and a spec fit, and raises RuntimeError for a tensor that cannot be
marked. Each class here is one of isoshard's and the class that torch_xla raises.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> try:
...     xs.mark_sharding(torch.ones(8, device="jax"), mesh, ("x", None))
... except AssertionError as error:
...     print(isinstance(error, ValueError), type(error).__mro__[1].__name__)
True SpecError
"""

from __future__ import annotations

from isoshard.core.errors import DeviceError, ShardingError, SpecError, UnevenError


class MarkSpecError(SpecError, AssertionError, code="ISO050"):
    """A spec does not fit the mesh or the tensor it is to mark."""


class MeshShapeError(ShardingError, AssertionError, code="ISO051"):
    """Device ids, shape and names of a mesh do not belong together."""


class MeshDeviceError(DeviceError, AssertionError, code="ISO052"):
    """A mesh has more devices than JAX."""


class UnmarkableError(ShardingError, RuntimeError, code="ISO053"):
    """A tensor is on another device, or is marked already."""


class MinibatchError(UnevenError, RuntimeError, code="ISO054"):
    """A process's rows of a batch cannot be divided over its devices."""
