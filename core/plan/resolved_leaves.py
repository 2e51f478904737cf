"""What a plan says of one leaf, or of the values around one module.

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
    """What a plan says about one leaf.

    Attributes:
        name: its path, joined by dots.
        shape: global shape.
        dtype: name of its dtype, or None if only the shape is known.
        sharding: its layout, canonical.
        bytes_per_device: bytes of one shard; 4 an element if the dtype is unknown.
        rule: the pattern that decided, "(default)", "(small)" or "(its own axis names)"; of a
            product, those that decided, joined by " * ".
        notes: axes that are whole because no choice of mesh axes was left for them.
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
        """The spec, and the memory if it is another than the one computed in, as text."""
        spec = repr(self.sharding.spec)
        return f"{spec} in {self.sharding.memory_kind}" if is_offloaded(self.sharding) else spec


@dataclasses.dataclass(frozen=True)
class ResolvedActivation:
    """What a plan says about the values around one module.

    Attributes:
        module: its name.
        side: "input" or "output".
        spec: what is asked for, as text; shapes are known when the module runs.
        rule: the pattern that decided.
    """

    module: str
    side: str
    spec: str
    rule: str
