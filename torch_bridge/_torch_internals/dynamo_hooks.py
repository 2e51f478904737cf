"""Private names of dynamo, which is not imported for them.

>>> current_compilation() is None
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .declared import NAMES

_WITHOUT = '`torch.compile(backend="isoshard")` raises'

AOT_AUTOGRAD = NAMES.state(
    "torch._dynamo.backends.common.aot_autograd",
    why="splits a traced graph into a forward and a backward graph",
    without=_WITHOUT,
)

LEAVE_ALONE = NAMES.state(
    "torch._dynamo.trace_rules.add",
    why="lists code that dynamo does not follow",
    without="dynamo traces into isoshard, and breaks the graph there",
)

TRACERS = NAMES.state(
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch",
    why="is the table of the types that dynamo knows how to trace",
    without=_WITHOUT,
)

TRACE_TENSOR = NAMES.state(
    "torch._dynamo.variables.builder.VariableBuilder.wrap_tensor",
    why="is how it traces a tensor",
    without=_WITHOUT,
)

TRACE_OBJECT = NAMES.state(
    "torch._dynamo.variables.builder.VariableBuilder.wrap_user_defined",
    why="is how it traces a generator: it breaks the graph at the draw, as for torch's own",
    without=_WITHOUT,
)

SUBCLASS = NAMES.state(
    "torch._dynamo.variables.builder.infer_subclass_type",
    why="chooses the subclasses whose methods dynamo follows",
    without=_WITHOUT,
)

current_compilation: Callable[[], Any] = NAMES.bind(
    "torch._guards.CompileContext.current_compile_id",
    why="reports a compilation by dynamo, which reads a storage's size only",
    without=_WITHOUT,
)

AS_TANGENT = NAMES.state(
    "torch.Tensor.__coerce_same_metadata_as_tangent__",
    why="is called on a gradient of a subclass where the graph was traced with another",
    without="nothing changes: it is not called",
)
