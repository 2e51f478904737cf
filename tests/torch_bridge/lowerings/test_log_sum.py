import math

import torch

import isoshard as iso
from isoshard import P
from tests.torch_bridge.lowerings.harness import together
from tests.torch_bridge.on_both import on_both

aten = torch.ops.aten
INF, NAN = math.inf, math.nan


def _halves(*size):
    source = torch.Generator().manual_seed(0)
    parts = [torch.randint(-18, 19, size, generator=source) / 2 for _ in "ri"]
    return torch.complex(*parts)


def _doubled(x):
    return torch.logaddexp(x, x)


def test_against_the_cpu():
    """Of complex numbers the imaginary part stays near that of the larger operand."""
    x = _halves(8, 8)
    low = complex(-INF, 1)
    one = torch.tensor([low, low, 1j, complex(NAN, 0), 2 - 4j, complex(0, 9)])
    other = torch.tensor([low, 2 + 9j, low, 1, complex(0, NAN), complex(0, -8)])
    real = torch.tensor([-INF, INF, 0.0, 1.5, NAN, 200.0])
    with together() as check:
        op = aten.logaddexp.default
        for y in (x, x.flip(0)[0]):
            check(op, x, y)
        check(op, one, other)
        check(op, other, one)
        for y in (real, real.flip(0)):
            check(op, real, y)
        check(op, real.bfloat16(), real.flip(0).bfloat16(), rtol=1e-2)
        for dims in ([1], [0, 1]):  # the principal value
            check(aten.logsumexp.default, _halves(4, 8), dims, rtol=1e-4, atol=1e-4)
    on_both(lambda a, at: _doubled(a.scatter_add(0, at, a)), x, (x.real * 2).long() % 8)
    on_both(torch.logaddexp, x, x.conj().resolve_conj())


def test_split_operands(mesh):
    x = _halves(4, 8)
    split = [iso.shard(x.to("jax"), mesh, spec) for spec in (P("x", "y"), P("y"), P(None, "x"))]
    for sum_of_two, running in [(_doubled(one), one.logcumsumexp(1)) for one in split]:
        torch.testing.assert_close(sum_of_two.cpu(), _doubled(x))
        torch.testing.assert_close(running.cpu(), x.logcumsumexp(1), rtol=1e-4, atol=1e-4)
