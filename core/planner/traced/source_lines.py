"""Which line of the user an operation of a traced program comes from.

JAX notes the stack where an equation was traced. Of it the innermost frame that is neither of a
library nor of isoshard is the user's. A bridge that traces later than the user's code ran (torch:
operations are recorded, then traced) says the line itself, by a name scope: see `SCOPE`.
"""

from __future__ import annotations

import re
from typing import Any

SCOPE = "line:"
"""A bridge traces an operation inside `jax.named_scope("line:file.py:12 (function)")` to say where
it comes from; `/` in a path is written as `|`."""

_SAID = re.compile(re.escape(SCOPE) + r"(?P<line>[^/]+)")


def scope_of(line: str) -> str:
    """The name scope that says a line; `said_by` reads it back, from HLO's `op_name` too.

    Args:
        line: such as "train.py:12 (loss)".

    Example:
        >>> said_by("jit(step)/" + scope_of("src/train.py:12 (loss)") + "/dot_general")
        'src/train.py:12 (loss)'
    """
    return SCOPE + line.replace("/", "|")


def said_by(path: str) -> str | None:
    """The line that a name stack, or HLO's `op_name`, says; None if it says none.

    Args:
        path: scopes joined by `/`; the innermost line counts.
    """
    found = _SAID.findall(path)
    return found[-1].replace("|", "/") if found else None


def line_of(equation: Any) -> str:
    """The user's line of one equation of a jaxpr; "" if none is known.

    Args:
        equation: of a traced program.
    """
    said = said_by(str(equation.source_info.name_stack))
    if said is not None:
        return said
    return ""
