"""Random programs with parts that repeat, and parts that nearly do: integers, so all is exact."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.repeats.rolled_program import rolled
from tests.core.repeats.rolled_values import assert_equal

SHAPE = (3, 3)
OPERATIONS = (
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.bitwise_xor,
    jnp.maximum,
    lambda x, y: x @ y,
    lambda x, y: jnp.where(x > y, x, 2 * y),
    lambda x, y: x[::-1] - y.T,
)


class _Template:
    """The instructions of a layer: (operation, two operands); an operand is (kind, number)."""

    def __init__(self, dice: random.Random, carries: int, families: int) -> None:
        self.carries = carries
        self.code = []
        for place in range(dice.randint(3, 8)):
            operands = []
            for _ in range(2):
                kinds = ["carry", "family", "fixed", "literal", "position"] + ["local"] * 4
                kind = dice.choice(kinds if place else kinds[:5])
                limit = {"carry": carries, "family": families, "local": place or 1}.get(kind, 2)
                operands.append((kind, dice.randrange(limit)))
            self.code.append((dice.randrange(len(OPERATIONS)), *operands))
        self.gives = [dice.randrange(len(self.code)) for _ in range(carries)]
        self.keeps = dice.randrange(len(self.code))

    def changed(self, dice: random.Random) -> _Template:
        other = _Template.__new__(_Template)
        other.carries, other.gives, other.keeps = self.carries, list(self.gives), self.keeps
        other.code = list(self.code)
        place = dice.randrange(len(self.code))
        operation, left, right = self.code[place]
        how = dice.randrange(4)
        if how == 0:
            other.code[place] = operation, right, left
        elif how == 1:
            other.code[place] = operation, ("fixed", 1), right
        elif how == 2:
            other.code[place] = (operation + 1) % len(OPERATIONS), left, right
        else:
            other.gives[0] = dice.randrange(len(self.code))
        return other

    def run(self, layer, carry, families, fixed, table):
        made = []

        def operand(kind, number):
            if kind == "carry":
                return carry[number]
            if kind == "family":
                return families[number][layer]
            if kind == "fixed":
                return fixed[number]
            if kind == "literal":
                return 3 + number * layer
            if kind == "position":
                return table[layer, number]
            return made[number]

        for operation, left, right in self.code:
            one, two = operand(*left), operand(*right)
            one = jnp.broadcast_to(jnp.asarray(one, jnp.int32), SHAPE)
            made.append(
                OPERATIONS[operation](one, jnp.asarray(two, jnp.int32) + jnp.zeros_like(one))
            )
        return [made[one] for one in self.gives], made[self.keeps]


def _program(seed: int, depth: int):
    dice = random.Random(seed)
    families = dice.randint(1, 3)
    forward = _Template(dice, dice.randint(1, 2), families)
    backward = _Template(dice, dice.randint(1, 2), families + 1)
    update = _Template(dice, 1, families)
    odd = {dice.randrange(depth): forward.changed(dice) for _ in range(dice.choice((0, 0, 1, 2)))}
    odd_back = {dice.randrange(depth): backward.changed(dice) for _ in range(dice.choice((0, 1)))}
    escapes = {dice.randrange(depth) for _ in range(dice.choice((0, 0, 1)))}

    def run(carry, members, fixed, table):
        kept, results = [], []
        for layer in range(depth):
            template = odd.get(layer, forward)
            carry, value = template.run(layer, carry, members, fixed, table)
            kept.append(value)
            if layer in escapes:
                results.append(value + 1)
        back = (carry * 2)[: backward.carries]
        gradients = []
        for layer in reversed(range(depth)):
            template = odd_back.get(layer, backward)
            back, value = template.run(layer, back, [*members, kept], fixed, table)
            gradients.append(value)
        gradients.reverse()
        new = [
            update.run(layer, [gradients[layer]], members, fixed, table)[1]
            for layer in range(depth)
        ]
        return results, new, back, carry

    numbers = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(numbers.integers(-9, 9, shape), jnp.int32)

    arguments = (
        [draw(*SHAPE) for _ in range(forward.carries)],
        [[draw(*SHAPE) for _ in range(depth)] for _ in range(families)],
        [draw(*SHAPE) for _ in range(2)],
        draw(depth, 2),
    )
    return jax.make_jaxpr(run)(*arguments), jax.tree.leaves(arguments)


def test_rolled_programs_give_the_same_and_most_are_rolled():
    results = []
    for seed in range(2):
        program, inputs = _program(seed, depth=5)
        found = rolled(program, at_least=2 + seed % 2)
        assert_equal(program, found, inputs)
        results.append(found)
    assert sum(len(one.loops) > 0 for one in results) >= 1
    assert all(len(one.loops) + one.batched > 0 for one in results)
    assert all(one.batched > 0 for one in results)
