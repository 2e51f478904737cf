"""Layout pictures: boxes that are text in a terminal and HTML in a notebook.

>>> import jax
>>> from jax.sharding import NamedSharding, PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.pictures.visualize import visualize
>>> mesh = make_mesh((4,), ("x",))
>>> layouts = {"w": NamedSharding(mesh, P("x")), "b": NamedSharding(mesh, P())}
>>> shapes = {name: jax.ShapeDtypeStruct((8,), "float32", sharding=layout)
...           for name, layout in layouts.items()}
>>> picture = visualize(shapes, width=40)
>>> isinstance(picture, str), [one.name for one in picture.drawings]
(True, ['b', 'w'])
>>> print(*picture.splitlines()[-2:], sep="\\n")
each device stores 40 B of 64 B (62%)
0-3  █████████████████████████████  40 B
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from isoshard.core.runtime.shown_text import ShownText

from .box_drawing import Line, colored, plain, rich_text
from .device_bytes import bars
from .html_boxes import fragment_of
from .layout_drawing import LayoutDrawing, bytes_text, total


class LayoutPicture(ShownText):
    """A picture of a layout: a text without escape codes, which a notebook shows as HTML.

    `picture.show()` prints it, in colours on a terminal; `rich` prints it in colours, too.

    Attributes:
        drawings: of each array.
        width: columns that the text fits into.
    """

    drawings: tuple[LayoutDrawing, ...]
    width: int

    def __new__(
        cls, drawings: Sequence[LayoutDrawing], width: int, *, colours: bool = False
    ) -> LayoutPicture:
        """Draw."""
        lines = list(_lines(drawings, width))
        picture = super().__new__(cls, colored(lines) if colours else plain(lines))
        picture.drawings, picture.width = tuple(drawings), width
        return picture

    def __reduce__(self) -> Any:
        """Pickle the text alone: meshes have devices, which only this process has."""
        return ShownText, (str(self),)

    def show(self) -> None:
        """Print it, in colours if standard output is a terminal and NO_COLOR is not set."""
        terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(colored(list(_lines(self.drawings, self.width))) if terminal else self)

    def __rich__(self) -> Any:
        """The picture for a console of `rich`."""
        return rich_text(list(_lines(self.drawings, self.width)))

    def _repr_html_(self) -> str:
        return fragment_of(self.drawings)


def _lines(drawings: Sequence[LayoutDrawing], width: int) -> Iterator[Line]:
    for index, drawing in enumerate(drawings):
        if index:
            yield []
        yield from drawing.lines(width)
    every = total(drawings) if len(drawings) > 1 else None
    if every is not None:
        yield []
        yield [(bytes_text(every), "bold")]
        yield from ([(line, "")] for line in bars(every, width))
