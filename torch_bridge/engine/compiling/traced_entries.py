"""The jaxpr of a plan, for which entries that compute the same are traced once.

Tracing a layer takes as long as tracing the first one did, though nothing new is found. Here an
entry is traced by itself, as a function of what it reads, and its equations are written again for
each entry like it, with other variables. Entries are equal if their recipe is the same, what they
read has equal shapes and dtypes, and what a rewrite (`rewrites.py`, `image_layout.py`) may look at
is of the same make. Of an operator on lists each kind of element is traced once.

The program is the one that `plan_lowering.computed` gives, but for what several entries have in
common (`lowerings/cse.py`): here each computes it. An entry has the name scope of its notes, with
`*` for the number of its layer, as equal layers become one. Plans with names for slots, or with
inputs that rest in the memory of the host, are not traced like that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr
from isoshard.core.runtime.jaxprs import opened
from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.lowerings.cse import shared_program

from .compile_request import CompileRequest
from .equation_templates import EquationTemplate, TemplateWriter, TracedAtom
from .image_layout import Env
from .interpreting import EntryValues, at_entry, needed
from .plan_lowering import constrained
from .rewrites import looked_through
from .traced_lists import TracedLists

Forms = tuple[TracedAtom | None, TracedAtom | None, TracedAtom | None]
"""A slot's value as torch has it, with channels last, and before its axes were merged."""
_NOTHING: Forms = (None, None, None)


