"""local_map, and the rest of torch.distributed.tensor.experimental."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard as iso
from isoshard.torch_bridge.distributed._functional_collectives import all_gather_tensor
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from isoshard.torch_bridge.distributed.tensor.experimental import (
    context_parallel,
    implicit_replication,
    local_map,
)

ROW, COL = [Shard(0)], [Shard(1)]


def given(mesh, placements, *shape, seed=0):
    torch.manual_seed(seed)
    whole = torch.randn(*shape)
    return whole, distribute_tensor(whole, mesh, placements).requires_grad_()


def close(ours, expected):
    torch.testing.assert_close(ours.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_partial_outputs_are_summed_and_gradients_are_those_of_the_whole(line):
    w, ours_w = given(line, COL, 12, 8)
    x, ours_x = given(line, ROW, 8, 16, seed=1)
    shapes = []

    @local_map(out_placements=[Partial()], in_placements=(COL, ROW))
    def product(a, b):
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return torch.mm(a, b)

    comm_mode = CommDebugMode()
    with comm_mode:
        out = product(ours_w, ours_x)
    assert shapes == [((12, 2), (2, 16))]
    assert comm_mode.get_comm_counts() == {"all_reduce": 1}
    assert out.placements == (Replicate(),)
    close(out, w @ x)
    weight = torch.randn(12, 16)
    (out * weight.to("jax")).sum().backward()
    close(ours_w.grad, weight @ x.T)
    close(ours_x.grad, w.T @ weight)


def test_it_sees_pieces(line):
    """What a global program would not give: a maximum of each device's rows."""
    x, ours = given(line, ROW, 8, 4)
    out = local_map(lambda piece: piece.amax(0, keepdim=True), ROW, (ROW,))(ours)
    close(out, torch.stack([part.amax(0) for part in x.chunk(4)]))


def test_without_in_placements_arguments_are_as_they_lie(line):
    x, ours = given(line, COL, 4, 8)
    out = local_map(lambda piece: piece.sum(1), [Partial()])(ours)
    close(out, x.sum(1))


def test_wrong_placements_are_refused_or_moved(line):
    x, ours = given(line, ROW, 8, 8)
    total = {"out_placements": [Partial()], "in_placements": (COL,)}
    with pytest.raises(
        ValueError,
        match=r"argument 0 .*sharded as \(Shard\(dim=0\),\).*requires \(Shard\(dim=1\),\)",
    ):
        local_map(lambda piece: piece.sum(1), **total)(ours)
    comm_mode = CommDebugMode()
    with comm_mode:
        out = local_map(lambda piece: piece.sum(1), **total, redistribute_inputs=True)(ours)
    close(out, x.sum(1))
    assert comm_mode.get_comm_counts() == {"all_reduce": 1, "all_to_all": 1}
    out.square().sum().backward()
    close(ours.grad, (2 * x.sum(1, keepdim=True)).expand(8, 8))


def test_gradients_of_a_replicated_argument_are_a_sum_if_said(line):
    w, ours_w = given(line, [Replicate()], 4, 4)
    x, ours_x = given(line, ROW, 8, 4, seed=1)
    mapped = local_map(
        torch.mm, ROW, in_placements=(ROW, [Replicate()]), in_grad_placements=(ROW, [Partial()])
    )
    out = mapped(ours_x, ours_w)
    out.square().sum().backward()
    w.requires_grad_()
    (x @ w).square().sum().backward()
    close(out, x @ w)
    close(ours_w.grad, w.grad)


@pytest.mark.parametrize(("op", "expected"), [("avg", "mean"), ("min", "amin")])
def test_other_reductions(line, op, expected):
    x, ours = given(line, ROW, 8, 4)
    out = local_map(lambda piece: piece.sum(0), [Partial(op)], (ROW,))(ours)
    sums = torch.stack([part.sum(0) for part in x.chunk(4)])
    close(out, getattr(sums, expected)(0))


def test_several_arguments_and_results_on_two_dimensions(mesh):
    rows, both = [Shard(0), Replicate()], [Shard(0), Shard(1)]
    x, ours_x = given(mesh, rows, 8, 8)
    y, ours_y = given(mesh, both, 8, 8, seed=1)

    def function(pair, factor):
        a, b = pair
        return {"sum": (b * factor).sum(1), "count": b.numel(), "twice": 2 * a}

    mapped = local_map(
        function,
        out_placements=([Shard(0), Partial()], None, rows),
        in_placements=(rows, both, None),
    )
    out = mapped((ours_x, ours_y), 3)
    assert out["count"] == 8
    close(out["sum"], 3 * y.sum(1))
    close(out["twice"], 2 * x)
    assert out["twice"].placements == tuple(rows)


