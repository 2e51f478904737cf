"""Manual regions: each device computes on its own piece, forward and backward."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, ShardingError
from isoshard.errors import SpecError, UnevenError
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_xla_bridge.torch_xla.distributed import spmd as xs


@pytest.fixture(autouse=True)
def mesh():
    bridge.sync()  # what earlier tests have recorded is no part of the programs here
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    xs.set_global_mesh(mesh)
    yield mesh
    xs.set_global_mesh(None)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def cut(x: torch.Tensor, spec: tuple) -> list[torch.Tensor]:
    """The pieces of a matrix on devices 0..7 of the mesh (2, 4), by plain slicing."""
    counts = {"x": 2, "y": 4, None: 1}
    pieces = []
    for device in range(8):
        at = {"x": device // 4, "y": device % 4, None: 0}
        index = tuple(
            slice(at[e] * n // counts[e], (at[e] + 1) * n // counts[e])
            for e, n in zip(spec, x.shape, strict=True)
        )
        pieces.append(x[index])
    return pieces


SPECS = [("x", "y"), ("y", "x"), ("x", None), (None, "y"), (None, None)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_region_that_does_nothing_gives_back_the_whole(spec):
    x = data(8, 4)
    t = x.to("jax")
    piece = xs.enable_manual_sharding(t, spec)
    want = cut(x, spec)
    assert piece.shape == want[0].shape and piece.dtype == t.dtype
    assert (piece.sharding_spec, piece.sharding_type) == ("{manual}", xs.ShardingType.MANUAL)
    assert isinstance(piece, xs.XLAShardedTensor) and piece.global_tensor is piece
    assert piece.device == t.device and piece.partition_spec is piece.placements is None
    for got, expected in zip(piece.local_shards, want, strict=True):
        assert torch.equal(got.data, expected)
    whole = xs.disable_manual_sharding(piece, spec, t.shape)
    assert torch.equal(whole.cpu(), x) and t.sharding_spec == ""
    marked = xs.mark_sharding(x.to("jax"), xs.get_global_mesh(), spec)
    assert whole.sharding_spec == marked.sharding_spec


def test_torch_xlas_own_example():
    x = torch.zeros(8, 8).to("jax")
    mesh = xs.Mesh(range(8), (1, 8))
    xx = xs.enable_manual_sharding(x, (0, 1), mesh=mesh)
    assert xx.shape == (8, 1)
    xxx = xs.disable_manual_sharding(xx + 1, (0, 1), x.shape, mesh=mesh)
    assert xxx.shape == (8, 8) and torch.equal(xxx.cpu(), torch.ones(8, 8))


OPERATIONS = {
    "add": lambda m: 2 + m - m / 3,
    "mean": lambda m: m - m.mean(),
    "softmax": lambda m: torch.softmax(m, -1),
    "matmul": lambda m: m @ m.t() @ m,
    "einsum": lambda m: torch.einsum("ij,kj->ik", m, m) @ m,
    "in place": lambda m: m.clone().add_(1).mul_(m),
    "through a view": lambda m: _write(m.clone()),
    "setitem": lambda m: _set(m.clone()),
    "cat and split": lambda m: torch.cat([m, -m]).split(m.shape[0])[1],
    "where": lambda m: torch.where(m > 0, m, 0.0),
    "cumsum": lambda m: m.cumsum(0),
    "sort": lambda m: m.sort(-1).values,
    "index": lambda m: (
        m[torch.zeros(m.shape[0], dtype=torch.long).to("jax").to(m.device)]
        if isinstance(m, ManualTensor)
        else m[torch.zeros(m.shape[0], dtype=torch.long)]
    ),
    "layer norm": lambda m: torch.nn.functional.layer_norm(m, m.shape[-1:]),
    "gelu": lambda m: torch.nn.functional.gelu(m),
    "attention": lambda m: torch.nn.functional.scaled_dot_product_attention(
        m[None, None], m[None, None], m[None, None]
    )[0, 0],
    "like": lambda m: torch.zeros_like(m) + m.new_ones(1) + m,
    "dtype": lambda m: (m.bfloat16() * 2).float(),
    "std": lambda m: m / m.std(),
}


def _write(m: torch.Tensor) -> torch.Tensor:
    m.t()[0].mul_(3)
    return m


def _set(m: torch.Tensor) -> torch.Tensor:
    m[0] = 7.0
    return m


def test_operations_see_one_piece():
    """All in one program."""
    x, spec = data(8, 8), ("x", "y")
    t = x.to("jax")
    with torch.no_grad():
        found = {
            name: make(xs.enable_manual_sharding(t, spec)) for name, make in OPERATIONS.items()
        }
    for name, piece in found.items():
        assert isinstance(piece, ManualTensor), name
        for got, want in zip(piece.local_shards, cut(x, spec), strict=True):
            want = OPERATIONS[name](want.clone())
            torch.testing.assert_close(got.data, want, rtol=1e-5, atol=1e-5, msg=name)
    whole = xs.disable_manual_sharding(piece, spec, (8, 8))
    torch.testing.assert_close(whole.cpu()[:4, :2], piece.local_shards[0].data)


@pytest.mark.parametrize("spec", [("x", "y"), ("x", None)])
def test_gradients_go_through_a_region(spec):
    """With a layer from outside: its gradient is the sum over the devices that hold results."""
    x = data(8, 4)
    torch.manual_seed(0)
    plain = torch.nn.Linear(cut(x, spec)[0].shape[1], 3)
    layer = torch.nn.Linear(plain.in_features, 3)
    layer.load_state_dict(plain.state_dict())
    layer.to("jax")
    t = x.to("jax").requires_grad_()
    piece = layer(torch.tanh(xs.enable_manual_sharding(t, spec)))
    # Rows stay where they are; each device's three columns are a block of the result.
    whole = xs.disable_manual_sharding(piece, spec, (8, 12 if spec[1] == "y" else 3))
    (whole * torch.arange(1.0, whole.numel() + 1).reshape(whole.shape).to("jax")).sum().backward()

    y = x.clone().requires_grad_()
    rows = y.split(4) if spec[0] else [y]
    blocks = [
        torch.cat([plain(torch.tanh(part)) for part in (row.split(1, 1) if spec[1] else [row])], 1)
        for row in rows
    ]
    want = torch.cat(blocks)
    (want * torch.arange(1.0, want.numel() + 1).reshape(want.shape)).sum().backward()
    torch.testing.assert_close(whole.detach().cpu(), want.detach())
    torch.testing.assert_close(t.grad.cpu(), y.grad, rtol=1e-5, atol=1e-4)
    for got, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert not isinstance(got.grad, ManualTensor)
        torch.testing.assert_close(got.grad.cpu(), expected.grad, rtol=1e-5, atol=1e-4)


def test_gradients_of_gradients_go_through_a_region():
    def cubes(t, inside):
        if inside:
            t = xs.enable_manual_sharding(t, ("x",))
            t = xs.disable_manual_sharding(t**3, ("x",), (4,))
        else:
            t = t**3
        return t.sum()

    found = []
    for inside in (True, False):
        t = torch.arange(1.0, 5).to("jax").requires_grad_()
        (g,) = torch.autograd.grad(cubes(t, inside), t, create_graph=True)
        (g,) = torch.autograd.grad(g.square().sum(), t)
        found.append(g.cpu())
    torch.testing.assert_close(*found)


def test_a_region_moves_nothing_between_devices():
    from isoshard.torch_bridge.engine.compiling import program

    before = set(map(id, program._PROGRAMS.values()))
    t = xs.mark_sharding(data(8, 4).to("jax"), xs.get_global_mesh(), ("x", "y"))
    piece = torch.softmax(xs.enable_manual_sharding(t, ("x", "y")), 0)
    out = xs.disable_manual_sharding(piece * 3.25, ("x", "y"), t.shape)
    bridge.sync()
    (text,) = [p.text() for p in program._PROGRAMS.values() if id(p) not in before]
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert f" {collective}(" not in text
    assert iso.to_jax(out).sharding.spec == P("x", "y")


def test_a_compiled_step_may_have_a_region():
    t = data(8, 4).to("jax")

    @bridge.compile
    def step(t):
        piece = xs.enable_manual_sharding(t, ("x", "y"))
        return xs.disable_manual_sharding(piece - piece.mean(), ("x", "y"), t.shape)

    rows = [torch.cat([q - q.mean() for q in row.split(1, 1)], 1) for row in data(8, 4).split(4)]
    for _ in range(2):
        torch.testing.assert_close(step(t).cpu(), torch.cat(rows))


def test_random_numbers_differ_between_devices():
    piece = xs.enable_manual_sharding(torch.ones(8, 4).to("jax"), (None, None))
    drawn = torch.nn.functional.dropout(piece, 0.5)
    first, second = drawn.local_shards[:2]
    positive = xs.disable_manual_sharding(drawn > 0, (None, None), (8, 4))
    assert not torch.equal(first.data, second.data)
    # Where every device holds the whole, the first one gives it.
    whole = xs.disable_manual_sharding(drawn, (None, None), (8, 4))
    assert torch.equal(whole.cpu(), first.data)
    assert positive.dtype == torch.bool and torch.equal(positive.cpu(), first.data > 0)


def test_a_tensor_may_be_taken_for_each_devices_own():
    t = data(3, 2).to("jax")
    piece = xs._mark_manual_sharding(t + 1)
    assert piece.shape == (3, 2) and piece.sharding_spec == "{manual}"
    assert xs._mark_manual_sharding(piece) is piece
    assert torch.equal(
        xs.disable_manual_sharding(piece, (None, None), (3, 2)).cpu(), data(3, 2) + 1
    )
    xs.set_global_mesh(None)
    assert len(xs._mark_manual_sharding(t).local_shards) == 8


READS = {
    "cpu": lambda m: m.cpu(),
    "item": lambda m: m.sum().item(),
    "float": lambda m: float(m.sum()),
    "bool": lambda m: bool(m.sum() > 0),
    "tolist": lambda m: m.tolist(),
    "numpy": lambda m: m.numpy(),
    "to_jax": lambda m: iso.to_jax(m.detach()),
    "write into another": lambda m: torch.zeros_like(m.stacked[0]).add_(m),
    "mark": lambda m: xs.mark_sharding(m, xs.get_global_mesh(), (None, None)),
    "XLAPatchedLinear": lambda m: xs.XLAPatchedLinear.apply(m, torch.ones(2, 2).to("jax")),
}


def test_one_value_of_many_is_refused():
    for read in READS.values():
        piece = xs.enable_manual_sharding(data(4, 8).to("jax"), ("x", "y"))
        with pytest.raises(RuntimeError, match=r"per device.*|.*disable_manual_sharding"):
            read(piece)
    assert "one on each of 8 devices" in repr(piece) and str(piece) == repr(piece)


def test_what_makes_no_region():
    t = data(8, 4).to("jax")
    piece = xs.enable_manual_sharding(t, ("x", "y"))
    with pytest.raises(ShardingError, match="in a manual region already"):
        xs.enable_manual_sharding(piece, (None, None))
    with pytest.raises(UnevenError, match="axis 0 has size 7"):
        xs.enable_manual_sharding(data(7, 4).to("jax"), ("x", None))
    with pytest.raises(SpecError, match="1 entries for a tensor of rank 2"):
        xs.enable_manual_sharding(t, ("x",))
    with pytest.raises(ShardingError, match="enable_manual_sharding takes a tensor on the"):
        xs.enable_manual_sharding(data(8, 4), ("x", None))
    with pytest.raises(ShardingError, match=r"\(8, 4\) is not in one; begin it with"):
        xs.disable_manual_sharding(t, ("x", "y"), (8, 4))
    with pytest.raises(ShardingError, match=r"shards of shape \(8, 1\), and these have \(4, 1\)"):
        xs.disable_manual_sharding(piece, (None, "y"), (8, 4))
    turned = xs.Mesh(list(range(8))[::-1], (2, 4), ("x", "y"))
    with pytest.raises(ShardingError, match="ends over the mesh it began with"):
        xs.disable_manual_sharding(piece, ("x", "y"), (8, 4), mesh=turned)
    with pytest.raises(ShardingError, match="two meshes"):
        piece + xs.enable_manual_sharding(t, ("x", "y"), mesh=turned)
    xs.set_global_mesh(None)
    with pytest.raises(
        ShardingError, match=r"no mesh is passed and no global mesh.*set_global_mesh"
    ):
        xs.enable_manual_sharding(t, ("x", "y"))
