"""What JAX gives for a module's tensors, and what the module may do with them."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import export

import isoshard as iso


class Tied(torch.nn.Module):
    """A buffer that is a part of another, and a parameter in another memory order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2).t())
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[1:3])

    def forward(self, x):
        self.whole.add_(x)
        return self.part.sum(), self.weight.as_strided((3,), (1,)), self.weight.stride()


def test_memory_is_as_in_the_module():
    f = iso.jax_function(Tied())
    for call in (f.with_buffers, jax.jit(lambda p, b, x: f.with_buffers(p, b, x)[:2])):
        (total, line, *_), buffers = call(f.parameters, f.buffers, jnp.arange(4.0))
        assert total == 3 and line.tolist() == [0, 1, 2]
        assert buffers["part"].tolist() == [1, 2] and buffers["whole"].tolist() == [0, 1, 2, 3]
    assert f(f.params, jnp.ones(4))[2] == Tied().weight.stride() == (1, 2)
    gradient = jax.grad(lambda p: f({**f.params, **p}, jnp.ones(4))[1].sum())(f.parameters)
    assert gradient["weight"].tolist() == [[1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (jnp.ones((3, 1)), r"bias is float32\[3, 1\] and the module's float32\[2\]"),
        (jnp.ones(2, jnp.bfloat16), r"bias is bfloat16\[2\].*module.bfloat16"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(bias, words):
    f = iso.jax_function(torch.nn.Linear(3, 2))
    for run in (f, jax.jit(f)):
        with pytest.raises(ValueError, match=words):
            run({**f.params, "bias": bias}, jnp.ones((3, 3)))


def test_dtypes_of_32_bits_are_those_of_64_in_jax():
    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

        def forward(self):
            return str(self.weight.dtype), self.count + 1

    given = {"weight": jnp.ones(2), "count": jnp.zeros(2, jnp.int32)}
    dtype, count = iso.jax_function(Counted())(given)
    assert dtype == "torch.float64" and count.dtype == jnp.int32 and count.tolist() == [1, 1]


class Registering(torch.nn.Module):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones_like(x) * 2)
        return x * self.scale


def test_a_module_that_registers_tensors_is_refused_and_stays_as_it_was():
    module = Registering()
    f = iso.jax_function(module)
    for run in (f, jax.jit(f)):
        with pytest.raises(
            RuntimeError, match=r"registers scale while it is called.*once in torch"
        ):
            run({}, jnp.ones(2))
    assert module(torch.ones(2)).tolist() == [2, 2]
    assert jax.jit(f)(f.params, jnp.ones(2)).tolist() == [2, 2]


def test_a_tensor_that_outlives_the_trace_says_so():
    kept = []
    f = iso.jax_function(lambda x: kept.append(x * 2) or x)
    jax.jit(f)(jnp.ones(2))
    with pytest.raises(RuntimeError, match=r"made while JAX traced torch code outlives the trace"):
        kept[0].tolist()


def test_a_graph_that_jax_would_not_see_is_refused():
    f = iso.jax_function(torch.nn.Linear(2, 1))
    x = torch.ones(1, 2, requires_grad=True)
    assert f(f.params, x).shape == (1, 1)
    with pytest.raises(iso.errors.CopyError, match="computed from tensors that require grad"):
        f(f.params, x * 2)


def test_sizes_that_are_symbols_are_refused():
    f = iso.jax_function(torch.nn.Linear(3, 2))
    (size,) = export.symbolic_shape("size")
    shape = jax.ShapeDtypeStruct((size, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"shape \(size, 3\); export it for each size"):
        export.export(jax.jit(f))(f.shapes, shape)


def test_layouts_are_asked_for_inside():
    mesh = iso.make_mesh((8,), ("x",))
    f = iso.jax_function(lambda x: iso.shard(x * 2, mesh, iso.P("x")) * 3)
    found = jax.jit(f)(jnp.ones(8))
    assert found.sharding.spec == iso.P("x") and found.tolist() == [6] * 8
    assert jax.grad(lambda x: f(x).sum())(jnp.ones(8)).tolist() == [6] * 8
