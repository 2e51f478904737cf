"""What of a tape has to be computed, and what may be overwritten by it.

Liveness decides both: a result without references is not computed, and the memory of an input that
has no references left is donated to a result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.torch_bridge.engine.recording.compile_settings import Settings, current
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Taken

from .interpreting import Notes, needed

Blocks = tuple[BlockLayout | None, ...]


@dataclasses.dataclass
class CompileRequest:
    """A tape reduced to what compiling and running it need.

    Attributes:
        program: the entries.
        leaves: slots of the inputs.
        live: slots of the results.
        result_layouts: the layout of each of them (`sharding_ids.UNPLACED`: XLA chooses).
        donated: positions in `leaves` that may be overwritten.
        placed: the layout of each leaf.
        draws: number of random keys.
        lifted: number of lifted floats.
        settings: see `compile_settings.current`.
        recipes: the recipes by the ids in the entries.
        blocks: as of `Program`; known once the plan has been traced.
        calls_host: it calls Python while it runs, which may raise; likewise.
        options: those of the compiler; likewise.
        notes: origins and names of its entries, for what is traced of it; not in the key.
        moved: how many of its lifted floats are places of views; see `dynamic_indices`.
    """

    program: tuple[Any, ...]
    leaves: tuple[int, ...]
    live: tuple[int, ...]
    result_layouts: tuple[int, ...]
    donated: tuple[int, ...]
    placed: tuple[int, ...]
    draws: int
    lifted: int
    recipes: frozenset[Recipe]
    settings: Settings = dataclasses.field(default_factory=current)
    blocks: Blocks = ()
    calls_host: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    notes: Notes | None = None
    moved: int = 0

    def replicated(self) -> jax.sharding.Sharding | None:
        """The layout of lifted floats and random words: replicated over the program's devices."""
        layout = max(self.placed, default=sharding_ids.UNPLACED)
        if layout == sharding_ids.UNPLACED:
            return None
        return sharding_ids.sharding(sharding_ids.replicated_like(layout))

    def lean(self) -> CompileRequest:
        """The same without entries that no result depends on.

        Inputs are kept, and what draws random numbers or takes floats, whose order would change.
        """
        slots, slot, fixed = [], 0, set[int]()
        for entry in self.program:
            recipe = RECIPES[entry[0]] if isinstance(entry[0], int) else None
            slots.append(range(slot, slot + (1 if recipe is None else recipe.count)))
            if recipe is None or recipe.random or recipe.lifted:
                fixed.add(slot)
            slot = slots[-1].stop
        used = needed(self.program, [*self.live, *fixed])
        if all(used):
            return self
        used_slots = [
            slot for its, is_used in zip(slots, used, strict=True) if is_used for slot in its
        ]
        index_of = {slot: index for index, slot in enumerate(used_slots)}
        return dataclasses.replace(
            self,
            program=tuple(
                (entry[0], *[index_of[slot] for slot in entry[1:]])
                if isinstance(entry[0], int)
                else entry
                for entry, is_used in zip(self.program, used, strict=True)
                if is_used
            ),
            notes=self.notes
            and self.notes.chosen([n for n, is_used in enumerate(used) if is_used]),
            leaves=tuple([index_of[slot] for slot in self.leaves]),
            live=tuple([index_of[slot] for slot in self.live]),
        )

    def key(self) -> Any:
        """Two plans with one key are the same program."""
        return (*self.donation_key(), self.donated)

    def donation_key(self) -> Any:
        """Two plans with one such key differ in nothing but which inputs may be overwritten."""
        return (self.program, self.live, self.result_layouts, self.placed, self.settings)


def request_of(tape: Tape) -> CompileRequest:
    """Find the results that are referenced, and the inputs that are no more."""
    leaves = tape.leaves
    taken = [tape.slots[slot] for slot in leaves]
    index_of = {input_.memory: position for position, input_ in enumerate(tape.inputs())}
    seen = [slot() for slot in tape.slots if not isinstance(slot, Taken)]
    values = {value.slot: value for value in seen if value is not None and value.tape is tape}
    # JAX pairs donated inputs with results in order: put each result where the input is whose
    # memory it takes over, or XLA copies.
    last = len(leaves)
    live = sorted(values, key=lambda slot: index_of.get(values[slot].memory, last))
    free = [n for n, value in enumerate(taken) if isinstance(value, Taken) and value.is_free]
    return CompileRequest(
        tuple(tape.program),
        tuple(leaves),
        tuple(live),
        tuple([values[slot].layout for slot in live]),
        tuple(free),
        (),
        len(tape.words),
        len(tape.scalars),
        frozenset(tape.recipes),
        notes=Notes(tape.origins()),
    )
