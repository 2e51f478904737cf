"""A program of `torch.export` as StableHLO, which runs without torch's model code.

>>> import torch
>>> model = torch.nn.Linear(3, 2)
>>> x = torch.ones(4, 3)
>>> program = to_stablehlo(torch.export.export(model, (x,)))
>>> torch.allclose(program(x), model(x))
True
>>> "stablehlo.dot_general" in program.get_stablehlo_text()
True

64-bit integers and floats stay what they are, whether or not `jax_enable_x64` is on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import export

from isoshard.torch_bridge.kit import (
    Torch,
    from_numpy,
    jax_function,
    lazy_tensor,
    logical_dtype,
    pytree,
    to_numpy,
)

from . import stablehlo_bundle as bundles
from .lowered import NO_MESH
from .stablehlo_bundle import (
    InputLocation,
    StableHLOExportOptions,
    StableHLOFunc,
    StableHLOFunctionMeta,
    StableHLOModelBundle,
    VariableSignature,
    VariableType,
)


class StableHLOGraphModule:
    """A program in StableHLO that can be called.

    Args:
        bundle: programs and weights.
    """

    def __init__(self, bundle: StableHLOModelBundle):
        """See the class."""
        self._bundle = bundle
        self._functions = {function.meta.name: function for function in bundle.stablehlo_funcs}
        self._default = bundle.stablehlo_funcs[0].meta.name
        self._exported: dict[str, export.Exported] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the first program."""
        return self.evaluate(self._default, args)

    def evaluate(self, method_name: str, args: Sequence[Any]) -> Any:
        """Run a program.

        Args:
            method_name: `"forward"`.
            args: tensors of the shapes and dtypes it was exported with, nested as then.

        Returns:
            Its result: tensors on the `jax` device if an argument is one, else on the CPU.

        Raises:
            KeyError: there is no such program, or a weight was not saved with it.
            ValueError: the arguments do not fit.
        """
        function = self._function(method_name)
        leaves = pytree.tree_leaves(tuple(args))
        with jax.enable_x64(True):
            inputs = self._inputs(function.meta, leaves)
            if method_name not in self._exported:
                self._exported[method_name] = _runnable(function)
            results = self._exported[method_name].call(*inputs)
            on_jax = any(isinstance(leaf, lazy_tensor.LazyTensor) for leaf in leaves)
            tensors = [Torch().from_jax(array) if on_jax else _on_host(array) for array in results]
        spec = function.meta.output_pytree_spec
        return (
            tensors if spec is None else pytree.tree_unflatten(tensors, pytree.treespec_loads(spec))
        )

    def _inputs(self, meta: StableHLOFunctionMeta, leaves: Sequence[Any]) -> list[Any]:
        count = sum(location.type_ is VariableType.INPUT_ARG for location in meta.input_locations)
        count += len(meta.unused_inputs)
        if len(leaves) != count:
            raise ValueError(f"{meta.name} takes {count} arguments, and got {len(leaves)}")
        inputs = []
        for where, signature in zip(meta.input_locations, meta.input_signature, strict=True):
            if where.type_ is VariableType.PARAMETER:
                if where.name not in self._bundle.state_dict:
                    raise KeyError(
                        f"{meta.name} needs the weight {where.name}, which was not exported or "
                        "saved with it (export_weights, save_weights)"
                    )
                inputs.append(self._bundle.state_dict[where.name])
                continue
            if where.type_ is VariableType.CONSTANT:
                inputs.append(self._bundle.additional_constants[where.position])
                continue
            array = _array_of(leaves[where.position])
            if list(array.shape) != signature.shape or array.dtype.name != signature.dtype:
                raise ValueError(
                    f"argument {where.position} of {meta.name} must be of shape "
                    f"{tuple(signature.shape)} and {signature.dtype}, as it was exported; it is of "
                    f"shape {tuple(array.shape)} and {array.dtype.name}"
                )
            inputs.append(array)
        return inputs

    def _function(self, name: str | None) -> StableHLOFunc:
        function = self._functions.get(self._default if name is None else name)
        if function is None:
            raise KeyError(f"there is no program {name!r}; there are {sorted(self._functions)}")
        return function

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """A program as portable StableHLO bytecode."""
        return self._function(method_name).bytecode

    def get_stablehlo_text(self, method_name: str | None = None) -> str | None:
        """A program as StableHLO text; None if it was exported without."""
        return self._function(method_name).text

    def save(
        self,
        directory_path: str | os.PathLike[str],
        options: StableHLOExportOptions | None = None,
    ) -> None:
        """Write it to a folder; see `stablehlo_bundle`."""
        weights = options is None or options.save_weights
        bundles.save(self._bundle, directory_path, weights=weights)

    @classmethod
    def load(cls, directory_path: str | os.PathLike[str]) -> StableHLOGraphModule:
        """Read what `save` wrote."""
        return cls(bundles.load(directory_path))


