"""What ring attention moves, holds and computes: by the compiled program, and by its tiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collectives
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.nn import dropout
from isoshard.domain.attention import ring_attention

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


def test_other_mesh_axes_add_nothing():
    """Batch and heads are left to XLA.

    Keys, values and their gradients make one hop, and the balance moves q, k, v and four gradients.
    """
    mesh = make_mesh((2, 2, 2), ("d", "s", "m"))
    shard = 16 // 2 * 16 * 4  # of one head
    text = compiled(mesh, 16, P("d", "s", "m"), samples=2, causal=True).as_text()
    balance = (2 + 1 + 1) + (2 + 2 + 1 + 1)
    assert moved(text) == {"collective-permute": (4 + balance) * shard}


def test_memory_is_that_of_a_shard():
    """Half of it over twice the devices."""

    def held(devices, length):
        mesh = make_mesh((devices,), ("s",))
        memory = compiled(mesh, length, gradient=False, tile=32).memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes

    much = held(8, 4096)
    assert much < 0.55 * held(4, 4096)
    assert much < 4096 * 4096  # a quarter of one head's scores


def test_bits_of_dropout_depend_on_places_alone():
    numbers = [jnp.arange(n) for n in (3, 2, 40, 50)]
    keep = jax.jit(dropout.keep, static_argnums=1)
    whole = np.asarray(keep(jax.random.key(0), 0.25, *numbers))
    assert abs(whole.mean() - 0.75) < 0.01
    for axis in range(4):  # no sample, head, query or key repeats another
        first, second = (whole.take(i, axis) for i in (0, 1))
        assert (first != second).mean() > 0.25
    part = keep(jax.random.key(0), 0.25, *[n[1::2] for n in numbers])
    np.testing.assert_array_equal(part, whole[1::2, 1::2, 1::2, 1::2])
    assert keep(jax.random.key(0), 0.0, *numbers).all()
    assert (np.asarray(keep(jax.random.key(1), 0.25, *numbers)) != whole).mean() > 0.25
