"""The public names: those of the facade, of the modules it exports, and of the two bridges.

griffe reads them from the sources: nothing is imported.
"""

from __future__ import annotations

import dataclasses

import griffe

PACKAGE = "isoshard"
KINDS = {
    "functions": "Functions",
    "classes": "Classes",
    "values": "Values",
    "modules": "Modules",
    "errors": "Errors and warnings",
    "elsewhere": "Of other packages",
}
"""Kind of a name -> the heading over it."""
BRIDGES = ("jax_bridge", "torch_bridge")
"""Public modules that are imported by name: the facade does not list them."""


@dataclasses.dataclass(frozen=True)
class PublicName:
    """A name that a public module exports.

    Attributes:
        path: under which users find it, such as `isoshard.torch_bridge.compile`.
        kind: a key of `KINDS`.
        origin: where it is written, or which other package it comes from.
        read: what griffe read there; None for another package's.
    """

    path: str
    kind: str
    origin: str
    read: griffe.Object | None

    @property
    def name(self) -> str:
        """Without its module."""
        return self.path.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        if self.read is None:
            return f"`{self.origin}`."
        return self.read.docstring.value.partition("\n")[0] if self.read.docstring else ""


@dataclasses.dataclass(frozen=True)
class PublicModule:
    """A module whose names users say, under the path under which they find it."""

    path: str
    read: griffe.Object
    names: tuple[PublicName, ...]


def public_modules(package: griffe.Object) -> list[PublicModule]:
    """The facade, the modules that it exports, and the bridges."""
    facade = _module(PACKAGE, package)
    bridges = [
        _named(f"{PACKAGE}.{name}", package[name]) for name in BRIDGES if name in package.members
    ]
    inside = (name for name in [*facade.names, *bridges] if name.kind == "modules" and name.read)
    return [facade, *(_module(name.path, name.read) for name in inside)]


def public_members(read: griffe.Class) -> list[griffe.Object | griffe.Alias]:
    """The documented public members of a class, those of its bases in the package included."""
    members = {**read.inherited_members, **read.members}
    return [
        member
        for name, member in sorted(members.items())
        if not name.startswith("_") and member.has_docstring
    ]


def _module(path: str, read: griffe.Object) -> PublicModule:
    exported = sorted({str(name) for name in read.exports or ()}, key=str.lower)
    return PublicModule(
        path, read, tuple(_named(f"{path}.{name}", read[name]) for name in exported)
    )


def _named(path: str, read: griffe.Object | griffe.Alias) -> PublicName:
    try:
        target = read.final_target if read.is_alias else read
    except griffe.AliasResolutionError:
        return PublicName(path, "elsewhere", read.target_path, None)
    if target.is_module and target.name in target.members:  # `from .loader import loader`
        target = target[target.name]
        target = target.final_target if target.is_alias else target
    if target.is_class and "__new__" in target.members and "__init__" not in target.members:
        target.members["__init__"] = target.members["__new__"]  # whose arguments the class takes
    return PublicName(path, _kind(target), target.path, target)


def _kind(read: griffe.Object) -> str:
    if read.is_class:
        return "errors" if read.name.endswith(("Error", "Warning")) else "classes"
    if read.is_module:
        return "modules"
    return "functions" if read.is_function else "values"
