"""Types of arguments that no type narrower than `Any` describes, each with the reason.

>>> MeshLike is PyTree is Any
True

A parameter of a public function that takes anything declares by one of these names what it takes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

MeshLike: TypeAlias = Any
"""A mesh in any form: JAX's, isoshard's, torch's `DeviceMesh`, whose class is imported late."""

PlacementLike: TypeAlias = Any
"""A placement of torch, or one of torch's for each tensor; their classes are imported late."""

PlanLike: TypeAlias = Any
"""A `Plan`, or rules for one; or a sharding, where a function takes either."""

PyTree: TypeAlias = Any
"""A caller's tree of arrays and other leaves, in any container that JAX or torch flattens."""

Leaf: TypeAlias = Any
"""One object of a caller's tree, whose type a function examines."""

ArrayLike: TypeAlias = Any
"""An array of JAX or NumPy, a tracer, or an array in blocks: they have no class in common."""

DeviceTensor: TypeAlias = Any
"""A tensor on the `jax` device, whose class is defined in a later room, or a `DTensor`."""

LayoutLike: TypeAlias = Any
"""A layout as JAX has it, in blocks, or none: JAX types its own by their base class alone."""

DTypeLike: TypeAlias = Any
"""A dtype of torch, NumPy or JAX, or the name of one."""

DeviceLike: TypeAlias = Any
"""A device of JAX: the class is private there, and virtual devices have another."""

FlaxObject: TypeAlias = Any
"""A module of Flax, its variables or its random numbers: this bridge does not import Flax."""

AutogradContext: TypeAlias = Any
"""`ctx` of a `torch.autograd.Function`: a user's attributes are set on it."""

AutogradFunction: TypeAlias = Any
"""A subclass of `torch.autograd.Function`: its `forward` has a signature of its own."""

Opaque: TypeAlias = Any
"""Passed on, rejected or compared, and never examined."""
