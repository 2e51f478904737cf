"""Functions that shard tensors, as nodes of the graph that dynamo traces.

`redistribute`, `full_tensor`, `to_local`, `from_local`, `distribute_tensor`, `mark_sharding`, the
collectives of local tensors and the hooks of parallel styles are each one node:

```
def step(x):
    return (x * 2).redistribute(mesh, [Replicate(), Shard(1)]).relu()

torch.compile(step, fullgraph=True)(x)      # a graph of mul, redistribute and relu
```

Mesh and placements are constants of the node, guarded by equality. It calls the function that runs
without dynamo; where AOTAutograd traces on, a sharding is an operator (`layout.graph_calls`), and
the gradient is that of the same autograd function. Local tensors are traced as the tensor that
stacks them.

The placements of an input are guarded if one of these functions reads them. XLA chooses the
sharding of a value that the graph computes when the program is compiled, so `to_local` and
`placements` of one without declared placements end the graph, with what to write instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.core.runtime.private_names import release
from isoshard.torch_bridge._torch_internals import dynamo_values as hooks
from isoshard.torch_bridge._torch_internals.higher_order_ops import FOLLOWED
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.distributed import _functional_collectives as collectives
from isoshard.torch_bridge.distributed import along, redistribution, tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh, device_mesh_of
from isoshard.torch_bridge.distributed.single_controller import DeviceType
from isoshard.torch_bridge.distributed.tensor import DTensor, distributing
from isoshard.torch_bridge.distributed.tensor.parallel import module_border
from isoshard.torch_bridge.layout.layout_methods import BODIES
from isoshard.torch_bridge.spmd import gradients, marking
from isoshard.torch_bridge.spmd.mesh import Mesh
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .dynamo_origins import (
    UNKNOWN,
    end_graph,
    guard,
    is_local_tensor,
    is_manual,
    is_ours,
    layout,
    mesh_of,
    meshes,
    note_input,
    replicated_layout,
)

_BY_IDENTITY = (Mesh, jax.sharding.Mesh, jax.sharding.PartitionSpec)
"""Constants of types that dynamo does not support: guarded by identity."""


@dataclasses.dataclass(frozen=True)
class _Verb:
    """A function of a tensor and of constants that dynamo makes a node of.

    Attributes:
        call: the function.
        requires: from dynamo's tensor and the constants: what must be known of the tensor, "layout"
            or "mesh"; or why the function cannot be in a graph, a sentence; or "".
        shards_result: whether it shards along some mesh axes, so that others are unknown.
    """

    call: Callable[..., Any]
    requires: Callable[[Any, dict[str, Any]], str] = lambda _tensor, _constants: ""
    shards_result: bool = False

    @functools.cached_property
    def name(self) -> str:
        return self.call.__name__.lstrip("_")

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.call)

    def node(self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Add the node of a call to the graph; returns dynamo's value of its result."""
        try:
            arguments = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            end_graph(self.name, f"{error}.")
        tensor, *rest = [(name, value.realize()) for name, value in arguments.items()]
        constants: dict[str, Any] = {}
        symbols: dict[str, Any] = {}
        for name, value in rest:
            try:
                constants[name] = _constant(value)
            except NotImplementedError:
                symbols[name] = _symbol(self.name, name, value)
        placements = self._required_layout(tensor[1], constants)

        def node(tensor: Any, **symbols: Any) -> Any:
            if placements is not None and tensor_placements.is_traced(tensor):
                tensor_placements.remember(tensor, placements)
            result = self.call(tensor, **constants, **symbols)
            if self.shards_result and tensor_placements.is_traced(result):
                result._placed = None
                result._mesh = device_mesh_of(_mesh_in(constants)).root
            return result

        node.__name__ = node.__qualname__ = self.name
        proxy = tx.output.create_proxy("call_function", node, (tensor[1].as_proxy(),), symbols)
        try:
            return hooks.RESULT.resolve()(tx=tx, proxy=proxy)
        except hooks.FAKE_TENSOR_ERROR.resolve() as error:
            end_graph(self.name, f"it raises: {error.__cause__ or error}")

    def _required_layout(self, tensor: Any, constants: dict[str, Any]) -> Any:
        """The tensor's placements, if they are known; ends the graph if they are required."""
        placements = layout(tensor) if is_ours(tensor) else None
        requirement = self.requires(tensor, constants)
        if requirement == "layout" and placements is None:
            placements = replicated_layout(tensor)
        if requirement == "mesh" and placements is None:
            constants["device_mesh"] = mesh_of(tensor, self.name)
        elif requirement == "layout" and placements is None:
            end_graph(self.name, UNKNOWN)
        elif requirement not in ("", "mesh", "layout"):
            end_graph(self.name, requirement)
        return placements


