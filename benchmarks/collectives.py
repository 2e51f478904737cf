"""Count the collectives of a compiled program, and the bytes they move, from its HLO text.

>>> program = '''
... ENTRY %main {
...   %p = f32[4,8]{1,0} parameter(0)
...   %all-reduce.1 = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
...   %ag = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%all-reduce.1), dimensions={0}
...   ROOT %done = f32[8,8]{1,0} all-gather-done(%ag)
... }'''
>>> for line in find(program):
...     print(line)
Collective(kind='all-reduce', bytes=128)
Collective(kind='all-gather', bytes=256)
>>> summarize(program)
{'all-gather': (1, 256), 'all-reduce': (1, 128)}

The bytes are those of the result on one device; of a tuple, the sum. An asynchronous pair counts
once, at its `-start`. A collective inside a loop counts once, however often the loop runs.

Source: https://openxla.org/xla/operation_semantics and the text form of XLA's HLO.
"""

from __future__ import annotations

from typing import NamedTuple

from isoshard.core.runtime.hlo_collectives import counted, operation
from isoshard.core.runtime.hlo_text import instructions


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: its name in HLO, without `-start`.
        bytes: size of its result on one device.
    """

    kind: str
    bytes: int


def find(program: str) -> list[Collective]:
    """List the collectives of an HLO module's text, in the order of the text."""
    sent = map(operation, instructions(program).values())
    return [Collective(*match) for match in sent if match is not None]


def summarize(program: str) -> dict[str, tuple[int, int]]:
    """Count and total bytes of each kind of collective that occurs in an HLO module's text."""
    return counted(program)