def traced_entries(
    plan: CompileRequest, arguments: Sequence[Any]
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Trace a plan. To be called inside `plan_lowering.tracing`.

    Args:
        plan: what to trace.
        arguments: its inputs, each lifted float, and each random word, or a
            `jax.ShapeDtypeStruct` for one.

    Returns:
        The jaxpr; and one that has each equation that was traced once, with variables of no
        meaning.
    """
    entries = _Entries()
    inputs = opened(jax.make_jaxpr(lambda *xs: xs)(*arguments)).invars
    results = entries.results(plan, [entries.writer.typed(input_) for input_ in inputs])
    return entries.writer.program(inputs, results), entries.writer.kinds()


class _Entries:
    """The entries of a plan, being written."""

    def __init__(self) -> None:
        self.writer = TemplateWriter()
        self._lists = TracedLists(self.writer)
        self._kinds: dict[Any, tuple[EquationTemplate, list[tuple[int, int]]]] = {}
        self._slots: list[Forms] = []
        self._makers: list[Any] = []

    def results(self, plan: CompileRequest, typed_inputs: Sequence[TracedAtom]) -> list[Any]:
        """Write a plan; gives what it returns."""
        inputs, floats = len(plan.leaves), len(plan.leaves) + plan.lifted
        self._write_all(
            plan,
            iter(typed_inputs[:inputs]),
            iter(typed_inputs[inputs:floats]),
            iter(typed_inputs[floats:]),
        )
        return [
            self._result(slot, layout_id)
            for slot, layout_id in zip(plan.live, plan.result_layouts, strict=True)
        ]

    def _write_all(
        self,
        plan: CompileRequest,
        leaves: Iterator[TracedAtom],
        floats: Iterator[TracedAtom],
        words: Iterator[TracedAtom],
    ) -> None:
        used = needed(plan.program, plan.live)
        for index, (entry, is_needed) in enumerate(zip(plan.program, used, strict=True)):
            if not isinstance(entry[0], int):
                self._slots.append((next(leaves), None, None))
                self._makers.append(None)
                continue
            recipe = RECIPES[entry[0]]
            taken = [next(floats) for _ in range(recipe.lifted)]
            taken += [next(words)] if recipe.random else []
            if is_needed:
                self.writer.scope = "" if plan.notes is None else any_layer(plan.notes.scope(index))
                with at_entry(index):
                    self._write_entry(recipe, entry, taken)
            else:
                self._slots += [_NOTHING] * recipe.count
            self._makers += [(recipe, entry)] * recipe.count
        self.writer.scope = ""

    def _write_entry(
        self, recipe: Recipe, entry: Sequence[int], taken: Sequence[TracedAtom]
    ) -> None:
        """Write an entry that takes lifted floats, or a random word."""
        forms = [self._slots[slot] for slot in entry[1:]]
        tensors = [plain for plain, last, _ in forms if plain is not None and last is None]
        if len(tensors) == len(forms):
            written = self._lists.write(recipe.id, recipe.detail, [*tensors, *taken])
            if written is not None:
                self._slots += [(atom, None, None) for atom in written]
                return
        slots = looked_through(recipe, entry, self._makers)
        index_of = {slot: index for index, slot in enumerate(slots)}
        makers = [self._maker(slot, index_of) for slot in slots]
        forms = [self._slots[slot] for slot in slots]
        local = (recipe.id, *[index_of[slot] for slot in entry[1:]])
        key = (
            local,
            tuple([_avals(form) for form in forms]),
            tuple([maker and maker[1] for maker in makers]),
            _avals(taken),
        )
        if key not in self._kinds:
            self._kinds[key] = self._traced(recipe, local, makers, forms, taken)
        template, forms_of = self._kinds[key]
        begin = len(self._slots)
        self._slots += [_NOTHING] * recipe.count
        atoms = [atom for form in forms for atom in form if atom is not None]
        results = self.writer.write(template, [*atoms, *taken])
        for (slot, form), result in zip(forms_of, results, strict=True):
            index = slots[slot] if slot < len(slots) else begin + slot - len(slots)
            plain, last, unmerged = self._slots[index]
            self._slots[index] = (
                result if form == 0 else plain,
                result if form == 1 else last,
                result if form == 2 else unmerged,
            )

    def _maker(self, slot: int, index_of: dict[int, int]) -> Any:
        """What made a slot, if that is looked at, in terms of the slots that are."""
        maker = self._makers[slot]
        if maker is None or any(slot not in index_of for slot in maker[1][1:]):
            return None
        return maker[0], (maker[0].id, *[index_of[slot] for slot in maker[1][1:]])

    def _traced(
        self,
        recipe: Recipe,
        entry: Sequence[int],
        makers: Sequence[Any],
        forms: Sequence[Forms],
        taken: Sequence[TracedAtom],
    ) -> tuple[EquationTemplate, list[tuple[int, int]]]:
        """Trace an entry as a function of the forms of the slots it looks at, floats and words.

        Returns:
            Its equations; and of each result the slot and which form it is. The entry's own slots
            come after those that it looks at; of these it may make another form.
        """
        indices: list[tuple[int, int]] = []

        def isoshard_entry(*arguments: Any) -> list[Any]:
            values = iter(arguments)
            env, unmerged = Env(), dict[int, Any]()
            for slot, form in enumerate(forms):
                plain, last, separate = [None if atom is None else next(values) for atom in form]
                env.append(plain)
                env.last.update({} if last is None else {slot: last})
                unmerged.update({} if separate is None else {slot: separate})
            before = [dict(enumerate(env)), dict(env.last), dict(unmerged)]
            floats = [next(values) for _ in range(recipe.lifted)]
            key = random_state.key_of(next(values)) if recipe.random else None
            with shared_program():
                env += EntryValues(env, makers, unmerged).of(recipe, entry, floats, key)
            after = [dict(enumerate(env)), env.last, unmerged]
            indices.extend(
                (slot, form)
                for form, (old, new) in enumerate(zip(before, after, strict=True))
                for slot, value in new.items()
                if value is not None and old.get(slot) is not value
            )
            return [after[form][slot] for slot, form in indices]

        atoms = [atom for form in forms for atom in form if atom is not None]
        return self.writer.traced(isoshard_entry, [*atoms, *taken]), indices

    def _result(self, slot: int, layout_id: int) -> Any:
        """What the program returns of a slot, in a layout."""
        forms = self._slots[slot]
        plain = forms[0]
        if plain is not None and layout_id == sharding_ids.UNPLACED:
            return plain.atom
        key = "result", layout_id, _avals(forms)
        atoms = [atom for atom in forms[:2] if atom is not None]

        def isoshard_result(*values: Any) -> list[Any]:
            env = Env()
            env.append(None if plain is None else values[0])
            env.last.update({} if forms[1] is None else {0: values[-1]})
            return [constrained(env[0], layout_id)]

        if key not in self._kinds:
            self._kinds[key] = self.writer.traced(isoshard_result, atoms), []
        (result,) = self.writer.write(self._kinds[key][0], atoms)
        return result.atom


def any_layer(scope: str) -> str:
    """A scope with `*` for the numbers in the paths of modules.

    Example:
        >>> any_layer("backward/Net/layers.12.mlp/train.py:3 (step)")
        'backward/Net/layers.*.mlp/train.py:3 (step)'
    """
    return _NUMBER.sub("*", scope)


_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")


def _avals(atoms: Sequence[TracedAtom | None]) -> tuple[int | None, ...]:
    return tuple([None if atom is None else atom.aval for atom in atoms])
