"""What a TPU program sends from slice to slice: transfers by the host, in the place of collectives.

libtpu compiles the program of one slice. What crosses slices leaves the device by a `send` to the
host, whose runtime (Megascale) does the collective over the data centre's network, and comes back
by a `recv`. The attributes of both name the collective and its members.

>>> send = '''(f32[128,8]{1,0}, u32[], token[]) send(%x, %after), is_host_transfer=true,
... frontend_attributes={_xla_megascale_target="{1,2}x{0:7}",
... _xla_megascale_transfer_type="ALL_REDUCE"}'''
>>> transfer(send.replace("\\n", ""))
SliceTransfer(kind='all-reduce', slices=((0, 1),))

Devices are written as `100000 * slice + number`, slices count from 1. Observed in programs of
libtpu 0.0.52; nothing of it is documented.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "COLLECTIVE_PERMUTE": "collective-permute",
    "ONE_TO_ONE": "collective-permute",
    "RAGGED_ALL_TO_ALL": "ragged-all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
}
_SEND = re.compile(r"\) send\(.*_xla_megascale_transfer_type=\"(?P<kind>\w+)\"")
_PRODUCT = re.compile(r'_xla_megascale_target="\{(?P<slices>[\d,]+)\}x')
_LISTED = re.compile(r"_xla_megascale_target=\"?\{(?P<groups>(?:\{[\d,]+\},?)+)\}")
_A_SLICE = 100_000


class SliceTransfer(NamedTuple):
    """One collective between slices.

    Attributes:
        kind: as HLO names it.
        slices: those that talk, counted from 0: one group, or several that do not meet.
    """

    kind: str
    slices: tuple[tuple[int, ...], ...]


def transfer(instruction: str) -> SliceTransfer | None:
    """What one instruction sends to other slices.

    Args:
        instruction: its text after the `=`.

    Returns:
        None for any other instruction, the `recv` of a transfer among them.

    Raises:
        ValueError: it is a transfer of a kind, or among devices, that cannot be read.
    """
    match = _SEND.search(instruction)
    if match is None:
        return None
    kind, slices = _KINDS.get(match["kind"], ""), _slices(instruction)
    if not kind or not slices:
        raise ValueError(f"an unknown transfer between slices: {instruction[:500]}")
    return SliceTransfer(kind, slices)


def _slices(instruction: str) -> tuple[tuple[int, ...], ...]:
    if product := _PRODUCT.search(instruction):
        return (tuple(int(position) - 1 for position in product["slices"].split(",")),)
    listed = _LISTED.search(instruction)
    groups = re.findall(r"\{([\d,]+)\}", "{" + listed["groups"] + "}") if listed else []
    return tuple(
        dict.fromkeys(
            tuple(int(device) // _A_SLICE - 1 for device in group.split(",")) for group in groups
        )
    )
