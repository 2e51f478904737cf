"""The inputs of a compiled model: by position or name, checked, sharded.

>>> from onnx import helper
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 8])
>>> wanted = Inputs(Graph(helper.make_model(helper.make_graph([], "g", [x], []))))
>>> wanted.bind((np.zeros((2, 8)),), {})
Traceback (most recent call last):
    ...
isoshard.onnx_bridge.errors.ModelError: the inputs do not fit the model, which takes x: float32[batch, 8]:
  x is float64, not float32; convert it: x.astype('float32')
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.kit import Tracer, auto, device_dtype, on_mesh, shard, under_auto

from ..errors import ModelError
from ..reading.graph import Graph


class Inputs:
    """What a model takes.

    Args:
        graph: the model's.
    """

    def __init__(self, graph: Graph) -> None:
        """Read names, shapes and dtypes."""
        self.names = graph.inputs
        self._shapes = {name: graph.shape(name) for name in self.names}
        self._dtypes = {name: graph.dtype(name) for name in self.names}

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct] | None:
        """The inputs as shapes and dtypes, or None if a shape or dtype is not static."""
        shapes = {}
        for name in self.names:
            shape, dtype = self._shapes[name], self._dtypes[name]
            if dtype is None or shape is None:
                return None
            sizes = tuple(size for size in shape if isinstance(size, int))
            if len(sizes) != len(shape):
                return None
            shapes[name] = jax.ShapeDtypeStruct(sizes, device_dtype(dtype, name))
        return shapes

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the arguments of a call in order.

        Raises:
            ModelError: one is missing, unknown, passed twice, or of another rank, size or dtype;
                all errors in one message.
        """
        errors = [f"there is no input {name!r}" for name in named if name not in self.names]
        if len(args) > len(self.names):
            errors.append(f"{len(args)} were passed by position")
        bound = dict(zip(self.names, args, strict=False))
        errors += [f"{name} is passed twice" for name in named if name in bound]
        bound = {**bound, **named}
        sizes: dict[str, tuple[int, str]] = {}
        for name in self.names:
            if name not in bound:
                errors.append(f"{name} is missing")
                continue
            if not hasattr(bound[name], "dtype"):
                bound[name] = np.asarray(bound[name], self._dtypes[name])
            errors += self._errors(name, bound[name], sizes)
        if errors:
            lines = "".join(f"\n  {error}" for error in errors)
            raise ModelError(
                f"the inputs do not fit the model, which takes {self._listed()}:{lines}"
            ) from None
        return {name: bound[name] for name in self.names}

    def _errors(self, name: str, x: Any, sizes: dict[str, tuple[int, str]]) -> list[str]:
        shape, dtype = self._shapes[name], self._dtypes[name]
        errors = []
        if dtype is not None and x.dtype not in (dtype, device_dtype(dtype, name)):
            errors.append(f"{name} is {x.dtype}, not {dtype}; convert it: {name}.astype('{dtype}')")
        if shape is None:
            return errors
        if len(x.shape) != len(shape):
            return [
                *errors,
                f"{name} has shape {tuple(x.shape)}, which is not of rank {len(shape)}",
            ]
        for axis, (want, have) in enumerate(zip(shape, x.shape, strict=True)):
            before, other = (
                sizes.setdefault(want, (have, name)) if isinstance(want, str) else (want, "")
            )
            if before is not None and before != have:
                since = f" as in {other} ({want})" if other else ""
                errors.append(f"{name}: axis {axis} has size {have}, not {before}{since}")
        return errors

    def _listed(self) -> str:
        return ", ".join(
            f"{name}: {self._dtypes[name]}"
            + (
                ""
                if shape is None
                else f"[{', '.join('?' if s is None else str(s) for s in shape)}]"
            )
            for name, shape in self._shapes.items()
        )


def placed(x: Any, sharding: NamedSharding, name: str) -> Any:
    """Reshard a value as a stage requires."""
    if isinstance(x, Tracer):  # the program is computed under Auto axes
        return jax.device_put(under_auto(x), on_mesh(sharding, auto(sharding.mesh)))
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    return shard(x, sharding.mesh, sharding, name=name)
