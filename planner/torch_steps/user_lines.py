"""The line of user code that an operation comes from, also of one that backward computes.

The user's line is the innermost frame that is neither of torch, isoshard, JAX nor of the standard
library: a library of models, such as transformers, counts as the user. What a model's backward does
has no frame of the model. But each node of autograd's graph has a sequence number, the next one at
the time when the forward operation ran: so forward operations note it with their line, and
an operation of backward has the line of the node that is being evaluated.

>>> import isoshard.torch_bridge
>>> lines = UserLines()
>>> lines.current().endswith(")")                          # whoever runs this example
True
"""

from __future__ import annotations

import bisect
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

from isoshard.core.kit import ANNEXES
from isoshard.torch_bridge.kit import current_node, next_sequence_number, sequence_number

_INTERNAL = ("torch.", "isoshard.", "jax.", "jaxlib.")
_OWN = ("isoshard.cli.", *(f"isoshard.{annex}.cli." for annex in ANNEXES))
_LIBRARY = tuple(
    f"{Path(path).resolve()}/" for path in map(sysconfig.get_path, ("stdlib", "platstdlib"))
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_GENERATED = ("<frozen", "<string>", "<eval_with_key>", "<__array_function__")
_USER, _OTHER, _AUTOGRAD = range(3)


class UserLines:
    """The user's lines while one step runs."""

    def __init__(self) -> None:
        """Nothing ran yet."""
        self._kinds: dict[CodeType, int] = {}
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._node_ids: list[int] = []
        self._lines: list[str] = []

    def current(self) -> str:
        """The line that runs now, as "file.py:12 (function)"; "" if none is the user's."""
        node = current_node()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            kind = self._kinds.get(frame.f_code)
            if kind is None:
                kind = self._kinds[frame.f_code] = _kind_of(frame)
            if kind == _USER:
                text = self._text(frame)
                self._note(text)
                return text
            if kind == _AUTOGRAD and node is not None:
                line = self._of_node(sequence_number(node))
                if line is not None:
                    return line
                node = None
            frame = frame.f_back
        return ""

    def _text(self, frame: FrameType) -> str:
        code, line = frame.f_code, frame.f_lineno
        text = self._texts.get((code, line))
        if text is None:
            text = f"{Path(code.co_filename).name}:{line} ({code.co_name})"
            self._texts[code, line] = text
        return text

    def _note(self, text: str) -> None:
        """Assign the newest node to this line, unless it is of an operation before this one."""
        index = next_sequence_number() - 1
        if not self._node_ids or index > self._node_ids[-1]:
            self._node_ids.append(index)
            self._lines.append(text)

    def _of_node(self, index: int) -> str | None:
        """The line of a node: its own, or that of the operation before (views record nothing)."""
        if not self._node_ids or index > self._node_ids[-1] + _LARGEST_GAP:
            return None  # nodes that accumulate a leaf's gradient have the highest number of all
        position = bisect.bisect_right(self._node_ids, index) - 1
        return self._lines[position] if position >= 0 else None


_LARGEST_GAP = 1 << 32


def _kind_of(frame: FrameType) -> int:
    """Whether a frame is the user's."""
    code = frame.f_code
    file, module = code.co_filename, f"{frame.f_globals.get('__name__', '')}."
    if module.startswith(_INTERNAL) and not module.startswith(_OWN):
        return _AUTOGRAD if module.startswith("torch.autograd.graph.") else _OTHER
    if file.startswith(_GENERATED):
        return _OTHER
    if file.startswith(_LIBRARY) and not any(chunk in file for chunk in _INSTALLED):
        return _OTHER
    return _USER
