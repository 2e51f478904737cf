"""`parallelize_module`: a plan of styles, applied to the modules it names.

>>> import torch
>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
>>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
>>> mlp = parallelize_module(mlp, mesh["tp"], plan)
>>> mlp[0].weight.partition_spec, mlp[2].weight.partition_spec
(P('tp',), P(None, 'tp'))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch.distributed.tensor import parallel as theirs
from torch.distributed.tensor.parallel import ParallelStyle

from isoshard.torch_bridge._torch_internals.dtensor_fields import APPLY_STYLE
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed.along import require_1d_mesh

from . import prepare, style


def parallelize_module(
    module: torch.nn.Module,
    device_mesh: MeshLike = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> torch.nn.Module:
    """Shard the parameters of a module by styles, which constrain its activations.

    Args:
        module: changed in place; one on another device is moved to the `jax` device. Of one on
            `meta` parameters and buffers become `empty` ones, made in pieces.
        device_mesh: of one dimension, as `mesh["tp"]`; then the others keep what they have. The
            current mesh if not given.
        parallelize_plan: a style, or styles by the names of submodules, whose parts may be patterns
            as `layers.*.mlp.w1`; the empty name is the module itself. Styles may be torch's own.
        src_data_rank: makes no difference: one process holds the data.

    Returns:
        `module`.

    Raises:
        ValueError: the mesh has more than one dimension.
        TypeError: the plan is something else.
        NotImplementedError: a style does not support the module.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import ColwiseParallel
        >>> mesh = init_device_mesh("jax", (8,))
        >>> blocks = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 16)})
        >>> blocks = parallelize_module(blocks, mesh, {"up": ColwiseParallel()})
        >>> blocks["up"].weight.placements
        (Shard(dim=0),)
    """
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module got no parallelize_plan, so it changes nothing", stacklevel=2
        )
        return module
    if not isinstance(parallelize_plan, ParallelStyle | Mapping):
        raise TypeError(
            "parallelize_plan is a ParallelStyle, or a dictionary of them by module name, and "
            f"this is a {type(parallelize_plan).__name__}"
        )
    mesh: Any = require_1d_mesh(device_mesh, "parallelize_module")
    chosen = list(_chosen(module, parallelize_plan))
    for layer_style, target in chosen:  # all checks come before any change
        if isinstance(layer_style, style.LayerStyle):
            layer_style.parameter_placements(target)
    if any(tensor.device.type not in naming.OURS for tensor in _tensors(module)):
        _to_device(module)
    for layer_style, target in chosen:
        layer_style.src_data_rank = src_data_rank
        APPLY_STYLE.of(layer_style)(target, mesh)
    return module


def _chosen(
    module: torch.nn.Module, plan: ParallelStyle | Mapping[str, ParallelStyle]
) -> Iterator[tuple[ParallelStyle, torch.nn.Module]]:
    """Each style with each module that it applies to."""
    for path, layer_style in plan.items() if isinstance(plan, Mapping) else [("", plan)]:
        if not isinstance(layer_style, ParallelStyle):
            raise TypeError(
                f"parallelize_plan[{path!r}] must be a ParallelStyle, and is a "
                f"{type(layer_style).__name__}"
            )
        modules, token = _named(module, path)
        if not modules:
            names = [name for name, _ in module.named_children()]
            warnings.warn(
                f"the key {path!r} of parallelize_plan is skipped: nothing in "
                f"{type(module).__name__} is called {token!r} there; its children are {names}",
                stacklevel=3,
            )
        for target in modules:
            yield _ours(layer_style), target


def _to_device(module: torch.nn.Module) -> None:
    """Move a module to the `jax` device; tensors on `meta` become empty there."""
    moved: dict[torch.Tensor, Any] = {}  # a tensor that two modules share remains shared
    for child in module.modules():
        for name, tensor in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if tensor.is_meta:
                if tensor not in moved:
                    empty = torch.empty_like(tensor, device=naming.current())
                    moved[tensor] = torch.nn.Parameter(empty, tensor.requires_grad)
                child.register_parameter(name, moved[tensor])
        for name, tensor in list(child.named_buffers(recurse=False, remove_duplicate=False)):
            if tensor.is_meta:
                if tensor not in moved:
                    moved[tensor] = torch.empty_like(tensor, device=naming.current())
                setattr(child, name, moved[tensor])
    module.to(naming.current())


def _tensors(module: torch.nn.Module) -> Any:
    yield from module.parameters()
    yield from module.buffers()


def _named(module: torch.nn.Module, path: str) -> tuple[list[torch.nn.Module], str]:
    """The modules whose names fit a pattern, and the part of it that was looked for last."""
    modules, token = [module], ""
    for token in path.split(".") if path else ():
        modules = [
            child
            for parent in modules
            for name, child in parent.named_children()
            if fnmatch(name, token)
        ]
        if not modules:
            break
    return modules, token


def _ours(layer_style: ParallelStyle) -> ParallelStyle:
    """isoshard's style for one of torch's; another style unchanged."""
    kind = type(layer_style).__name__
    if type(layer_style) is not getattr(theirs, kind, None):
        return layer_style
    torch_style: Any = layer_style
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        return getattr(style, kind)(
            input_layouts=torch_style.input_layouts[0],
            output_layouts=torch_style.output_layouts[0],
            use_local_output=torch_style.use_local_output,
        )
    if kind == "SequenceParallel":
        return style.SequenceParallel(
            sequence_dim=torch_style.sequence_sharding[0].dim,
            use_local_output=torch_style.use_local_output,
        )
    if kind == "PrepareModuleInput":
        return _input_of(torch_style)
    if kind == "PrepareModuleOutput":
        return _output_of(torch_style)
    if kind == "PrepareModuleInputOutput":
        both = object.__new__(prepare.PrepareModuleInputOutput)
        both.prepare_module_input = _input_of(torch_style.prepare_module_input)
        both.prepare_module_output = _output_of(torch_style.prepare_module_output)
        return both
    return layer_style


def _input_of(torch_style: Any) -> prepare.PrepareModuleInput:
    return prepare.PrepareModuleInput(
        input_layouts=torch_style.input_layouts,
        desired_input_layouts=torch_style.desired_input_layouts,
        input_kwarg_layouts=torch_style.input_kwarg_layouts,
        desired_input_kwarg_layouts=torch_style.desired_input_kwarg_layouts,
        use_local_output=torch_style.use_local_output,
    )


def _output_of(torch_style: Any) -> prepare.PrepareModuleOutput:
    return prepare.PrepareModuleOutput(
        output_layouts=torch_style.output_layouts,
        desired_output_layouts=torch_style.desired_output_layouts,
        use_local_output=torch_style.use_local_output,
    )
