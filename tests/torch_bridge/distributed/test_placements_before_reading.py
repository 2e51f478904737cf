"""What a tensor says of its placements before anybody has read its value."""

import jax
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import isoshard.torch_bridge as xs
from isoshard import P, shard, sharding_of, to_jax
from isoshard.core.errors import ShardingError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor, init_device_mesh


@pytest.fixture
def x(mesh):
    return distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0), Replicate()])


def runs():
    return metrics.counters().get("executions", 0)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda x: x + 1, (Shard(0), Replicate())),
        (lambda x: x.sum(), (Replicate(), Replicate())),
        (lambda x: (x * 2).t(), (Shard(1), Replicate())),
    ],
)
def test_a_result_that_is_asked_is_computed(x, made, wanted):
    y = made(x)
    before = runs()
    assert isinstance(y, DTensor) and y.device_mesh == x.device_mesh and runs() == before
    assert y.placements == wanted and runs() == before + 1
    assert y.placements == wanted and y._spec.placements == wanted and runs() == before + 1


def test_to_move_a_result_computes_nothing(x, mesh):
    before = runs()
    y = (x * 2).redistribute(placements=[Replicate(), Shard(0)])
    z = (y + 1).redistribute(y.device_mesh, [Shard(1), Shard(0)]).full_tensor()
    assert runs() == before
    assert torch.equal(z.cpu(), x.cpu() * 2 + 1)


def test_what_is_on_no_mesh_is_not_computed(x):
    along = x * 2  # in the same program
    plain = torch.ones(8, device="jax") * 2
    before = runs()
    assert plain.placements is None and plain.device_mesh is None
    assert not isinstance(plain, DTensor) and isinstance(along, DTensor) and runs() == before


def test_a_captured_step_is_not_computed_for_it(x):
    asked = []

    @xs.compile
    def step(t):
        y = t * 2
        asked.append(y.placements)
        return y.sum()

    assert step(x).item() == 2 * x.cpu().sum().item()
    assert asked[0] is None


class TestMeshesThatMeet:
    """Several meshes in one process: what is whole goes where the others are."""

    @pytest.fixture
    def four(self):
        return distribute_tensor(torch.ones(4, 4), init_device_mesh("jax", (4,)), [Shard(0)])

    @pytest.mark.parametrize(("kept", "read"), [(False, True), (True, False)])
    def test_a_plain_tensor_that_another_program_computes(self, x, four, kept, read):
        along = (x * 2).sum()
        plain = torch.arange(4.0, device="jax") + 1
        if not kept:
            del along
        if read:
            xs.sync()
        assert (plain @ four).tolist() == [10.0] * 4
        assert (x @ plain).tolist() == (x.cpu() @ (torch.arange(4.0) + 1)).tolist()

    def test_whole_on_both(self, x, four, mesh):
        a = distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()])
        b = distribute_tensor(torch.ones(4), four.device_mesh, [Replicate()])
        assert (a + b).tolist() == (b + a).tolist() == [2.0] * 4
        assert a.device_mesh == mesh and b.device_mesh == four.device_mesh

    @pytest.mark.parametrize(("first", "second"), [(8, 4), (4, 8)])
    def test_what_is_whole_on_both_comes_whole_on_the_first(self, first, second):
        meshes = (jax.sharding.Mesh(jax.devices()[:count], "x") for count in (first, second))
        a, b = (shard(torch.ones(4), mesh, P()) for mesh in meshes)
        assert (a + b).tolist() == [2.0] * 4
        assert len(sharding_of(a + b).device_set) == first

    def test_split_over_both_is_refused(self, x, four):
        with pytest.raises(ShardingError, match=r"differently: .*reshard"):
            x @ four

    def test_what_nobody_sees_decides_no_mesh(self):
        grid = init_device_mesh("jax", (2, 2))
        dropped = distribute_tensor(torch.ones(8, 4), grid, [Shard(0), Shard(1)]) * 2
        del dropped
        line = init_device_mesh("jax", (4,))
        t = distribute_tensor(torch.ones(8, 4), line, [Replicate()]).requires_grad_()
        (t * 2).sum().backward()
        assert t.grad.placements == (Replicate(),) and t.grad.device_mesh == line
        assert (t.detach() + 1).placements == (Replicate(),)

    def test_in_a_captured_step_it_is_refused(self, x, four):
        @xs.compile
        def step(a, b):
            return ((a * 2) @ b).sum()

        with pytest.raises(ShardingError, match=r"aten::mm .*differently: \[0, 1.*reshard"):
            step(x, four)


def test_a_dtensor_of_a_local_tensor_and_a_spec():
    mesh = init_device_mesh("jax", (4,))
    local = torch.arange(6.0).reshape(2, 3)
    meta = TensorMeta(torch.Size([8, 3]), (3, 1), local.dtype)
    for requires_grad in (False, True):
        t = DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=requires_grad)
        assert t.shape == (8, 3) and t.placements == (Shard(0),) and t.is_leaf
        assert t.requires_grad is requires_grad
        assert torch.equal(t.detach().cpu(), local.repeat(4, 1))
    wrong = TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32)
    with pytest.raises(ShardingError, match=r"tensor of shape \(8, 3\)"):
        DTensor(local, DTensorSpec(mesh, (Shard(0),), wrong), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match=r"call DTensor\.from_local"):
        DTensor(leaf, DTensorSpec(mesh, (Shard(0),)), requires_grad=False)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.nonzero(),
        lambda x: (x * 2)[x > 3],
        lambda x: x.t()[x.t() > 3],
        lambda x: x.unique(return_inverse=True)[1],
    ],
)
def test_what_the_cpu_computes_is_whole_on_the_mesh(x, made):
    y = made(x)
    assert isinstance(y, DTensor) and y.device_mesh == x.device_mesh
    assert y.placements == (Replicate(), Replicate())
    assert torch.equal(y.full_tensor().cpu(), made(x.cpu()))
    rows = y[: y.shape[0] // 2 * 2].redistribute(y.device_mesh, [Shard(0), Replicate()])
    assert rows.placements[0] == Shard(0) and (rows + 1).placements[0] == Shard(0)


def test_what_the_cpu_computes_keeps_a_mesh_with_explicit_axes():
    found = torch.ones(3, device="jax").nonzero()  # on no mesh
    assert found.placements is None and not isinstance(found, DTensor)
    mesh = jax.make_mesh((4,), ("x",))
    t = shard(torch.arange(8.0), mesh, P("x"))
    assert to_jax(t[t > 2]).sharding == jax.sharding.NamedSharding(mesh, P())
