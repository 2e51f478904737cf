"""Tensor-parallel styles: the sharding of a module's parameters, inputs and outputs.

The classes have torch's constructors. Under torchrun a style turns tensors into DTensors and back,
and sends data. Here tensors are global, and a style sets shardings: the parameters are marked, and
hooks on the module constrain its inputs and outputs, and their gradients. XLA's partitioner then
finds the collectives, which are those that Megatron-LM writes by hand.

- `input_layouts` and `output_layouts` are the placements of inputs and outputs, as in torch.
- Global inputs give global outputs: code after it writes `view(batch, length, -1, head_size)`, or
  the number of all heads, rather than `heads // tp`.
- Local inputs, of `to_local()`, are joined by `input_layouts`. The outputs are local if
  `use_local_output` is True, and then `heads // tp` is right; see `module_border`.
- `Partial()` as the layout of a global tensor is a no-op: it is the sum already.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from isoshard.torch_bridge.common.argument_types import PlacementLike
from isoshard.torch_bridge.distributed.along import (
    constraint,
    require_1d_mesh,
    shard_in_place,
)
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh

from .module_border import any_local_tensor, enters, leaves


class LayerStyle(ParallelStyle):
    """The base class of the styles for Linear and Embedding."""

    def __init__(
        self, input_layout: PlacementLike, output_layout: PlacementLike, use_local_output: bool
    ):
        """See the subclasses."""
        super().__init__()
        self.input_layouts = (input_layout,)
        self.output_layouts = (output_layout,)
        self.use_local_output = use_local_output

    @abc.abstractmethod
    def parameter_placements(
        self, module: torch.nn.Module
    ) -> tuple[Placement, dict[str, Placement]]:
        """The layout of a module's input, and those of its parameters by name.

        Args:
            module: the layer; the placement of the name "" is for other parameters.

        Raises:
            NotImplementedError: it is neither a Linear nor an Embedding.
        """

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        mesh = require_1d_mesh(device_mesh, type(self).__name__)
        desired, placements = self.parameter_placements(module)
        weight: Any = module.weight
        if weight.dim() != 2:
            raise ValueError(
                f"{type(self).__name__} splits one layer, and this weight of shape "
                f"{tuple(weight.shape)} is that of several, as scan_layers stacks them; call "
                "parallelize_module on the layers first, then scan_layers"
            )
        self.desired_input_layouts = (desired,)
        for name, parameter in module.named_parameters():
            shard_in_place(parameter, mesh, placements.get(name) or placements[""])
        arriving, leaving = self.input_layouts[0], self.output_layouts[0]

        hook_first_input(self, module, mesh, arriving, desired, leaving)
        return module

    def __repr__(self) -> str:
        """As the constructor."""
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class ColwiseParallel(LayerStyle):
    """Split the outputs of a Linear or the features of an Embedding.

    Args:
        input_layouts: of the input; replicated by default, as it is inside.
        output_layouts: how the output leaves; split along the last axis by default.
        use_local_output: whether outputs are local if inputs are; global ones remain global.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("jax", (8,))
        >>> linear = parallelize_module(torch.nn.Linear(4, 16), mesh, ColwiseParallel())
        >>> linear.weight.placements, linear.bias.placements
        ((Shard(dim=0),), (Shard(dim=0),))
        >>> linear(torch.ones(2, 4, device="jax")).placements
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        """See the class."""
        super().__init__(
            input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output
        )
        self.desired_input_layouts = (Replicate(),)

    def parameter_placements(
        self, module: torch.nn.Module
    ) -> tuple[Placement, dict[str, Placement]]:
        """See `LayerStyle`."""
        if isinstance(module, torch.nn.Linear):
            return Replicate(), {"": Shard(0)}
        if isinstance(module, torch.nn.Embedding):
            return Replicate(), {"": Shard(1)}
        raise NotImplementedError(_no_layer("ColwiseParallel", module))


class RowwiseParallel(LayerStyle):
    """Split the inputs of a Linear or the rows of an Embedding; what devices compute is summed.

    Args:
        input_layouts: how the input arrives; split along the last axis by default. Inside, that of
            a Linear is split so, and that of an Embedding whole.
        output_layouts: of the output; replicated by default. `Shard(1)` splits a sequence, and
            the sum need not be whole on any device.
        use_local_output: whether outputs are local if inputs are; global ones remain global.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("jax", (8,))
        >>> linear = parallelize_module(torch.nn.Linear(16, 4), mesh, RowwiseParallel())
        >>> linear.weight.placements, linear.bias.placements
        ((Shard(dim=1),), (Replicate(),))
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        """See the class."""
        super().__init__(
            input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output
        )

    def parameter_placements(
        self, module: torch.nn.Module
    ) -> tuple[Placement, dict[str, Placement]]:
        """See `LayerStyle`."""
        if isinstance(module, torch.nn.Linear):
            return Shard(-1), {"weight": Shard(1), "": Replicate()}
        if isinstance(module, torch.nn.Embedding):
            return Replicate(), {"": Shard(0)}
        raise NotImplementedError(_no_layer("RowwiseParallel", module))


class SequenceParallel(ParallelStyle):
    """Replicate the parameters of a norm or dropout, and split its input along the sequence.

    Args:
        sequence_dim: the axis of the input that is the sequence.
        use_local_output: whether outputs are local if inputs are; global ones remain global.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("jax", (8,))
        >>> norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
        >>> norm(torch.ones(2, 16, 4, device="jax")).placements, norm.weight.placements
        ((Shard(dim=1),), (Replicate(),))
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        """See the class."""
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        mesh = require_1d_mesh(device_mesh, "SequenceParallel")
        split = self.sequence_sharding[0]
        for parameter in module.parameters():
            shard_in_place(parameter, mesh, Replicate())

        hook_first_input(self, module, mesh, split, split, split)
        return module

    def __repr__(self) -> str:
        """As the constructor."""
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, "
            f"use_local_output={self.use_local_output})"
        )


def hook_first_input(
    style: LayerStyle | SequenceParallel,
    module: torch.nn.Module,
    mesh: DeviceMesh,
    arriving: PlacementLike,
    inside: PlacementLike,
    leaving: PlacementLike,
) -> None:
    """Register hooks that redistribute a module's first input and its output.

    Args:
        style: the style, for messages and `use_local_output`.
        module: the module.
        mesh: of one dimension.
        arriving: how the input arrives.
        inside: layout inside the module.
        leaving: how the output leaves.
    """
    to_local = style.use_local_output

    def enter(module: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        name = None if inputs else next(iter(named), None)
        first = named[name] if name is not None else inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            raise ValueError(
                f"{type(style).__name__} lays out the first input of {type(module).__name__}, "
                f"which must be a tensor, and it is a {type(first).__name__}"
            )
        full = enters(first, mesh, arriving, inside)
        if name is not None:
            return inputs, {**named, name: full}
        return (full, *inputs[1:]), named

    def leave(module: torch.nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> Any:
        from_local = any_local_tensor(inputs, named)
        return leaves(output, mesh, leaving, leaving, to_local=to_local, from_local=from_local)

    module.register_forward_pre_hook(constraint(enter, mesh, arriving, inside), with_kwargs=True)
    module.register_forward_hook(constraint(leave, mesh, leaving, to_local), with_kwargs=True)


def _no_layer(style: str, module: torch.nn.Module) -> str:
    return (
        f"{style} splits nn.Linear and nn.Embedding, and this is a {type(module).__name__}; name "
        "the layers inside it in the plan, or write a ParallelStyle of your own"
    )