def to_stablehlo(
    exported: torch.export.ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """Make a StableHLO program of one of `torch.export`.

    Raises:
        ValueError: there are no example arguments, keyword arguments, dynamic shapes, or an option
            asks for what is not here.
    """
    options = options or StableHLOExportOptions()
    args = _example(exported, options)
    module = _on_jax(exported)
    leaves = pytree.tree_leaves(args)
    tensor_indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    structure = pytree.tree_structure(args)
    with jax.enable_x64(True), jax.set_mesh(NO_MESH):
        function = jax_function(module)
        params = {name: np.asarray(array) for name, array in function.params.items()}
        names = list(params)

        def forward(*arrays: Any) -> Any:
            filled = list(leaves)
            for index, array in zip(tensor_indices, arrays[len(names) :], strict=True):
                filled[index] = array
            weights = dict(zip(names, arrays, strict=False))
            return pytree.tree_leaves(function(weights, *pytree.tree_unflatten(filled, structure)))

        inputs = [*params.values(), *(_array_of(leaves[index]) for index in tensor_indices)]
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs]
        exported_program = export.export(jax.jit(forward, keep_unused=True))(*shapes)
    constants = [name for name in names if name not in exported.state_dict]
    where = [
        InputLocation.constant(constants.index(name))
        if name in constants
        else InputLocation.parameter(name)
        for name in names
    ]
    where += [InputLocation.input_arg(index) for index in tensor_indices]
    signatures = [VariableSignature(list(array.shape), array.dtype.name) for array in inputs]
    unused = [
        (InputLocation.input_arg(n), VariableSignature([], type(leaf).__name__))
        for n, leaf in enumerate(leaves)
        if n not in tensor_indices
    ]
    specs: Any = exported.call_spec
    meta = StableHLOFunctionMeta(
        "forward",
        "0.0.0",
        signatures,
        [
            VariableSignature(list(array.shape), array.dtype.name)
            for array in exported_program.out_avals
        ],
        where,
        unused,
        pytree.treespec_dumps(specs.in_spec),
        pytree.treespec_dumps(specs.out_spec),
    )
    text = exported_program.mlir_module() if options.include_human_readable_text else None
    code = StableHLOFunc(meta, bytes(exported_program.mlir_module_serialized), text)
    weights = {name: params[name] for name in names if name not in constants}
    return StableHLOGraphModule(
        StableHLOModelBundle(
            weights if options.export_weights else {},
            [params[name] for name in constants],
            [code],
        )
    )


def save_as_stablehlo(
    exported_model: torch.export.ExportedProgram,
    stablehlo_dir: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a program to a folder; `StableHLOGraphModule.load` reads it."""
    to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a module to a folder."""
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)


def _runnable(function: StableHLOFunc) -> export.Exported:
    """A program for JAX to call: one with this signature, with that one's code in it."""
    meta = function.meta
    shapes = [
        jax.ShapeDtypeStruct(signature.shape, signature.dtype) for signature in meta.input_signature
    ]

    def blank(*arrays: Any) -> list[Any]:
        return [jnp.zeros(signature.shape, signature.dtype) for signature in meta.output_signature]

    empty = export.export(jax.jit(blank, keep_unused=True))(*shapes)
    return dataclasses.replace(empty, mlir_module_serialized=function.bytecode)


def _example(exported: Any, options: StableHLOExportOptions) -> tuple[Any, ...]:
    args, kwargs = exported.example_inputs or (None, None)
    if options.override_tracing_arguments is not None:
        args, kwargs = options.override_tracing_arguments, options.override_tracing_kwargs
    if args is None:
        raise ValueError(
            "the exported program has no example_inputs; pass "
            "StableHLOExportOptions(override_tracing_arguments=(..))"
        )
    if kwargs:
        raise ValueError(
            f"the exported program takes keyword arguments ({', '.join(kwargs)}), and a StableHLO "
            "program has positional ones only; export a module that takes them by position"
        )
    if exported.range_constraints:
        raise ValueError(
            "the exported program has dynamic shapes, and a StableHLO program made here has fixed "
            "ones; export it without dynamic_shapes, once for each shape"
        )
    if options.custom_ops_allowed_in_graph or options.export_node_metadata:
        raise ValueError(
            "custom_ops_allowed_in_graph and export_node_metadata are options of torch_xla's "
            "exporter alone; give an operator a lowering instead: "
            "isoshard.torch_bridge.register_lowering"
        )
    return tuple(args)


def _on_jax(exported: Any) -> torch.nn.Module:
    """The program as a module that makes its tensors on the `jax` device."""
    module = exported.module(check_guards=False)
    device: Any = torch.device("jax")
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
            continue
        node.args = tuple([device if isinstance(arg, torch.device) else arg for arg in node.args])
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
        constant = vars(module).get(node.target) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor):  # a constant in the code: an input, like a buffer
            delattr(module, node.target)
            module.register_buffer(node.target, constant)
    module.recompile()
    return module


def _on_host(array: jax.Array) -> torch.Tensor:
    return from_numpy(np.array(array), logical_dtype(array.dtype))


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return Torch().array(leaf.detach())
    if isinstance(leaf, torch.Tensor):
        return to_numpy(leaf.detach().cpu())
    return np.asarray(leaf)
