"""`xs.Generator`: streams of random numbers of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

Draw = Callable[[torch.Generator], torch.Tensor]


def full(value: float) -> torch.Tensor:
    return torch.full((32,), float(value), device="jax")


DRAWS: dict[str, Draw] = {
    "rand": lambda g: torch.rand(32, device="jax", generator=g),
    "randn": lambda g: torch.randn(32, device="jax", generator=g),
    "randint": lambda g: torch.randint(0, 1000, (32,), device="jax", generator=g),
    "randperm": lambda g: torch.randperm(32, device="jax", generator=g),
    "normal_": lambda g: full(0).normal_(2, 3, generator=g),
    "uniform_": lambda g: full(0).uniform_(-1, 1, generator=g),
    "exponential_": lambda g: full(0).exponential_(generator=g),
    "cauchy_": lambda g: full(0).cauchy_(generator=g),
    "geometric_": lambda g: full(0).geometric_(0.1, generator=g),
    "bernoulli_": lambda g: full(0).bernoulli_(0.5, generator=g),
    "random_": lambda g: full(0).random_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(full(0.5), generator=g),
    "bernoulli out": lambda g: torch.bernoulli(full(0.5), generator=g, out=full(0)),
    "normal tensors": lambda g: torch.normal(full(0), full(1), generator=g),
    "normal size": lambda g: torch.normal(0.0, 1.0, (32,), generator=g, device="jax"),
    "poisson": lambda g: torch.poisson(full(50), generator=g),
    "multinomial": lambda g: torch.multinomial(full(1), 16, generator=g),
    "a view": lambda g: torch.zeros(4, 8, device="jax").t()[2:].normal_(generator=g),
}
SLOW = ("poisson", "randperm", "cauchy_", "geometric_", "uniform_", "random_", "randn")
"""They take their generator as the others do."""


def test_a_stream_follows_its_seed_and_leaves_the_default_one_alone():
    state = torch.get_device_module("jax").get_rng_state()
    names = [name for name in DRAWS if name not in SLOW]
    generators = {name: xs.Generator("jax") for name in names}

    def drawn(seed: int | None = None) -> list[torch.Tensor]:
        """A draw of each, by the same program each time."""
        if seed is not None:
            for generator in generators.values():
                generator.manual_seed(seed)
        found = [DRAWS[name](generators[name]) for name in names]
        xs.sync()
        return [one.cpu() for one in found]

    first, second, again = drawn(7), drawn(), drawn(7)
    for number, name in enumerate(names):
        assert torch.equal(first[number], again[number]), name
        assert not torch.equal(first[number], second[number]), name
    assert torch.equal(torch.get_device_module("jax").get_rng_state(), state)


def test_a_seed_gives_the_numbers_that_it_gives_the_default_stream():
    torch.manual_seed(3)
    want = torch.randn(8, device="jax").tolist()
    torch.manual_seed(4)
    generator = xs.Generator("jax").manual_seed(3)
    assert torch.randn(8, device="jax", generator=generator).tolist() == want


def test_a_fresh_generator_starts_with_torchs_seed():
    assert xs.Generator().initial_seed() == torch.Generator().initial_seed()
    assert xs.Generator().manual_seed(5).initial_seed() == 5
    assert xs.Generator().device == torch.device("jax", 0)
    assert isinstance(xs.Generator(torch.device("jax")), torch.Generator)


def test_seed_is_new_each_time():
    generator = xs.Generator()
    assert generator.seed() == generator.initial_seed() != generator.seed()


def drawn(generator: torch.Generator) -> list[float]:
    return torch.rand(4, device="jax", generator=generator).tolist()


@pytest.mark.parametrize("copied", [
    xs.Generator.clone_state, xs.Generator.graphsafe_get_state, copy.deepcopy,
    lambda g: pickle.loads(pickle.dumps(g)), lambda g: xs.Generator().set_state(g.get_state()),
    lambda g: xs.Generator().graphsafe_set_state(g),
    lambda g: xs.Generator().manual_seed(g.initial_seed()).set_offset(g.get_offset()),
])  # fmt: skip
def test_where_a_stream_stands_can_be_kept(copied):
    generator = xs.Generator().manual_seed(5)
    drawn(generator)
    kept = copied(generator)
    want = drawn(generator), drawn(generator)
    assert (drawn(kept), drawn(kept)) == want


def test_cpu_parts_of_torch_take_it_too():
    def batches():
        loader = torch.utils.data.DataLoader(
            torch.arange(32), batch_size=8, shuffle=True, generator=generator.manual_seed(2)
        )
        return torch.cat(list(loader)).tolist()

    generator = xs.Generator()
    assert batches() == batches() != list(range(32))
    split = torch.utils.data.random_split(range(8), [4, 4], generator=generator.manual_seed(1))
    again = torch.utils.data.random_split(range(8), [4, 4], generator=generator.manual_seed(1))
    assert split[0].indices == again[0].indices


def test_numbers_do_not_depend_on_the_mesh(mesh):
    want = torch.randn(8, 8, device="jax", generator=xs.Generator().manual_seed(3)).tolist()
    for spec in (("x", "y"), (None, "y"), (("y", "x"), None)):
        t = xs.mark_sharding(torch.zeros(8, 8, device="jax"), mesh, spec)
        assert t.normal_(generator=xs.Generator().manual_seed(3)).tolist() == want


def test_many_generators_may_come_and_go():
    want = [drawn(xs.Generator().manual_seed(seed)) for seed in range(2)]
    made = [
        torch.rand(4, device="jax", generator=xs.Generator().manual_seed(n % 2)) for n in range(12)
    ]
    assert [t.tolist() for t in made] == want * 6


# --- Refused -------------------------------------------------------------------------------------


def test_a_generator_of_the_cpu_is_refused():
    for draw in DRAWS.values():
        with pytest.raises(RuntimeError, match=r"but found 'cpu'; make one with isoshard"):
            draw(torch.Generator().manual_seed(0))


def test_another_device_is_refused():
    with pytest.raises(ValueError, match=r"is for the jax device, not 'cpu'; use torch.Generator"):
        xs.Generator("cpu")


def test_an_error_does_not_leave_the_stream_in_use():
    generator = xs.Generator().manual_seed(3)
    with pytest.raises(RuntimeError, match=r"normal expects std >= 0"):
        torch.empty(4, device="jax").normal_(0, -1, generator=generator)
    torch.manual_seed(0)
    want = torch.rand(4, device="jax").tolist()
    torch.manual_seed(0)
    assert torch.rand(4, device="jax").tolist() == want != drawn(generator)
    assert generator.get_offset() == 1


def test_inside_a_jax_function_it_is_refused():
    generator = xs.Generator()
    f = iso.jax_function(lambda x: x + torch.rand(3, device="jax", generator=generator))
    with pytest.raises(RuntimeError, match=r"pass rng=jax.random.key\(seed\)"):
        f(jax.numpy.zeros(3), rng=jax.random.key(0))


# --- Compiled steps ------------------------------------------------------------------------------


def test_a_compiled_step_draws_anew_and_moves_the_stream():
    generator = xs.Generator().manual_seed(3)
    x = torch.zeros(4, device="jax")

    def step(x):
        return x + torch.rand(4, device="jax", generator=generator), torch.rand_like(x)

    torch.manual_seed(0)
    want = [[part.tolist() for part in step(x)] for _ in range(3)]
    torch.manual_seed(0)
    generator.manual_seed(3)
    compiled = xs.compile(step)
    got = [[part.tolist() for part in compiled(x)] for _ in range(3)]
    assert got == want and len(compiled.replays) == 1
    assert generator.get_offset() == 3
    generator.manual_seed(3)
    torch.manual_seed(0)
    assert [part.tolist() for part in compiled(x)] == want[0]


def test_a_stream_seeded_inside_a_compiled_step_is_the_same_in_every_call():
    generator = xs.Generator().manual_seed(3)
    x = torch.zeros(4, device="jax")

    def step(x):
        before = torch.rand(4, device="jax", generator=generator)
        generator.manual_seed(3)
        return before, x + torch.rand(4, device="jax", generator=generator)

    want = [[part.tolist() for part in step(x)] for _ in range(3)]
    generator.manual_seed(3)
    compiled = xs.compile(step)
    assert [[part.tolist() for part in compiled(x)] for _ in range(3)] == want


def test_a_refused_step_puts_the_stream_back():
    generator = xs.Generator().manual_seed(3)

    @xs.compile
    def step(x):
        y = x + torch.rand(4, device="jax", generator=generator)
        return y if y.sum() > 0 else x

    with pytest.raises(xs.CaptureError):
        step(torch.zeros(4, device="jax"))
    assert generator.get_offset() == 0
