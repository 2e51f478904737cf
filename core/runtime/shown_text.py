"""Text that shows itself in notebooks as it is, line by line.

>>> ShownText("one\\ntwo")
one
two
>>> ShownText("a < b")._repr_html_()
'<pre class="isoshard-text">a &lt; b</pre>'
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any


class ShownText(str):
    """A text whose representation is itself, so that an interpreter or a notebook shows its lines.

    Example:
        >>> text = ShownText("gathers  2")
        >>> text, text.split()
        (gathers  2, ['gathers', '2'])
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The text."""
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        """As treescope shows a text; it takes no representation of several lines."""
        return subtree_renderer(str(self), path=path)


def preformatted(text: str) -> str:
    """A text as HTML that keeps its lines and columns.

    Args:
        text: any; it is escaped.
    """
    return f'<pre class="isoshard-text">{escape(text)}</pre>'
