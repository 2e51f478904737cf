"""What ring attention moves, holds and computes: by the compiled program, and by its tiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collectives
from isoshard.core.domain.attention import ring_attention
from isoshard.core.domain.attention.masking import Visibility, span
from isoshard.core.domain.attention.positions import Positions
from isoshard.core.domain.attention.setup import Extras, Setup
from isoshard.core.layout.mesh import make_mesh

HEADER = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$", re.MULTILINE)
LOOP = re.compile(r"body=%(?P<body>[\w.\-]+).*\"known_trip_count\":\{\"n\":\"(?P<trips>\d+)\"\}")
CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")


def moved(program):
    """Bytes that one device sends, each loop counted as often as it runs, by kind."""
    parts = HEADER.split(program)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+)", program, re.MULTILINE)

    def within(name, times):
        found = {}
        for line in bodies[name].splitlines():
            for kind, size in collectives.find(line):
                found[kind] = found.get(kind, 0) + times * size
            inside = [(loop["body"], int(loop["trips"])) for loop in LOOP.finditer(line)]
            inside += [(called, 1) for called in CALLED.findall(line)]
            for called, trips in inside:
                for kind, size in within(called, times * trips).items():
                    found[kind] = found.get(kind, 0) + size
        return found

    return within(entry, 1)


SEQUENCE = P(None, "s")


def compiled(mesh, length, spec=SEQUENCE, gradient=True, samples=1, key_heads=2, **given):
    """The program of queries with 4 heads of width 16."""

    def like(heads):
        shape = (samples, length, heads, 16)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    function = functools.partial(ring_attention, mesh=mesh, axis="s", **given)

    def both(q, k, v, dout):
        out, back = jax.vjp(function, q, k, v)
        return back(dout) if gradient else out

    return jax.jit(both).lower(like(4), like(key_heads), like(key_heads), like(4)).compile()


@pytest.mark.parametrize(("devices", "hops"), [(2, 2), (3, 6), (4, 9), (6, 15)])
def test_a_ring_moves_the_least(devices, hops):
    """Keys and values n - 1 times; in the gradient once more, and their gradients as often.

    Of two devices XLA sees that both passes receive the same, and moves it once.
    """
    mesh = make_mesh((devices,), ("s",))
    shard = 2 * (24 // devices) * 2 * 16 * 4  # keys and values of a device, 2 heads, float32
    forward = compiled(mesh, 24, gradient=False).as_text()
    assert moved(forward) == {"collective-permute": (devices - 1) * shard}
    assert moved(compiled(mesh, 24).as_text()) == {"collective-permute": hops * shard}


def test_balance_moves_one_shard_of_each():
    mesh = make_mesh((4,), ("s",))
    shard = 32 // 4 * 16 * 4  # of one head
    forward = compiled(mesh, 32, gradient=False, causal=True).as_text()
    around = 3 * (2 + 2) * shard
    assert moved(forward) == {"collective-permute": around + (4 + 2 + 2 + 4) * shard}
    zigzag = compiled(mesh, 32, gradient=False, causal=True, order="zigzag").as_text()
    assert moved(zigzag) == {"collective-permute": around}


@pytest.mark.parametrize("named", [True, False])
def test_other_mesh_axes_add_nothing(named):
    """Whether batch and heads are named or left to XLA.

    Keys, values and their gradients make one hop, and the balance moves q, k, v and four gradients.
    """
    mesh = make_mesh((2, 2, 2), ("d", "s", "m"))
    shard = 16 // 2 * 16 * 4  # of one head
    given = {"batch": "d", "heads": "m"} if named else {}
    text = compiled(mesh, 16, P("d", "s", "m"), samples=2, causal=True, **given).as_text()
    balance = (2 + 1 + 1) + (2 + 2 + 1 + 1)
    assert moved(text) == {"collective-permute": (4 + balance) * shard}


def test_few_key_heads_cost_one_each():
    """One key head for two devices: each passes it round, and nothing else moves."""
    mesh = make_mesh((4, 2), ("s", "m"))
    text = compiled(mesh, 32, P(None, "s"), heads="m", key_heads=1, gradient=False).as_text()
    assert moved(text) == {"collective-permute": 3 * 2 * 8 * 16 * 4}


def test_memory_is_that_of_a_shard():
    """Twice the sequence is twice the memory, and half of it over twice the devices."""

    def held(devices, length):
        mesh = make_mesh((devices,), ("s",))
        memory = compiled(mesh, length, causal=True, tile=32).memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes

    much = held(8, 4096)
    assert much < 2.05 * held(8, 2048)
    assert much < 0.55 * held(4, 4096)
    assert much < 4096 * 4096  # a quarter of one head's scores


def tiles(line, tile):
    """How many tiles each device computes in each step: int[devices, steps]."""
    setup = Setup(make_mesh((1,), ("s",)), ("s",), (), (), line, line, True, 1.0, 0.0, tile, False)
    number = line.block // tile

    def seen(block, other, i, j):
        sight = Visibility(
            setup, Extras(None, None, None, None), (1, 1, 1), (block, other), (line.block,) * 2
        )
        last, position = sight.lines(span(i, line.block, tile), span(j, line.block, tile))
        return last.max() >= position.min()

    blocks, inside = np.arange(line.blocks), np.arange(number)
    grid = jnp.stack(jnp.meshgrid(blocks, blocks, inside, inside, indexing="ij")).reshape(4, -1)
    found = np.asarray(jax.vmap(seen)(*grid)).reshape(line.blocks, line.blocks, -1).sum(-1)
    return np.stack([found[i, (i - blocks) % line.blocks] for i in blocks])


def test_zigzag_order_keeps_every_device_busy():
    """0.95 of the least time on paper, where natural order has little more than half of it."""
    devices, number, tile = 8, 16, 4
    length = devices * number * tile
    least = length * (length + 1) / 2 / devices
    spent = {
        zigzag: tiles(Positions(length, devices, zigzag), tile).max(0).sum() * tile**2
        for zigzag in (True, False)
    }
    assert least / spent[True] > 0.95
    assert 0.5 < least / spent[False] < 0.6
    every = tiles(Positions(length, devices, True), tile)
    assert (every == every[0]).all()
