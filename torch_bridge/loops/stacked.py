"""Identical layers with stacked parameters: one for each name, with an axis for the depth.

Optimizers have few large parameters; checkpoints and plans have the layers:

>>> blocks = StackedLayers([torch.nn.Linear(4, 4) for _ in range(8)])
>>> blocks.layers.weight.shape
torch.Size([8, 4, 4])
>>> blocks.state_dict()["5.weight"].shape
torch.Size([4, 4])
>>> plain = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))
>>> blocks.load_state_dict(plain.state_dict())
<All keys matched successfully>
>>> torch.equal(blocks.layers.weight[5], plain[5].weight)
True
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import same_layout
from isoshard.torch_bridge._torch_internals.module_fields import LOAD, state_versions
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.layout.marks import annotate

from .layer_match import Stack
from .looped import LayerCall, Looped
from .stale_parameters import retire

_KEEP = "; keep a parameter for each layer: scan_layers(layers, stacked=False)"


class StackedLayers(Looped):
    """Identical layers as one loop, with one parameter for all; see `scan_layers`.

    `layers` is one layer whose parameters and buffers have a leading axis for the depth: `(48, ..)`
    where 48 layers were given. An optimizer then updates a dozen large parameters instead of
    hundreds of small ones, which compiles as fast for 48 layers as for 4, and the program need not
    stack them.

    - `named_parameters()`, gradients and optimizer state are stacked; make the optimizer from this
      module. Elementwise optimizers (SGD, Adam, AdamW, ..) and clipping by the global norm compute
      the same; one that uses the norm or shape of each parameter does not, and what chooses
      parameters by `dim()` (no weight decay for vectors) or initialises them by it has to know of
      the additional axis.
    - `state_dict()` gives, and `load_state_dict()` takes, the names and shapes of the `ModuleList`
      that was given (`5.weight`), so checkpoints fit both. What it gives are views of the stacks.
    - Layouts of the layers are kept behind an axis that is not split: P('x', None) becomes
      P(None, 'x', None). `iso.shard(model, mesh, plan)` asks the plan for the layers' names.

    A parameter that a module outside `layers` has as well (tied weights) is copied too, and from
    then on no longer tied.

    Args:
        layers: as for `scan_layers`, and so are the others.
        checkpoint: likewise.
        call: likewise.
        ignore: likewise.

    Raises:
        ValueError: the layers differ, or one stack cannot hold them; see `scan_layers`.

    Example:
        >>> blocks = StackedLayers([torch.nn.Linear(4, 4) for _ in range(8)])
        >>> len(blocks), blocks.layers.weight.shape
        (8, torch.Size([8, 4, 4]))
        >>> list(blocks.state_dict())[:2]
        ['0.weight', '0.bias']
    """

    _holds_stacks = True

    def __init__(
        self,
        layers: Iterable[torch.nn.Module],
        *,
        checkpoint: bool = False,
        call: Callable[..., Any] | None = None,
        ignore: Collection[str] = (),
    ):
        """See `scan_layers`."""
        super().__init__()
        args = list(layers)
        per_layer = Stack(args, ignore, deferred=True)
        _check_state(args[0])
        tensors, width = per_layer.tensors(), len(per_layer.names)
        columns = {name: tensors[index::width] for index, name in enumerate(per_layer.names)}
        for name, column in columns.items():
            _check_column(name, column)
        self._depth = len(args)
        # The copy of the first layer has the stacks wherever that has its tensors: ties are kept.
        stacks = {id(column[0]): _stack_of(name, column) for name, column in columns.items()}
        self.layers = copy.deepcopy(args[0], {**stacks})
        for (path, name), value in per_layer.differing.items():
            vars(self.layers.get_submodule(path))[name] = value
        self._prepare(checkpoint, call, ignore)
        retire(
            (f"{index}.{name}", tensor)
            for name, column in columns.items()
            for index, tensor in enumerate(column)
            if isinstance(tensor, torch.nn.Parameter)
        )

    def __len__(self) -> int:
        """How many layers there are."""
        return self._depth

    def __getitem__(self, index: Any) -> NoReturn:
        """Not supported, and so is iterating: there are no modules of single layers.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "StackedLayers holds no modules of single layers: call it to run all of them, "
            "x = blocks(x), instead of looping over it; the tensors of one layer are in "
            f"blocks.state_dict(), as '3.weight'{_KEEP}"
        )

    def _layer_modules(self) -> list[torch.nn.Module]:
        return [self.layers]

    def _in_turn(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall(self._call_layer, self.layers)
        names = [f"layer.{name}" for name in self._stack.names]
        for index in range(self._depth):
            per_layer = [stack[index] for stack in self._stack.tensors()]
            inside = dict(zip(names, per_layer, strict=True))
            x = torch.func.functional_call(call, inside, (x, *args), kwargs)
        return x

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The tensors of each layer, as the `ModuleList` of the layers would give them.

        Args:
            destination: a dictionary to put them into; a new one if not given.
            prefix: put before the names.
            keep_vars: give views that autograd knows of.

        Returns:
            The dictionary; its tensors are views of the stacked ones.
        """
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=True)
        inside = f"{prefix}layers"
        stacks = _taken(state, inside)
        versions = _taken(state_versions(state), inside)
        for index in range(self._depth):
            for key, stack in stacks.items():
                tensor = stack if keep_vars else stack.detach()
                state[f"{prefix}{index}{key}"] = tensor[index]
            for key, version in versions.items():
                state_versions(state)[f"{prefix}{index}{key}"] = version
        return state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Put the layers' tensors together for torch, which then loads `layers`."""
        unexpected_keys += [f"{prefix}layers{key}" for key in _taken(state_dict, f"{prefix}layers")]
        assign = local_metadata.get("assign_to_params_buffers", False)
        joined: dict[str, torch.Tensor] = {}
        for name, stack in self.layers.state_dict(keep_vars=True).items():
            keys = [f"{prefix}{index}.{name}" for index in range(self._depth)]
            missing_keys += [key for key in keys if key not in state_dict]
            result = {key: state_dict.pop(key) for key in keys if key in state_dict}
            errors = _load_errors(result, stack.shape[1:])
            value = stack if assign else stack.detach()
            if result and not errors:
                per_layer = zip(keys, stack.detach().unbind(), strict=True)
                try:
                    value = _joined(
                        {key: result.get(key, layer) for key, layer in per_layer}, assign
                    )
                except ValueError as error:
                    errors = [str(error)]
            error_msgs += errors
            joined[f"{prefix}layers.{name}"] = value
        args = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        LOAD.of(super())(state_dict, prefix, *args)
        state_dict.update(joined)


def _stack_of(name: str, column: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stacked tensor of all layers, with their sharding."""
    layout = _layout(name, column)
    stack: Any = torch.stack([tensor.detach() for tensor in column])
    if isinstance(column[0], torch.nn.Parameter):
        stack = torch.nn.Parameter(stack, requires_grad=column[0].requires_grad)
    if layout is not None:
        annotate(stack, with_leading_axes(layout))
    return stack


def with_leading_axes(layout: NamedSharding, axes: int = 1) -> NamedSharding:
    """The same sharding with leading axes that are not split."""
    spec = P(*(None,) * axes, *layout.spec) if any(layout.spec) else P()
    return NamedSharding(layout.mesh, spec)


def _layout(name: str, column: Sequence[Any]) -> NamedSharding | None:
    """The mark of the tensors of all layers, or None."""
    marks = [
        tensor._storage.annotation if isinstance(tensor, lazy_tensor.LazyTensor) else None
        for tensor in column
    ]
    first = marks[0]
    for index, mark in enumerate(marks):
        if (mark is None) != (first is None) or (
            mark is not None
            and first is not None
            and not (
                mark.mesh.axis_sizes == first.mesh.axis_sizes
                and same_layout(mark, first, column[0].dim())
            )
        ):
            raise ValueError(
                f"stacked layers must have one sharding, but {name} is {_spec(first)} "
                f"in layer 0 and {_spec(mark)} in layer {index}; shard them in one way{_KEEP}"
            )
    return first


def _spec(mark: NamedSharding | None) -> str:
    return "not marked" if mark is None else f"sharded as {mark.spec}"


def _check_state(layer: torch.nn.Module) -> None:
    for path, module in layer.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise ValueError(
                f"{path or 'a layer'} ({type(module).__name__}) keeps state outside its tensors "
                f"(get_extra_state), and one module stands for all layers{_KEEP}"
            )


def _check_column(name: str, column: Sequence[torch.Tensor]) -> None:
    expected = [tensor.requires_grad for tensor in column]
    if len(set(expected)) > 1:
        raise ValueError(
            f"stacked layers must be identical, but {name} requires a gradient in some layers only "
            f"(not in layer {expected.index(False)}){_KEEP}"
        )
    indices: dict[int, int] = {}
    for index, tensor in enumerate(column):
        existing = indices.setdefault(id(tensor), index)
        if existing != index and isinstance(tensor, torch.nn.Parameter):
            raise ValueError(
                f"layers {existing} and {index} share {name}, and stacked each would have its "
                f"own{_KEEP}"
            )
        if tensor.grad is not None:
            raise ValueError(
                f"{index}.{name} has a gradient, which its stack would not have: call "
                "zero_grad() first, and make the optimizer after scan_layers"
            )


def _taken(state: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove the entries of a module from `state`; by the rest of their keys: "" or ".weight"."""
    keys = [key for key in state if key == name or key.startswith(f"{name}.")]
    return {key[len(name) :]: state.pop(key) for key in keys}


def _load_errors(result: dict[str, Any], shape: torch.Size) -> list[str]:
    """torch's messages for tensors that do not fit."""
    return [
        f"size mismatch for {key}: copying a param with shape {args.shape} from checkpoint, the "
        f"shape in current model is {shape}."
        if isinstance(args, torch.Tensor)
        else f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
        f"object from checkpoint but received {type(args)}"
        for key, args in result.items()
        if not isinstance(args, torch.Tensor) or args.shape != shape
    ]


def _joined(tensors_by_key: dict[str, torch.Tensor], assign: bool) -> torch.Tensor:
    """The layers' tensors as one to copy from, or to assign."""
    tensors = [tensor.detach() for tensor in tensors_by_key.values()]
    kinds = {f"{tensor.dtype} on {tensor.device}": key for key, tensor in tensors_by_key.items()}
    if assign:
        if len(kinds) > 1:
            each = ", ".join(f"{key} is {kind}" for kind, key in kinds.items())
            raise ValueError(
                f"assign=True makes one parameter of all layers' tensors, but {each}; convert "
                "them first, or load without assign"
            )
        return _stack_of(next(iter(tensors_by_key)), tensors)
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.to(tensors[0].device) for tensor in tensors]
    return torch.stack(tensors)
