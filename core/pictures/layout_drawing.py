"""Layout drawings: the content of a picture of an array, before it is text or HTML.

>>> from isoshard.core.pictures.box_drawing import plain
>>> panel = Boxes("", [[("0", 0), ("1", 1)]], ["0:2"], ["0:2", "2:4"])
>>> one = LayoutDrawing(("[2, 4]", "2 devices"), "2 blocks", (), (panel,), 0, None, (), None)
>>> print(plain(list(one.lines(80))))
[2, 4]  2 devices
2 blocks
       0:2     2:4
    ┌───────┬───────┐
0:2 │   0   │   1   │
    └───────┴───────┘
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from isoshard.core.runtime.formatting import human_bytes

from .box_drawing import LABEL, Cell, Line, grid_lines
from .device_bytes import DeviceBytes


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A grid of boxes.

    Attributes:
        heading: which part of an array of rank 3 or more it is.
        cells: the boxes, row by row.
        rows: a label for each row; all empty for none.
        columns: likewise.
    """

    heading: str
    cells: Sequence[Sequence[Cell]]
    rows: Sequence[str]
    columns: Sequence[str]


@dataclasses.dataclass(frozen=True)
class LayoutDrawing:
    """The sharding of an array, as text and boxes.

    Attributes:
        title: what is drawn: type and shape, spec, devices.
        blocks: how many there are, and of what size.
        notes: lines above the boxes.
        panels: the boxes.
        left_out: how many slices have no boxes.
        device_bytes: what each device holds of it; None where shape or dtype are not known.
        received: bytes that each device receives where the array is gathered over a mesh axis.
        devices: `Device.id` of each device number; None where devices are not known.
        name: of a leaf of a tree.
    """

    title: tuple[str, ...]
    blocks: str
    notes: tuple[str, ...]
    panels: tuple[Boxes, ...]
    left_out: int
    device_bytes: DeviceBytes | None
    received: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] | None
    name: str | None = None

    def lines(self, width: int) -> Iterator[Line]:
        """The drawing as lines for a terminal."""
        if self.name is not None:
            yield [(self.name, "bold")]
        text = "  ".join(self.title)
        for line in [text] if len(text) <= width else self.title:
            yield [(line if len(line) <= width else f"{line[: width - 1]}…", "bold")]
        yield [(self.blocks, "")]
        yield from ([(note, "")] for note in self.notes)
        for panel in self.panels:
            if panel.heading:
                yield [(panel.heading, "bold")]
            yield from grid_lines(panel.cells, panel.rows, panel.columns, width)
        if self.left_out:
            yield [(f"… {self.left_out} more slices", LABEL)]


def total(drawings: Sequence[LayoutDrawing]) -> DeviceBytes | None:
    """The bytes of several arrays on each device.

    Returns:
        The sum, by device numbers where all are on the same devices, else by `Device.id`; None
        where something is not known of one.
    """
    stored = [drawing.device_bytes for drawing in drawings if drawing.device_bytes is not None]
    if not stored or len(stored) < len(drawings):
        return None
    by_device = collections.Counter[int]()
    same_devices = all(drawing.devices == drawings[0].devices for drawing in drawings)
    for drawing, each in zip(drawings, stored, strict=True):
        if not same_devices and drawing.devices is None:
            return None
        for device, size in each.by_device.items():
            by_device[
                device if same_devices or drawing.devices is None else drawing.devices[device]
            ] += size
    return DeviceBytes(sum(each.array_bytes for each in stored), dict(sorted(by_device.items())))


def bytes_text(stored: DeviceBytes) -> str:
    """The bytes on each device, as a sentence.

    Args:
        stored: of an array, or of several.
    """
    most = "at most " if stored.most > min(stored.by_device.values()) else ""
    most += human_bytes(stored.most)
    share = f" ({stored.most / stored.array_bytes:.0%})" if stored.array_bytes else ""
    return f"each device stores {most} of {human_bytes(stored.array_bytes)}{share}"
