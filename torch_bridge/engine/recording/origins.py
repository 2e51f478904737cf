"""Where an operation comes from: the module that computes it and the lines of user code.

Both are read off the Python stack, so nothing is installed in torch, and hooks, functional calls,
checkpointing and threads need no rule of their own. A module is on the stack while its `__call__`
runs. A line counts as the user's if its file is neither torch's, isoshard's, JAX's nor the standard
library's: `line` is the innermost of these, which may be of a library of models, and `own` the
innermost that is not of an installed package.

What a model's backward does has no frame of the model. But each node of autograd's graph has a
sequence number, the next one at the time when the forward operation ran. So operations are noted
with the newest number (`OriginLog`), and an operation of backward has the origin of the node that
is being evaluated.

>>> import torch, isoshard.torch_bridge
>>> class Shown(torch.nn.Module):
...     def forward(self, x):
...         return origin(OriginLog()).path
>>> torch.nn.Sequential(torch.nn.Identity(), Shown())(torch.ones(2))
'Sequential/1'
"""

from __future__ import annotations

import bisect
import sys
import sysconfig
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from isoshard.core.installation import ANNEXES
from isoshard.core.runtime.caches import CALLS, Bounded
from isoshard.core.traced import source_lines
from isoshard.torch_bridge._torch_internals.tensor_fields import (
    current_node,
    next_sequence_number,
    sequence_number,
)

from .recorder import recorder


class Origin(NamedTuple):
    """Where an operation comes from.

    Attributes:
        path: of its module, as `Llama/model.layers.3.mlp`: the class of the outermost module, and
            the name in it; "" outside of modules.
        own: the user's line, as "train.py:12 (step)", not of an installed package; "" without one.
        line: the innermost line that is not torch's: of a library of models, or the same.
        in_backward: backward computes it; path and lines are those of the forward operation.
    """

    path: str = ""
    own: str = ""
    line: str = ""
    in_backward: bool = False

    @property
    def scope(self) -> str:
        """The name scope of its equations, as profilers show it; "" if nothing is known.

        Example:
            >>> Origin("Net/a", "train.py:9 (step)", "net.py:4 (forward)", True).scope
            'backward/Net/a/train.py:9 (step)/net.py:4 (forward)'
        """
        lines = (self.own, self.line) if self.own != self.line else (self.line,)
        scopes = [self.path, *[source_lines.scope_of(line) for line in lines if line]]
        return "/".join(["backward"] * self.in_backward + [scope for scope in scopes if scope])

    def __str__(self) -> str:
        """In a sentence.

        Example:
            >>> str(Origin("Net/a", "train.py:9 (step)", "net.py:4 (forward)", True))
            'in the backward of Net/a, at net.py:4 (forward), called at train.py:9 (step)'
        """
        module = f"in {'the backward of ' * self.in_backward}{self.path}" if self.path else ""
        line = f"at {self.line}" if self.line else ""
        called = f"called at {self.own}" if self.own not in ("", self.line) else ""
        return ", ".join(filter(None, [module, line, called])) or "at an unknown line"


NOWHERE = Origin()


class OriginLog:
    """The origins of what one recorder records, in order.

    Args:
        before: the log of an earlier recording, whose graph backward may go through.

    Attributes:
        origins: of each entry; None for an input.
    """

    __slots__ = ("_nodes", "_shared", "before", "origins", "searched")

    def __init__(self, before: OriginLog | None = None):
        """Nothing is recorded yet."""
        self.before = before
        log, depth = before, 1
        while log is not None:  # what was recorded long ago is not needed
            depth += 1
            if depth > _EARLIER:
                log.before = None
            log = log.before
        self.origins: list[Origin | None] = []
        self.searched: set[int] = set()
        self._nodes: list[int] = []
        self._shared: dict[Origin, Origin] = {}

    def pad(self, count: int) -> None:
        """Let the log have this many entries; those without an origin are inputs."""
        missing = count - len(self.origins)
        if missing > 0:
            self.origins += [None] * missing
            self._nodes += [self._nodes[-1] if self._nodes else -1] * missing

    def note(self, origin: Origin | None) -> None:
        """Note an entry, and the newest node of autograd's graph."""
        node = next_sequence_number() - 1
        self._nodes.append(max(node, self._nodes[-1]) if self._nodes else node)
        self.origins.append(None if origin is None else self._shared.setdefault(origin, origin))

    def extend(self, origins: Sequence[Origin | None]) -> None:
        """Take over the origins of another recording; its nodes are not known."""
        self.origins += origins
        self._nodes += [-1] * len(origins)

    def of_node(self, node: int) -> Origin | None:
        """The origin of a node: its own, or that of the entry before (views record nothing)."""
        nodes = self._nodes
        if nodes and node <= nodes[-1]:
            index = bisect.bisect_left(nodes, node)
            index -= nodes[index] != node
            while index >= 0 and self.origins[index] is None:
                index -= 1
            if index >= 0:
                return self.origins[index]
        elif nodes and node <= nodes[-1] + _LARGEST_GAP and self.origins[-1] is not None:
            return self.origins[-1]
        return None if self.before is None else self.before.of_node(node)