def test_values_of_a_step_whose_layout_xla_chose_are_laid_out(line):
    x, ours = given(line, ROW, 8, 8)
    step = (ours * 2).sin()
    close(local_map(torch.cumsum, ROW, (ROW, None))(step, 1), (x * 2).sin().cumsum(1))


def test_plain_tensors_go_through(line):
    x = torch.randn(4)
    assert local_map(torch.neg, ROW, (ROW,))(x).equal(-x)
    y, ours = given(line, ROW, 8)
    factor = torch.full((), 3.0, device="jax")
    close(local_map(torch.mul, ROW)(ours, factor), 3 * y)


def test_what_is_refused(line):
    x, ours = given(line, ROW, 8, 8)
    twice, number = lambda x: (x, x), lambda x: 3
    counts = "in_placements of local_map has 2 entries.*not match the number of input args, 1"
    for function, out, inside, match in (
        (torch.neg, ROW, (ROW, ROW), counts),
        (twice, ROW, (ROW,), "has 1 entries.*one PlacementType be provided.* 2"),
        (number, ROW, (ROW,), "result 0 of local_map is a int.*expects None placements"),
    ):
        for kind in (ValueError, AssertionError):  # isoshard's, and DTensor's
            with pytest.raises(kind, match=match):
                local_map(function, out, inside)(ours)
    with pytest.raises(ValueError, match="result 0 of local_map is a global tensor on a mesh"):
        local_map(lambda x: ours, ROW, (ROW,))(ours)
    with pytest.raises(ValueError, match="argument 1 of local_map is a int and has no placements"):
        local_map(torch.cumsum, ROW, (ROW, ROW))(ours, 1)
    uneven = local_map(torch.neg, COL, (COL,), device_mesh=line, redistribute_inputs=True)
    with pytest.raises(iso.errors.UnevenError, match="axis 1 has size 6"):
        uneven(torch.ones(8, 6).to("jax"))
    # As in DTensor, None is for a tensor on no mesh, which is whole on every device.
    wrong = local_map(torch.mm, ROW, (ROW, None))
    with pytest.raises(AssertionError, match=r"argument 1.*is on a mesh as .*Shard.*expects pl"):
        wrong(ours, ours)
    with pytest.raises(ValueError, match=r"argument 1 .*expects placements, where in_placements"):
        wrong(ours, ours * 2)
    close(wrong(ours, torch.eye(8, device="jax")), x)
    assert local_map(torch.mm, None, (None, None))(x, x).equal(x @ x)


def test_implicit_replication_is_always_so(line):
    x, ours = given(line, ROW, 8)
    plain = torch.arange(8.0).to("jax")
    assert isinstance(ours, DTensor) and not isinstance(plain, DTensor)
    with implicit_replication():
        close(ours + plain, x + torch.arange(8.0))
    assert isinstance(plain, DTensor)  # now it lies there, too


def test_context_parallel_lays_the_sequence_out_and_back(mesh):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 16, 4) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    batch = [Shard(0), Replicate()]
    q, k, v = (distribute_tensor(t, mesh, batch) for t in (q, k, v))
    with context_parallel(
        mesh["tp"], buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={v}
    ):
        assert q.placements == (Shard(0), Shard(2))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(out, expected)
    assert q.placements == tuple(batch) and v.placements == (Shard(0), Shard(2))


def test_context_parallel_refuses(mesh):
    x = torch.ones(4, 8, device="jax")
    with (
        pytest.raises(ValueError, match="1 buffers and 0 buffer_seq_dims"),
        context_parallel(mesh["tp"], buffers=[x]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="must be among the buffers"),
        context_parallel(mesh["tp"], no_restore_buffers={x}),
    ):
        pass


def test_without_any_mesh_it_is_the_function(line):
    """As in DTensor, where no argument is one: here each device's own, the same on all."""
    x = torch.ones(2, 3, device="jax")
    gathered = local_map(lambda m, t: all_gather_tensor(t * 2, 0, m), ROW, (None, ROW))
    out = gathered(line, x)
    assert out.shape == (8, 3) and not isinstance(out, DTensor)
    with line:
        assert local_map(lambda t: t * 2, ROW, (ROW,))(torch.ones(8, 3, device="jax")).placements