def _mesh_in(constants: dict[str, Any]) -> Any:
    return constants["mesh"] if "mesh" in constants else constants["device_mesh"]


def _constant(value: Any) -> Any:
    content = getattr(value, "value", None)
    if not isinstance(content, (DeviceMesh, *_BY_IDENTITY)) or value.is_python_constant():
        constant = value.as_python_constant()
        return tuple(constant) if isinstance(constant, list) else constant
    if value.source is not None:
        guard(value.source, "ID_MATCH")
    return content


def _symbol(verb: str, name: str, value: Any) -> Any:
    """The node of an argument that is no constant."""
    try:
        return value.as_proxy()
    except NotImplementedError:
        end_graph(verb, f"its argument {name} is no constant for torch's dynamo.")


def _redistribute(
    tensor: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    async_op: bool = False,
    forward_dtype: Any = None,
    backward_dtype: Any = None,
) -> Any:
    return BODIES["redistribute"](tensor, device_mesh, placements, forward_dtype, backward_dtype)


def _full_tensor(tensor: Any, *, grad_placements: Any = None, device_mesh: Any = None) -> Any:
    mesh: Any = device_mesh or tensor_placements.mesh_of_tensor(tensor)
    return redistribution.gathered(tensor, mesh, grad_placements=grad_placements)


def _to_local(tensor: Any, *, grad_placements: Any = None) -> Any:
    if tensor_placements.is_traced(tensor):
        return BODIES["to_local"](tensor, grad_placements)
    return tensor.to_local(grad_placements=grad_placements)


def _no_leaf(tensor: Any, _: dict[str, Any]) -> str:
    if is_ours(tensor) and layout(tensor) is not None:
        return "this tensor has placements already. Use t.redistribute(mesh, placements)."
    if not getattr(tensor, "requires_grad", False):
        return ""
    return (
        "it makes a new leaf, without this tensor's gradient. Use t.redistribute(mesh, placements)."
    )


def _needs_local_tensor(tensor: Any, _: dict[str, Any]) -> str:
    if not is_ours(tensor) or is_manual(tensor):
        return ""
    return "it takes local tensors, and this is a global one. Call t.to_local() first."


def _reads_from_local(tensor: Any, constants: dict[str, Any]) -> str:
    from_local = constants.get("from_local", False) or (is_ours(tensor) and is_local_tensor(tensor))
    constants["from_local"] = from_local
    return ""


def _no_input(tensor: Any, _: dict[str, Any]) -> str:
    if getattr(tensor, "source", None) is None:
        return ""
    return (
        "it marks the memory of an input, with an effect after the call. Mark it before, or use "
        "xs.mark_sharding_with_gradients or t.redistribute(..), whose results are new tensors."
    )


_METHODS = {
    "redistribute": _Verb(
        _redistribute, lambda _, constants: "mesh" if constants.get("device_mesh") is None else ""
    ),
    "full_tensor": _Verb(_full_tensor, lambda *_: "mesh"),
    "to_local": _Verb(_to_local, lambda *_: "layout"),
}

_FUNCTIONS = (
    _Verb(XLAShardedTensor.from_local),
    _Verb(distributing.distribute_tensor, _no_leaf),
    _Verb(marking.mark_sharding, _no_input, shards_result=True),
    _Verb(gradients.mark_sharding_with_gradients, shards_result=True),
    _Verb(along.constrain, shards_result=True),
    _Verb(module_border.enters, _reads_from_local, shards_result=True),
    _Verb(module_border.leaves, _reads_from_local, shards_result=True),
    _Verb(collectives.all_reduce, _needs_local_tensor),
    _Verb(collectives.all_gather_tensor, _needs_local_tensor),
    _Verb(collectives.reduce_scatter_tensor, _needs_local_tensor),
    _Verb(collectives.all_to_all_single, _needs_local_tensor),
    _Verb(collectives.wait_tensor),
)


def _function(verb: _Verb, source: Any = None, *first: Any) -> Any:
    """Dynamo's value of a verb, or of a method of a tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return verb.node(hooks.TRANSLATOR.resolve()(), (*first, *args), kwargs)

    return hooks.RULE.resolve()(call, source=source)


def _is_local_value(value: Any) -> Any:
    """Dynamo's value of `module_border.is_local_tensor`."""
    value = value.realize()
    is_local = is_ours(value) and is_local_tensor(value)
    return hooks.VALUE.resolve().build(hooks.TRANSLATOR.resolve()(), is_local)


def _followed(builder: Any, value: along.Constraint) -> Any:
    """Dynamo's value of a style's hook, whose code it follows, unlike other code of isoshard."""
    source = hooks.ATTRIBUTE.resolve()(builder.source, "hook")
    function = hooks.USER_FUNCTION.resolve()(value.hook, source=source)

    def call(*args: Any, **kwargs: Any) -> Any:
        with FOLLOWED.resolve()():
            return function.call_function(hooks.TRANSLATOR.resolve()(), list(args), kwargs)

    return hooks.RULE.resolve()(call, source=builder.source)


