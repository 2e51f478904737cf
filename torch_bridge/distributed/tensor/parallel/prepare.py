"""Styles that redistribute the inputs and outputs of a module.

`input_layouts` is the layout in which a tensor arrives, global or local, and the desired layout is
the one it has inside; see `isoshard.torch_bridge.distributed.tensor.parallel.style`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from isoshard.torch_bridge._torch_internals.dtensor_fields import APPLY_STYLE
from isoshard.torch_bridge.distributed.along import constraint, require_1d_mesh

from .module_border import any_local_tensor, leaves


class PrepareModuleInput(ParallelStyle):
    """Redistribute the inputs of a module.

    Args:
        input_layouts: how each positional input arrives; None for one that is left alone.
        desired_input_layouts: of each inside the module; None keeps it.
        input_kwarg_layouts: how inputs passed by name arrive; others are left alone.
        desired_input_kwarg_layouts: of these inside the module.
        use_local_output: whether the module gets local tensors of local inputs; otherwise it
            gets the whole that they make.

    Raises:
        ValueError: there are not as many desired layouts as layouts, or they name other inputs.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> rows = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        >>> module = parallelize_module(torch.nn.Identity(), init_device_mesh("jax", (8,)), rows)
        >>> module(torch.ones(8, 4, device="jax")).placements
        (Shard(dim=0),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ):
        """See the class."""
        self.input_layouts = _several(input_layouts)
        self.desired_input_layouts = _several(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            _check_as_many("input_layouts", self.input_layouts, self.desired_input_layouts)
        arriving, desired = set(self.input_kwarg_layouts), set(self.desired_input_kwarg_layouts)
        if arriving != desired:
            raise _LayoutsError(
                "input_kwarg_layouts and desired_input_kwarg_layouts name the same inputs, and "
                f"these do not: {sorted(arriving)} and {sorted(desired)}"
            )

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        mesh = require_1d_mesh(device_mesh, "PrepareModuleInput")
        prepared = functools.partial(_prepared, mesh, self.use_local_output, False)

        def enter(module: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            if self.input_layouts is not None and self.desired_input_layouts is not None:
                _check_values("input", module, inputs, self.input_layouts)
                triples = zip(inputs, self.input_layouts, self.desired_input_layouts, strict=True)
                inputs = tuple(prepared(triple, "input", module) for triple in triples)
            changed = {
                name: prepared(
                    (
                        named[name],
                        self.input_kwarg_layouts[name],
                        self.desired_input_kwarg_layouts[name],
                    ),
                    name,
                    module,
                )
                for name in self.input_kwarg_layouts
                if name in named
            }
            return inputs, {**named, **changed}

        module.register_forward_pre_hook(constraint(enter, mesh, repr(self)), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        """As the constructor."""
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Redistribute the outputs of a module.

    Args:
        output_layouts: how each output comes out of the module; None for one that is left alone.
        desired_output_layouts: of each outside the module.
        use_local_output: whether outputs are local if inputs are, or if the module returns local
            tensors; otherwise they are global.

    Raises:
        ValueError: there are not as many desired layouts as layouts.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> last = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        >>> linear = parallelize_module(torch.nn.Linear(4, 8), init_device_mesh("jax", (8,)), last)
        >>> linear(torch.ones(2, 4, device="jax")).placements
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ):
        """See the class."""
        self.output_layouts = _several(output_layouts) or ()
        self.desired_output_layouts = _several(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_as_many("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        mesh = require_1d_mesh(device_mesh, "PrepareModuleOutput")

        def leave(module: torch.nn.Module, inputs: Any, named: Any, outputs: Any) -> Any:
            output_leaves = outputs if isinstance(outputs, tuple) else (outputs,)
            _check_values("output", module, output_leaves, self.output_layouts)
            triples = zip(
                output_leaves, self.output_layouts, self.desired_output_layouts, strict=True
            )
            from_local = any_local_tensor(inputs, named)
            results: tuple[Any, ...] = tuple(
                _prepared(mesh, self.use_local_output, from_local, triple, "output", module)
                for triple in triples
            )
            return results[0] if len(results) == 1 else results

        module.register_forward_hook(constraint(leave, mesh, repr(self)), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        """As the constructor."""
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        input_layouts: as for `PrepareModuleInput`, and so for the next three.
        desired_input_layouts: see `PrepareModuleInput`.
        input_kwarg_layouts: see `PrepareModuleInput`.
        desired_input_kwarg_layouts: see `PrepareModuleInput`.
        use_local_input: as `use_local_output` of `PrepareModuleInput`.
        output_layouts: as for `PrepareModuleOutput`, and so for the last two.
        desired_output_layouts: see `PrepareModuleOutput`.
        use_local_output: see `PrepareModuleOutput`.

    Raises:
        ValueError: there are not as many desired layouts as layouts, or they name other inputs.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> from torch.distributed.tensor import Shard
        >>> inside = {"input_layouts": Shard(0), "desired_input_layouts": Shard(0)}
        >>> after = {"output_layouts": Shard(0), "desired_output_layouts": Shard(1)}
        >>> both = PrepareModuleInputOutput(**inside, **after)
        >>> relu = parallelize_module(torch.nn.ReLU(), init_device_mesh("jax", (8,)), both)
        >>> relu(torch.ones(8, 8, device="jax")).placements
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ):
        """See the class."""
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        APPLY_STYLE.of(self.prepare_module_input)(module, device_mesh)
        APPLY_STYLE.of(self.prepare_module_output)(module, device_mesh)
        return module

    def __repr__(self) -> str:
        """Both parts."""
        return (
            f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"
        )


def _several(layouts: Any) -> tuple[Any, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts and tuple(layouts)


class _LayoutsError(ValueError, AssertionError):
    """Layouts do not fit the values; torch asserts it."""


def _check_as_many(argument: str, values: Sequence[Any], desired: Sequence[Any] | None) -> None:
    if desired is None or len(values) != len(desired):
        raise _LayoutsError(
            f"{argument} and desired_{argument} should have same length! They are paired, and "
            f"these do not: {tuple(values)} and {desired}"
        )


def _check_values(
    argument: str, module: Any, values: Sequence[Any], layouts: Sequence[Any]
) -> None:
    if len(values) != len(layouts):
        raise ValueError(
            f"module {argument}s and {argument}_layouts should have same length! "
            f"{type(module).__name__} has {len(values)} {argument}s, and {argument}_layouts has "
            f"{len(layouts)} entries; give one each, None for one that is left alone"
        )


def _prepared(
    mesh: Any,
    to_local: bool,
    from_local: bool,
    triple: tuple[Any, Any, Any],
    argument: str,
    module: torch.nn.Module,
) -> Any:
    """The value redistributed from its present layout to the desired one."""
    value, present, desired = triple
    if present is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise _LayoutsError(
            f"the layout {present} is set for {argument} of {type(module).__name__}, which is no "
            f"tensor but a {type(value).__name__}; give None for it"
        )
    desired = present if desired is None else desired
    return leaves(value, mesh, present, desired, to_local=to_local, from_local=from_local)
