"""The user's source line of an operation in a traced program.

JAX records the stack where an equation was traced. Its innermost frame that is neither of a library
nor of isoshard is the user's. A bridge that traces later than the user's code ran (torch:
operations are recorded, then traced) declares the line itself: it traces an operation inside
`jax.named_scope("file.py:12 (function)")`.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from isoshard.core.installation import source_folders
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.jaxprs import JaxprRewriter, holds_jaxprs

_LINE = re.compile(r"(?P<line>[^/()]+:\d+(?: \([^/()]*\))?)")
# A transform wraps the scope that follows it: `transpose(jvp(line:a.py:3 (f)))`.


def scope_of(line: str) -> str:
    """The name scope that declares a line; `line_in` reads it, from HLO's `op_name` too.

    `/` in a path is written as `|`.

    Example:
        >>> line_in("jit(step)/" + scope_of("src/train.py:12 (loss)") + "/dot_general")
        'src/train.py:12 (loss)'
    """
    return line.replace("/", "|")


def line_in(path: str) -> str | None:
    """The line that a name stack, or HLO's `op_name`, declares, if any.

    Args:
        path: scopes joined by `/`; the innermost line counts.
    """
    findall = _LINE.findall(path)
    return findall[-1].replace("|", "/") if findall else None


def line_of(equation: Any) -> str:
    """The user's line of an equation of a jaxpr; "" if it has none."""
    source = equation.source_info
    declared = line_in(str(source.name_stack))
    if declared is not None:
        return declared
    return "" if source.traceback is None else _of_stack(source.traceback)


def with_lines_of_calls(program: Any) -> Any:
    """A jaxpr in which equations of a library's function have the line of its call.

    The equations of a function that JAX traces separately (`jnp.take`, `jax.nn.silu`) have no line
    of the user's.

    Returns:
        A jaxpr of the same kind; `program` is not changed.

    Example:
        >>> def step(x):  # as a bridge declares lines; else they are those of the stack
        ...     with jax.named_scope(scope_of("train.py:12 (step)")):
        ...         return jax.numpy.take(x, 0)
        >>> program = with_lines_of_calls(jax.make_jaxpr(step)(np.ones(4, "float32")))
        >>> line_of(program.eqns[0].params["jaxpr"].eqns[-1])
        'train.py:12 (step)'
    """
    return _Called().program(program, "")


class _Called(JaxprRewriter):
    """The context of a program is the line of its call."""

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        line = ""
        nested = any(map(holds_jaxprs, eqn.params.values()))
        if context or nested:
            line = line_of(eqn)
        if nested:
            eqn = self.inside(eqn, line or context)
        if line or not context:
            yield eqn
            return
        source = eqn.source_info
        yield eqn.replace(
            source_info=source.replace(name_stack=source.name_stack.extend(scope_of(context)))
        )


@cached(65_536)
def _of_stack(stack: Any) -> str:
    for frame in stack.frames:
        if is_users(frame.file_name):
            return written(frame.file_name, frame.line_num, frame.function_name)
    return ""


def is_users(path: str) -> bool:
    """Whether a file is the user's: not a library's, Python's or isoshard's.

    Example:
        >>> is_users("/home/me/train.py"), is_users("/venv/lib/site-packages/flax/nnx/module.py")
        (True, False)
    """
    return not path.startswith(_NOT_THE_USERS) and "site-packages" not in path


def written(path: str, index: int, function: str) -> str:
    """A line in the form of reports.

    Args:
        path: of the file; its last part is written.
        index: of the line.
        function: that it is in, of a method with or without its class.

    Example:
        >>> written("/home/me/train.py", 12, "loss")
        'train.py:12 (loss)'
    """
    return f"{Path(path).name}:{index} ({function.rpartition('.')[2]})"


_NOT_THE_USERS = (
    "<frozen",
    *(str(Path(folder)) for folder in (sysconfig.get_path("stdlib"), *source_folders())),
    *(str(Path(str(module.__file__)).parent) for module in (jax, np)),
)
