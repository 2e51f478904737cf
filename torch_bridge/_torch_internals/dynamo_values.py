"""Private names of dynamo that follow values and create nodes.

>>> RULE.why
"is a function of dynamo's own values"
"""

from __future__ import annotations

from isoshard.core.runtime.private_names import PrivateName

from .declared import NAMES

_ENDS = "DTensor's methods and parallel styles end a graph of `torch.compile`"
_NOT_CONSTANT = "`mesh.size()` ends a graph, and an equal mesh is traced again"
_CONSTANT_VERSIONS = "2.13 to 2.15"
SINCE = (2, 13)
"""The first torch in which a mesh may be a constant of a graph."""


FUNCTIONS = NAMES.state(
    "torch._dynamo.variables.builder.VariableBuilder._id_dispatch",
    why="is the table of the functions that dynamo has a rule for",
    without=_ENDS,
)

CALL_METHOD = NAMES.state(
    "torch._dynamo.variables.tensor.TensorVariable.call_method",
    why="is how dynamo calls a tensor's method",
    without=_ENDS,
)

GET_ATTRIBUTE = NAMES.state(
    "torch._dynamo.variables.tensor.TensorVariable.tp_getattro_impl",
    formerly="torch._dynamo.variables.tensor.TensorVariable.var_getattr",
    why="is how dynamo reads a tensor's attribute",
    without=_ENDS,
)

IS_INSTANCE = NAMES.state(
    "torch._dynamo.variables.builtin.BuiltinVariable.call_isinstance",
    why="is how dynamo asks whether a tensor is a DTensor",
    without=_ENDS,
)

RULE = NAMES.state(
    "torch._dynamo.variables.misc.LambdaVariable",
    why="is a function of dynamo's own values",
    without=_ENDS,
)

VALUE = NAMES.state(
    "torch._dynamo.variables.base.VariableTracker",
    why="is a value that dynamo follows",
    without=_ENDS,
)

RESULT = NAMES.state(
    "torch._dynamo.variables.builder.wrap_fx_proxy",
    why="makes dynamo's value of a new node",
    without=_ENDS,
)

TRANSLATOR = NAMES.state(
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
    why="is the frame that is being traced",
    without=_ENDS,
)

GUARD = NAMES.state(
    "torch._dynamo.guards.install_guard",
    why="lets another layout of an input be traced again",
    without=_ENDS,
)

GUARDS = NAMES.state(
    "torch._dynamo.guards.GuardBuilder",
    why="has the kinds of guards",
    without=_ENDS,
)

ATTRIBUTE = NAMES.state(
    "torch._dynamo.source.AttrSource",
    why="is the source of an attribute of a value",
    without=_ENDS,
)

END_GRAPH = NAMES.state(
    "torch._dynamo.exc.unimplemented",
    why="ends a graph and says why",
    without=_ENDS,
)

FAKE_TENSOR_ERROR = NAMES.state(
    "torch._dynamo.exc.FakeTensorObservedException",
    formerly="torch._dynamo.exc.TorchRuntimeError",
    why="is raised where a function refuses what is traced",
    without=_ENDS,
)

RAISE = NAMES.state(
    "torch._dynamo.exc.raise_observed_exception",
    why="raises in the traced program, which may catch it",
    without=_ENDS,
)

USER_OBJECT = NAMES.state(
    "torch._dynamo.variables.user_defined.UserDefinedObjectVariable",
    why="is an object that dynamo looks into only where it is asked",
    without=_ENDS,
)

USER_FUNCTION = NAMES.state(
    "torch._dynamo.variables.functions.UserFunctionVariable",
    why="is a function whose code dynamo follows",
    without=_ENDS,
)

ALL = tuple(row for row in list(globals().values()) if isinstance(row, PrivateName))
"""The rows so far: without one of them none of this module is used."""

CONSTANT_TYPE = NAMES.state(
    "torch._library.opaque_object.register_custom_class",
    formerly="torch._library.opaque_object.register_opaque_type",
    why="lets a mesh be a constant of a graph, of which `mesh.size()` may be asked",
    without=_NOT_CONSTANT,
    versions=_CONSTANT_VERSIONS,
)

READ = NAMES.state(
    "torch._library.opaque_object.MemberType.USE_REAL",
    why="lets what a mesh is asked be answered while dynamo traces",
    without=_NOT_CONSTANT,
    versions=_CONSTANT_VERSIONS,
)

CONSTANT_ATTRIBUTE = NAMES.state(
    "torch._dynamo.variables.script_object.CustomClassObjectVariable.tp_getattro_impl",
    formerly="torch._dynamo.variables.script_object.TorchScriptObjectVariable.var_getattr",
    why="is how dynamo reads an attribute of such a constant",
    without=_NOT_CONSTANT,
    versions=_CONSTANT_VERSIONS,
)

CONSTANTS = (CONSTANT_TYPE, READ, CONSTANT_ATTRIBUTE)
"""Without one of these none of them is used."""