_EARLIER = 4
_LARGEST_GAP = 1 << 32  # nodes that accumulate a leaf's gradient have the highest number of all


def origin(log: OriginLog) -> Origin:
    """The origin of the operation that is being recorded.

    Args:
        log: of the recorder, by which operations of backward have those of forward.
    """
    frame: FrameType | None = sys._getframe(1)
    node = current_node()
    line = own = ""
    modules: list[torch.nn.Module] = []
    forward = None
    while frame is not None:
        kind = _kind(frame)
        if kind == _MODULE:
            modules.append(frame.f_locals[frame.f_code.co_varnames[0]])
        elif kind == _AUTOGRAD and node is not None:
            forward = log.of_node(sequence_number(node))
            if forward is not None and not line:
                return forward._replace(in_backward=True)
            if forward is not None and not modules:  # a hook, or a function's own backward
                return Origin(forward.path, own or forward.own, line, in_backward=True)
            node = None
        elif kind in (_OWN, _INSTALLED):
            if not line:
                line = _text(frame)
            if kind == _OWN and not own:
                own = _text(frame)
        frame = frame.f_back
    return Origin(_path_of(modules, log), own, line)


def user_line() -> str:
    """The user's line that runs now, or whose gradient does: "file.py:12 (function)", or "".

    Example:
        >>> user_line().endswith(")")                      # whoever runs this example
        True
    """
    return origin(recorder().noted or OriginLog()).line


_OWN, _INSTALLED, _OTHER, _AUTOGRAD, _MODULE = range(5)
_INTERNAL = ("torch.", "isoshard.", "jax.", "jaxlib.")
_COMMANDS = ("isoshard.cli.", *(f"isoshard.{annex}.cli." for annex in ANNEXES))
_LIBRARY = tuple(
    f"{Path(path).resolve()}/" for path in map(sysconfig.get_path, ("stdlib", "platstdlib"))
)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_GENERATED = ("<frozen", "<string>", "<eval_with_key>", "<__array_function__")
_CALL: CodeType | None = getattr(torch.nn.Module.__call__, "__code__", None)
_KINDS: Bounded[CodeType, int] = Bounded(CALLS, "engine: kinds of code")
_TEXTS: Bounded[tuple[str, str, int], str] = Bounded(CALLS, "engine: lines of code")


def _kind(frame: FrameType) -> int:
    try:
        kind = _KINDS.get(frame.f_code)
    except TypeError:  # code of dynamo's, which may have a dictionary among its constants
        return _kind_of(frame)
    if kind is None:
        kind = _KINDS[frame.f_code] = _kind_of(frame)
    return kind


def _kind_of(frame: FrameType) -> int:
    """Whose code a frame runs."""
    code = frame.f_code
    if code is _CALL:
        return _MODULE
    file, module = code.co_filename, f"{frame.f_globals.get('__name__', '')}."
    if module.startswith(_INTERNAL) and not module.startswith(_COMMANDS):
        return _AUTOGRAD if module.startswith("torch.autograd.graph.") else _OTHER
    if file.startswith(_GENERATED):
        return _OTHER
    installed = any(folder in file for folder in _PACKAGES)
    if file.startswith(_LIBRARY) and not installed:
        return _OTHER
    return _INSTALLED if installed else _OWN


def _text(frame: FrameType) -> str:
    code, line = frame.f_code, frame.f_lineno
    key = (code.co_name, code.co_filename, line)
    text = _TEXTS.get(key)
    if text is None:
        text = _TEXTS[key] = f"{Path(code.co_filename).name}:{line} ({code.co_name})"
    return text


class _Tree(NamedTuple):
    """The names of the modules in one.

    Attributes:
        root: the module.
        names: each module in it and its name, by id.
    """

    root: weakref.ref[torch.nn.Module]
    names: dict[int, tuple[weakref.ref[torch.nn.Module], str]]

    def path(self, module: torch.nn.Module) -> str | None:
        """A module's name with the class of the root; None if it is not in here."""
        root, entry = self.root(), self.names.get(id(module))
        if root is None or entry is None or entry[0]() is not module:
            return None
        kind = type(root).__name__
        return f"{kind}/{entry[1]}" if entry[1] else kind


_TREES: list[_Tree] = []
_MOST_TREES = 32


def _path_of(modules: list[torch.nn.Module], log: OriginLog) -> str:
    """The path of the innermost of the modules that are being called, which come first."""
    if not modules:
        return ""
    module = modules[0]
    for tree in _TREES:  # also of a layer that checkpointing calls alone
        path = tree.path(module)
        if path is not None:
            return path
    for root in reversed(modules):
        if id(root) in log.searched and root is not module:
            continue
        log.searched.add(id(root))
        names = {id(child): (weakref.ref(child), name) for name, child in root.named_modules()}
        tree = _Tree(weakref.ref(root), names)
        path = tree.path(module)
        if path is not None:
            _TREES[:] = [kept for kept in _TREES if kept.root() not in (None, root)]
            _TREES[:0] = [tree]
            del _TREES[_MOST_TREES:]
            return path
    return type(module).__name__
