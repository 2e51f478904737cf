"""FSDP by annotation: parameters split over the devices, batches too, and one process for all.

>>> import isoshard.torch_bridge as xs
>>> from isoshard.torch_bridge.spmd import Mesh
>>> mesh = Mesh(range(8), (8,), ("fsdp",))
>>> model = SpmdFullyShardedDataParallel(torch.nn.Linear(4, 16), mesh=mesh)
>>> model.weight.sharding_spec
'{devices=[8,1]0,1,2,3,4,5,6,7}'
>>> model(torch.ones(8, 4, device="jax")).sharding_spec
'{devices=[8,1]0,1,2,3,4,5,6,7}'
>>> list(model.state_dict())
['_orig_module.weight', '_orig_module.bias']

A parameter is split along its longest axis that the devices of the mesh axis "fsdp" divide. XLA
gathers it where it is used and scatters its gradient; wrap the layers of a deep model one by one
(`auto_wrap_policy`), so that the output of each is split by rows and only one layer need be not
split at a time. Parameters marked before keep their layout. Optimizer state follows the parameters.

After `use_spmd(auto=True)` that is the layout until the first compiled step: it finds a plan over
the wrapper's mesh, by which the parameters are sharded (`isoshard.torch_bridge.auto_plan`). The
mesh may then be left out; it is all devices, in the shape of `XLA_AUTO_SPMD_MESH`.

One whose axes are all divided unevenly stays replicated, with an `UnevenWarning`; so
does the output of a batch that does not divide.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jax.sharding import NamedSharding

from isoshard.core.kit import named_sharding
from isoshard.torch_bridge.kit import (
    ByLayer,
    Mesh,
    apply_backward_optimization_barrier,
    auto_mesh,
    auto_spmd,
    get_global_mesh,
    mark_for_now,
    mark_sharding,
    marks,
    mesh_from,
    naming,
    request_plan,
)
from isoshard.torch_xla_bridge.torch_xla.distributed.fsdp.wrap import recursive_wrap

AXIS = "fsdp"


class SpmdFullyShardedDataParallel(torch.nn.Module):
    """A module with its parameters split over the mesh axis "fsdp", and its output by rows.

    Args:
        module: moved to the `jax` device; its parameters stay the same objects.
        mesh: with an axis "fsdp"; by default the one given to `set_global_mesh`, or in automatic
            mode all devices.
        shard_output: called with the output and the mesh, to mark what in it should be split. By
            default that is axis 0 of the output, of the first tensor of a tuple, or of `logits` or
            `last_hidden_state` in a mapping or dataclass.
        auto_wrap_policy: which modules below to wrap as well, such as `functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block})`.
        auto_wrapper_callable: makes the wrappers of those; by default this class. Wrap with
            `checkpoint_module` here to compute activations again in backward.
        extra_data_axis: another mesh axis by which the rows of a batch are split, outside "fsdp".

    Raises:
        RuntimeError: `module` is wrapped already, or has no `forward`.
        ValueError: there is no mesh, it lacks an axis, or a module below is wrapped already while
            `auto_wrap_policy` is given.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: Mesh | None = None,
        shard_output: Callable[[Any, Any], Any] | None = None,
        *,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., torch.nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ):
        """See the class."""
        _check_module(module)
        mesh = _checked_mesh(mesh, extra_data_axis)
        super().__init__()
        if auto_wrap_policy is not None:
            options: dict[str, Any] = {"mesh": mesh, "shard_output": shard_output}
            if extra_data_axis is not None:
                options["extra_data_axis"] = extra_data_axis
            _check_unwrapped(module)
            recursive_wrap(
                module,
                auto_wrap_policy,
                auto_wrapper_callable or SpmdFullyShardedDataParallel,
                (),
                (),
                only_wrap_children=True,
                **options,
            )
        self._orig_module: Any = module.to(naming.current())
        self._mesh = mesh
        layouts, automatic = _layouts(module, mesh), auto_spmd()
        for name, parameter in module.named_parameters():
            if marks.marked(parameter) is None:
                mark = mark_for_now if automatic else mark_sharding
                mark(parameter, mesh, layouts[name].spec)
        if automatic:
            request_plan(module, mesh)
        apply_backward_optimization_barrier(module)
        self._shard_output = shard_output or functools.partial(
            shard_first, extra_data_axis=extra_data_axis
        )

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, and split its output."""
        output = self.module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have, the wrapped module may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_module":  # not there yet: asked while this object is being made
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """An item of the wrapped module, if it is a `Sequential` or the like."""
        return self._orig_module.__getitem__(key)


def shard_first(output: Any, mesh: Any, extra_data_axis: str | None = None) -> None:
    """Split the tensor that a module's output is about along axis 0.

    Args:
        output: a tensor; a tuple or list, of which the first is taken; or a mapping or dataclass
            with `logits` or `last_hidden_state`.
        mesh: with an axis "fsdp".
        extra_data_axis: another axis, outside "fsdp".

    Raises:
        RuntimeError: there is no such tensor.
    """
    tensor = output
    if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
        get = output.get if isinstance(output, Mapping) else functools.partial(_attribute, output)
        tensor = get("logits") if get("logits") is not None else get("last_hidden_state")
    elif isinstance(output, tuple | list) and output:
        tensor = output[0]
        if len(output) > 1:
            warnings.warn(
                f"of an output of {len(output)} parts only the first is split over {AXIS!r}; "
                "pass shard_output=.. to choose others",
                stacklevel=3,
            )
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(
            f"which part of an output of type {type(output).__name__} is to be split is not "
            "known; pass shard_output, a function of the output and the mesh that calls "
            "xs.mark_sharding"
        )
    rows = AXIS if extra_data_axis is None else (extra_data_axis, AXIS)
    mark_sharding(tensor, mesh, (rows, *(None,) * (tensor.dim() - 1))[: tensor.dim()])


def _attribute(obj: Any, name: str) -> Any:
    return getattr(obj, name, None)


def _layouts(module: torch.nn.Module, mesh: Mesh) -> dict[str, NamedSharding]:
    """A layout for each tensor; stacked layers are split as one layer would be."""
    devices, grid = mesh.shape()[AXIS], mesh.get_jax_mesh()
    layers = ByLayer(module)
    return layers.stack_shardings(
        {
            name: named_sharding(_spec(tensor.shape, devices), grid, tensor.dim())
            for name, tensor in layers.tensors.items()
        }
    )


def _spec(shape: Sequence[int], devices: int) -> tuple[str | None, ...]:
    """The longest axis that divides is split; if none does, the longest of all."""
    axes = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    chosen = next((axis for axis in axes if shape[axis] % devices == 0), axes[0] if axes else -1)
    return tuple(AXIS if axis == chosen else None for axis in range(len(shape)))


def _check_module(module: torch.nn.Module) -> None:
    if isinstance(module, SpmdFullyShardedDataParallel):
        raise RuntimeError(
            "the module is a SpmdFullyShardedDataParallel already; to nest them, wrap the modules "
            "inside first and the outermost last"
        )
    forward = getattr(module, "forward", None)
    if forward is None or getattr(forward, "__func__", None) is torch.nn.Module.forward:
        raise RuntimeError(
            f"{type(module).__name__} has no forward method, and the wrapper acts when the module "
            "is called; wrap the modules in it (those of an nn.ModuleList one by one)"
        )


def _checked_mesh(mesh: Any, extra_data_axis: str | None) -> Mesh:
    mesh = get_global_mesh() if mesh is None else mesh_from(mesh)
    if mesh is None and auto_spmd():
        shape = auto_mesh().mesh_shape
        others = ("model", *(f"model{index}" for index in range(2, len(shape))))
        mesh = Mesh(range(math.prod(shape)), shape, (AXIS, *others)[: len(shape)])
    if mesh is None:
        raise ValueError(
            "there is no mesh argument and no global mesh; pass mesh=.., or call "
            "xs.set_global_mesh(mesh) first"
        )
    names = mesh.axis_names or ()
    if AXIS not in names:
        raise ValueError(
            f"the mesh must have an axis {AXIS!r}; its axes are {names or 'without names'}"
        )
    if extra_data_axis is not None and extra_data_axis not in names:
        raise ValueError(f"the mesh has no axis {extra_data_axis!r}; its axes are {names}")
    return mesh


def _check_unwrapped(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, SpmdFullyShardedDataParallel):
            raise ValueError(
                f"{name} is a SpmdFullyShardedDataParallel already; wrap modules either one by "
                "one, or by an auto_wrap_policy"
            )
