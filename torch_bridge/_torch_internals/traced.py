"""Private names of torch's tracers: nested arguments, tensors without elements, the flag.

>>> tree_leaves = pytree.tree_leaves
>>> tree_leaves({"a": (1, [2]), "b": 3})
[1, 2, 3]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declared import NAMES

if TYPE_CHECKING:
    from torch.utils import _pytree as pytree
else:
    pytree = NAMES.bind(
        "torch.utils._pytree",
        why="flattens nested arguments, and has the types that torch's users registered",
        without="`xs.compile`, loops, planning and functions between torch and JAX raise",
    )

COMPILING = NAMES.state(
    "torch.compiler._is_compiling_flag",
    why="is what `torch.compiler.is_compiling()` says, true while a step is captured",
    without="libraries look at values inside a captured step, which is refused there",
)

TRACED_TYPES = NAMES.state(
    "torch.fx.experimental.proxy_tensor.HANDLED_TYPES",
    why="lists the tensors that `make_fx` and `torch.func.linearize` trace",
    without="both take tensors on the device for constants",
)

NEW_FAKE = NAMES.state(
    "torch._subclasses.fake_tensor.FakeTensor.__new__",
    why="makes the tensors that dynamo traces with, which may not say `xla`",
    without="`xs.drop_in.install` raises",
)

BOXED: Any = NAMES.state(
    "torch._functorch.aot_autograd.<compiled graph>._boxed_call",
    why="marks a compiled graph that takes a list of arguments, which it may empty",
    without="memory of activations is freed later",
)