def _call_method(original: Any) -> Any:
    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _METHODS and is_ours(self):
            return _METHODS[name].node(tx, (self, *args), kwargs)
        if name == "wait" and is_manual(self):
            return self
        return original(self, tx, name, args, kwargs)

    return call_method


def _attribute(original: Any) -> Any:
    @functools.wraps(original)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if not is_ours(self):
            return original(self, tx, name)
        if name in _METHODS:
            return _function(_METHODS[name], None, self)
        if name in ("placements", "device_mesh") and self.source is None:
            if name == "device_mesh":
                return hooks.VALUE.resolve().build(tx, mesh_of(self, name))
            placements = layout(self) or replicated_layout(self) or end_graph(name, UNKNOWN)
            return hooks.VALUE.resolve().build(tx, placements.placements)
        try:
            return original(self, tx, name)
        except AttributeError:
            if not hasattr(torch.Tensor, name):
                raise
            # Such as `t.jax`: before torch 2.13 dynamo assumes that every tensor has it.
            hooks.RAISE.resolve()(AttributeError, tx)

    return var_getattr


def _attribute_of_mesh(original: Any) -> Any:
    @functools.wraps(original)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        attribute = getattr(DeviceMesh, name, None) if isinstance(self.value, DeviceMesh) else None
        if isinstance(attribute, property):
            return hooks.VALUE.resolve().build(tx, getattr(self.value, name))
        if inspect.isfunction(attribute):
            return hooks.RULE.resolve()(functools.partial(_mesh_method_result, self.value, name))
        return original(self, tx, name)

    return var_getattr


def _mesh_method_result(mesh: DeviceMesh, name: str, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's value of a mesh method's result; the method is called while dynamo traces."""
    arguments = [_constant(value.realize()) for value in args]
    named = {key: _constant(value.realize()) for key, value in kwargs.items()}
    try:
        result = getattr(mesh, name)(*arguments, **named)
    except Exception as error:
        end_graph(name, f"it raises {type(error).__name__}: {error}")
    if isinstance(result, _BY_IDENTITY):
        return hooks.USER_OBJECT.resolve()(result)
    return hooks.VALUE.resolve().build(hooks.TRANSLATOR.resolve()(), result)


def _is_instance(original: Any) -> Any:
    @functools.wraps(original)
    def call_isinstance(self: Any, tx: Any, value: Any, kind: Any) -> Any:
        if is_ours(value):
            classinfo = kind.as_python_constant()
            kinds = classinfo if isinstance(classinfo, tuple) else (classinfo,)
            if XLAShardedTensor in kinds or (DTensor in kinds and _is_placed(value)):
                return hooks.VALUE.resolve().build(tx, True)
        return original(self, tx, value, kind)

    return call_isinstance


def _is_placed(tensor: Any) -> bool:
    """Whether one of dynamo's tensors is, or will be, on a mesh."""
    return not is_manual(tensor) and len(meshes(tensor)) == 1


def teach(tracers: dict[type, Opaque]) -> None:
    """Register the functions with dynamo, once; does nothing if this torch lacks a private name."""
    if any(row.resolve(None) is None for row in hooks.ALL):
        return
    trace = tracers[XLAShardedTensor]
    tracers[XLAShardedTensor] = lambda builder, tensor: note_input(trace(builder, tensor), tensor)
    hooks.CALL_METHOD.wrap(_call_method)
    hooks.GET_ATTRIBUTE.wrap(_attribute)
    hooks.IS_INSTANCE.wrap(_is_instance)
    table = hooks.FUNCTIONS.resolve()()
    for verb in _FUNCTIONS:
        table[id(verb.call)] = lambda builder, _, verb=verb: _function(verb, builder.source)
    rule = hooks.RULE.resolve()
    table[id(module_border.is_local_tensor)] = lambda builder, _: rule(
        _is_local_value, source=builder.source
    )
    tracers[along.Constraint] = _followed
    missing = any(row.resolve(None) is None for row in hooks.CONSTANTS)
    if release(torch.__version__) < hooks.SINCE or missing:
        return
    read, constant = hooks.READ.resolve(), hooks.CONSTANT_TYPE.resolve()
    names = [name for name in dir(DeviceMesh) if not name.startswith("__")]
    kind = "constant" if hooks.CONSTANT_TYPE.present == hooks.CONSTANT_TYPE.path else "value"
    constant(DeviceMesh, typ=kind, members=dict.fromkeys([*names, "__getitem__"], read))
    constant(DeviceType, typ=kind)
    hooks.CONSTANT_ATTRIBUTE.wrap(_attribute_of_mesh)
