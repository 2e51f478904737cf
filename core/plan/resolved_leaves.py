"""The rows of a resolved plan: one leaf, or the input or output of one module.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> (leaf,) = Plan({"w": ("x",)}).resolve({"w": (8, 4)}, make_mesh((8,), ("x",))).leaves
>>> leaf.name, leaf.layout, leaf.rule
('w', "P('x',)", 'w')
"""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding

from isoshard.core.layout.offload import is_offloaded


@dataclasses.dataclass(frozen=True)
class ResolvedLeaf:
    """The sharding of one leaf by a plan.

    Attributes:
        name: its path, joined by dots.
        shape: global shape.
        dtype: name of its dtype, or None if only the shape is known.
        sharding: its sharding, canonical.
        bytes_per_device: bytes of one shard; 4 an element if the dtype is unknown.
        rule: the pattern that decided, "(default)", "(small)" or "(its own axis names)"; of a
            product, those that decided, joined by " * ".
        notes: axes that are not split because no choice of mesh axes was left for them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    sharding: NamedSharding
    bytes_per_device: int
    rule: str
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The spec, and the memory kind if offloaded, as text."""
        spec = repr(self.sharding.spec)
        return f"{spec} in {self.sharding.memory_kind}" if is_offloaded(self.sharding) else spec


@dataclasses.dataclass(frozen=True)
class ResolvedActivation:
    """The spec of one module's input or output by a plan.

    Attributes:
        module: its name.
        side: "input" or "output".
        spec: as the plan has it, as text; shapes are known when the module runs.
        rule: the pattern that decided.
    """

    module: str
    side: str
    spec: str
    rule: str
