"""The reference: a page for each public module, with every name that it exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import griffe

from .docstrings import as_markdown
from .public_names import KINDS, PublicModule, PublicName, public_members

FOLDER = "reference"
_OUTER, _INNER = ":" * 6, ":" * 5


def page_of(module: str) -> str:
    """The page of a public module.

    >>> page_of("isoshard.torch_bridge")
    'reference/torch_bridge.md'
    """
    return f"{FOLDER}/{module.rpartition('.')[2]}.md"


def pages(modules: Sequence[PublicModule]) -> Iterator[tuple[str, str]]:
    """Page and Markdown of each public module.

    What several modules export is described where it is met first; the others lead there.
    """
    first: dict[str, str] = {}
    for module in modules:
        for name in module.names:
            first.setdefault(name.origin, name.path)
    for module in modules:
        yield page_of(module.path), _page(module, first)


def _page(module: PublicModule, first: dict[str, str]) -> str:
    parts = [
        f"---\nmodule: {module.path}\n---",
        f"# {module.path}",
        f"{_OUTER}{{py:module}} {module.path}\n{_OUTER}",
        as_markdown(module.read.docstring),
    ]
    for kind, heading in KINDS.items():
        names = [name for name in module.names if name.kind == kind]
        if names:
            rows = (f"| {_link(name)} | {_in_cell(name.summary)} |" for name in names)
            parts += [f"## {heading}", "\n".join(["| name | what it is |", "|---|---|", *rows])]
            parts += [_entry(name, first[name.origin]) for name in names if kind != "modules"]
    return "\n\n".join(parts) + "\n"


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(name: PublicName) -> str:
    if name.kind == "modules":
        return f"[`{name.name}`]({name.name}.md)"
    return f"[`{name.name}`](#{name.path})"


def _entry(name: PublicName, first: str) -> str:
    if name.read is None:
        return _described("data", name.name, f"`{name.origin}`, unchanged.")
    if first != name.path:
        return _described(_role(name.read), name.name, f"The same as [`{first}`](#{first}).")
    return _object(name.read, name.name, _OUTER)


def _role(read: griffe.Object) -> str:
    if read.is_class:
        return "exception" if read.name.endswith(("Error", "Warning")) else "class"
    return "function" if read.is_function else "data"


def _object(read: griffe.Object, name: str, fence: str) -> str:
    text = as_markdown(read.docstring)
    if isinstance(read, griffe.Class):
        members = "\n\n".join(map(_member, public_members(read)))
        signature = read.signature(name=name) or name
        return _described(_role(read), signature, f"{text}\n\n{members}", fence)
    if isinstance(read, griffe.Function):
        return _described("function", read.signature(name=name), text, fence)
    return _described("data", name, text, fence)


def _member(member: griffe.Object | griffe.Alias) -> str:
    read = member.final_target if member.is_alias else member
    text = as_markdown(read.docstring)
    if isinstance(read, griffe.Function):
        kind = {"staticmethod", "classmethod"} & read.labels
        role = kind.pop() if kind else "method"
        return _described(role, read.signature(), text, _INNER)
    role = "property" if "property" in read.labels else "attribute"
    options = f":type: {read.annotation}\n" if read.annotation else ""
    return _described(role, read.name, text, _INNER, options)


def _described(role: str, signature: str, text: str, fence: str = _OUTER, options: str = "") -> str:
    return f"{fence}{{py:{role}}} {' '.join(signature.split())}\n{options}\n{text.strip()}\n{fence}"
