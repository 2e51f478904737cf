"""Parallel styles given pieces: what PyTorch's tests of its styles say of a rank's local tensors.

Each case runs on a mesh of four devices, and on the `tp` part of a mesh whose `dp` splits the
batch (but where the style splits the batch itself), against the whole module. On CPUs XLA writes a
reduce-scatter as an all-reduce and a slice.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, Partial, distribute_tensor
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from isoshard.torch_bridge.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor

TP = 4


class Place:
    """A mesh for styles, and how data come to lie on it."""

    def __init__(self, is_part):
        self.is_part = is_part
        if is_part:
            self.root = init_device_mesh("jax", (2, TP), mesh_dim_names=("dp", "tp"))
            self.mesh = self.root["tp"]
        else:
            self.root = self.mesh = init_device_mesh("jax", (TP,), mesh_dim_names=("tp",))

    def whole(self, t, dim=None):
        """A leaf on the device; `dp` splits the axis, if there is one."""
        if not self.is_part:
            return distribute_tensor(t, self.root)
        split = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(t, self.root, [split, Replicate()])

    def pieces(self, t, placement):
        """What each device along `tp` has of a whole."""
        whole = DTensor.from_local(t, self.mesh, [Replicate()])
        return whole.redistribute(placements=[placement]).to_local()

    def joined(self, t, placement):
        return DTensor.from_local(t, self.mesh, [placement])


@pytest.fixture(params=["mesh", "part"])
def place(request):
    return Place(request.param == "part")


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def linear(rows=16, columns=16):
    torch.manual_seed(0)
    return nn.Linear(rows, columns).double()


def along(comm_mode):
    """The collectives of programs along `tp`, by name."""
    found = {}
    for (name, axes), count in comm_mode.get_axis_counts().items():
        assert axes in (("tp",), ("dp",)), "nothing goes over both dimensions"
        assert axes == ("tp",) or name == "all_reduce", "of dp only gradients of parameters"
        if axes == ("tp",):
            found[name] = count
    return found


def check(
    place,
    module,
    ours,
    x,
    have,
    want,
    shape,
    forward=(),
    backward=(),
    split=0,
    is_counted=True,
):
    """Values, gradients, the shape of what comes out, and the collectives there and back."""
    module.zero_grad()
    x_there = x.clone().requires_grad_(x.is_floating_point())
    out_there = module(x_there)
    weight = data(*out_there.shape, seed=7)
    (out_there * weight).sum().backward()
    given = place.pieces(place.whole(x, split), have).detach()
    if x.is_floating_point():
        given.requires_grad_()
    xs.sync()
    comm_mode = CommDebugMode()
    with comm_mode:
        out = ours(given)
        xs.sync()
    assert isinstance(out, ManualTensor) and out.axes == ("tp",) and out.shape == shape
    if is_counted:
        assert set(along(comm_mode)) <= set(forward) and (not forward or along(comm_mode))
    back = CommDebugMode()
    with back:
        whole = place.joined(out, want)
        (whole * place.whole(weight, split)).sum().backward()
        xs.sync()
    torch.testing.assert_close(whole.detach().cpu(), out_there.detach())
    if is_counted:
        assert set(along(back)) <= {*forward, *backward}, along(back)
    if x.is_floating_point():
        torch.testing.assert_close(place.joined(given.grad, have).cpu(), x_there.grad)
    for (name, mine), theirs in zip(ours.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, msg=name)


def test_colwise(place):
    """Columns come out of copies without a move; the gradient of the copies is one sum."""
    model = linear()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, ColwiseParallel())
    args = (place, model, ours, data(8, 16), Replicate(), Shard(1), (8, 4))
    check(*args, backward=["all_reduce"])


def test_colwise_of_a_split_input(place):
    """Rows are gathered; their gradient is summed and scattered."""
    model = linear()
    style = ColwiseParallel(input_layouts=Shard(0))
    ours = parallelize_module(copy.deepcopy(model), place.mesh, style)
    args = (place, model, ours, data(32, 16), Shard(0), Shard(1), (32, 4))
    backward = ["all_reduce", "reduce_scatter"]
    check(*args, forward=["all_gather"], backward=backward, split=None)


def test_colwise_embedding(place):
    torch.manual_seed(0)
    model = nn.Embedding(16, 16).double()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, ColwiseParallel())
    check(place, model, ours, torch.arange(8).reshape(4, 2), Replicate(), Shard(2), (4, 2, 4))


def test_rowwise(place):
    """What the devices compute of their columns is summed; nothing moves on the way back."""
    model = linear()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, RowwiseParallel())
    args = (place, model, ours, data(8, 16), Shard(1), Replicate(), (8, 16))
    check(*args, forward=["all_reduce"])


def test_rowwise_with_split_output(place):
    model = linear()
    style = RowwiseParallel(output_layouts=Shard(0))
    ours = parallelize_module(copy.deepcopy(model), place.mesh, style)
    args = (place, model, ours, data(8, 16), Shard(1), Shard(0), (2, 16))
    check(*args, forward=["all_reduce", "reduce_scatter"], backward=["all_gather"], split=None)


def test_rowwise_embedding(place):
    torch.manual_seed(0)
    model = nn.Embedding(16, 16).double()
    style = RowwiseParallel(input_layouts=Replicate())
    ours = parallelize_module(copy.deepcopy(model), place.mesh, style)
    args = (place, model, ours, torch.arange(8).reshape(4, 2), Replicate(), Replicate(), (4, 2, 16))
    check(*args, forward=["all_reduce"])
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    ours = parallelize_module(copy.deepcopy(model), place.mesh, style)
    args = (place, model, ours, torch.arange(8), Replicate(), Shard(1), (8, 4))
    # On the two dimensions XLA exchanges rows before it sums, of a whole input as well.
    kinds = {"forward": ["all_reduce", "reduce_scatter"], "backward": ["all_gather"]}
    check(*args, **kinds, split=None, is_counted=not place.is_part)


def test_prepared_input(place):
    rows = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    gathering = parallelize_module(nn.Identity(), place.mesh, rows)
    x = data(2, 16)
    whole = gathering(place.pieces(place.whole(x.repeat(TP, 1), 0), Shard(0)))
    assert not isinstance(whole, ManualTensor) and whole.shape == (8, 16)
    assert torch.equal(whole.cpu(), x.repeat(TP, 1))
    local = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    mine = parallelize_module(nn.Identity(), place.mesh, local)(
        place.pieces(place.whole(x.repeat(TP, 1), 0), Shard(0))
    )
    assert isinstance(mine, ManualTensor) and torch.equal(mine.agreed(), x.repeat(TP, 1))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x, y, z=2.0):
        return self.linear(x) + y + z


def test_prepared_inputs_of_which_one_is_left_alone(place):
    """The other is a rank's own, of the shape of a piece: each device adds its copy."""
    inputs = PrepareModuleInput(
        input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
    )
    module = Sum()
    parallelize_module(module.linear, place.mesh, ColwiseParallel())
    parallelize_module(module, place.mesh, inputs)
    x, y = data(8, 8), data(8, 2, seed=1)
    mine = place.pieces(place.whole(x, 0), Shard(0))
    want = copy.deepcopy(Sum().linear)(x) + y.repeat(1, TP) + 2
    for other in (place.whole(y, 0), place.pieces(place.whole(y, 0), Replicate())):
        out = module(mine, other)
        assert isinstance(out, ManualTensor) and out.shape == (8, 2)
        torch.testing.assert_close(place.joined(out, Shard(1)).detach().cpu(), want)
    with pytest.raises(ValueError, match="Sum has 3 inputs, and input_layouts has 2 entries"):
        module(mine, mine, 3.0)


def test_prepared_inputs_by_name(place):
    """Pieces by name; whole tensors and numbers beside them."""
    module, reference = Sum(), Sum()
    style = PrepareModuleInput(
        input_kwarg_layouts={"y": Shard(0), "x": Shard(0)},
        desired_input_kwarg_layouts={"y": Replicate(), "x": Replicate()},
    )
    parallelize_module(module.linear, place.mesh, ColwiseParallel(use_local_output=False))
    parallelize_module(module, place.mesh, style)
    x, y, weight = data(8, 8), data(8, 8, seed=1), data(8, 8, seed=2)
    there = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    out_there = reference(*there, z=3.0)
    (out_there * weight).sum().backward()
    for is_whole in (False, True):
        module.zero_grad()
        here = [place.whole(x).requires_grad_(), place.whole(y).requires_grad_()]
        first = here[0] if is_whole else place.pieces(here[0], Shard(0))
        comm_mode = CommDebugMode()
        with comm_mode:
            out = module(x=first, y=place.pieces(here[1], Shard(0)), z=3.0)
            (out * place.whole(weight)).sum().backward()
            xs.sync()
        along(comm_mode)
        assert not isinstance(out, ManualTensor) and out.shape == (8, 8)
        torch.testing.assert_close(out.detach().cpu(), out_there.detach())
        for mine, theirs in zip(here, there, strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
        torch.testing.assert_close(module.linear.weight.grad.cpu(), reference.linear.weight.grad)


def test_a_layer_called_by_name(place):
    model = linear()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, ColwiseParallel())
    out = ours(input=place.pieces(place.whole(data(8, 16), 0), Replicate()))
    assert out.shape == (8, 4)
    torch.testing.assert_close(place.joined(out, Shard(1)).cpu(), model(data(8, 16)))
    with pytest.raises(ValueError, match="ColwiseParallel lays out the first input of Linear"):
        ours()


def test_prepared_output(place):
    chunks = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    chunking = parallelize_module(nn.Identity(), place.mesh, chunks)
    x = data(8, 16)
    mine = chunking(place.pieces(place.whole(x, 0), Replicate()))
    assert isinstance(mine, ManualTensor) and mine.shape == (2, 16)
    assert torch.equal(place.joined(mine, Shard(0)).cpu(), x)
    whole = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False
    )
    out = parallelize_module(nn.Identity(), place.mesh, whole)(
        place.pieces(place.whole(x, 0), Replicate())
    )
    assert not isinstance(out, ManualTensor) and torch.equal(out.cpu(), x)


class Two(nn.Module):
    def forward(self, x, flag):
        return x * 2, x.sum(-1), flag


@pytest.mark.parametrize("local", [False, True])
def test_prepared_on_both_sides(local, place):
    """Several outputs, of which one is no tensor; pieces or wholes inside."""
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Replicate(), None),
        use_local_input=local,
        output_layouts=(Replicate(), Replicate(), None),
        desired_output_layouts=(Shard(1), Replicate(), None),
    )
    module = parallelize_module(Two(), place.mesh, style)
    x = data(4, 8)
    double, total, flag = module(place.pieces(place.whole(x, 0), Shard(1)), "flag")
    assert double.shape == (4, 2) and total.shape == (4,) and flag == "flag"
    torch.testing.assert_close(place.joined(double, Shard(1)).cpu(), x * 2)
    torch.testing.assert_close(total.agreed(), x.sum(-1))
    double, total, flag = module(place.whole(x, 0), "flag")
    assert not isinstance(double, ManualTensor) and double.shape == (4, 8)


class Norm(nn.Module):
    """A norm in Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(data(12, seed=5))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(12).double(), Norm], ids=["layer", "rms"])
def test_sequence_parallel(make, place):
    """Nothing moves but the sums of the parameters' gradients; by default a whole comes out."""
    model = make()
    ours = parallelize_module(
        copy.deepcopy(model), place.mesh, SequenceParallel(use_local_output=True)
    )
    args = (place, model, ours, data(4, 8, 12), Shard(1), Shard(1), (4, 2, 12))
    check(*args, backward=["all_reduce"])
    ours = parallelize_module(copy.deepcopy(model), place.mesh, SequenceParallel())
    out = ours(place.pieces(place.whole(data(4, 8, 12), 0), Shard(1)))
    assert not isinstance(out, ManualTensor) and out.shape == (4, 8, 12)
    torch.testing.assert_close(out.detach().cpu(), model(data(4, 8, 12)).detach())


def test_sequence_parallel_dropout(place):
    ours = parallelize_module(nn.Dropout(0.5), place.mesh, SequenceParallel(use_local_output=True))
    x = place.whole(torch.ones(4, 64, 12, dtype=torch.double), 0).requires_grad_()
    mine = ours(place.pieces(x, Shard(1)))
    mine.sum().backward()
    parts = [shard.data for shard in mine.detach().local_shards if shard.replica_id == 0]
    assert len(parts) == TP and not any(torch.equal(parts[0], part) for part in parts[1:])
    assert 0.3 < (torch.stack(parts) == 0).double().mean() < 0.7
    torch.testing.assert_close(x.grad.cpu(), torch.cat(parts, 1))


# Layers one after the other.


class FeedForward(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm()
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_styles_make_of_pieces_counts_as_pieces(sequence, place):
    """`SequenceParallel` hands a whole on; the next layer takes it as torch takes a DTensor."""
    module, reference = (FeedForward(lambda: nn.LayerNorm(12)).double() for _ in range(2))
    split = Shard(1) if sequence else Replicate()
    seen = []
    plan = {
        "up": ColwiseParallel(input_layouts=split),
        "down": RowwiseParallel(output_layouts=split),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(module, place.mesh, plan)
    module.up.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    x, weight = data(4, 8, 12), data(4, 8, 12, seed=1)
    there = x.clone().requires_grad_()
    (reference(there) * weight).sum().backward()
    here = place.whole(x, 0).requires_grad_()
    mine = module(place.pieces(here, split))
    assert isinstance(mine, ManualTensor) and mine.shape == (4, 2 if sequence else 8, 12)
    assert seen == [(4, 8, 8)]
    (place.joined(mine, split) * place.whole(weight, 0)).sum().backward()
    torch.testing.assert_close(here.grad.cpu(), there.grad)
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)
    assert module(here).shape == (4, 8, 12) and seen[1] == (4, 8, 32)  # whole in, whole out


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net1, self.net2 = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


MLP = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
GATHERED = ColwiseParallel(output_layouts=Replicate())
PLANS = {
    "columns and rows": (Mlp, MLP, Replicate()),
    "gathered columns": (Mlp, {"net1": GATHERED, "net2": GATHERED}, Replicate()),
    "nested": (
        lambda: nn.ModuleDict({"one": Mlp()})["one"],
        {"net*": GATHERED},
        Replicate(),
    ),
    "rows": (lambda: nn.Linear(16, 10), {"": RowwiseParallel()}, Shard(-1)),
    "rows of copies": (
        lambda: nn.Linear(16, 10),
        {"": RowwiseParallel(input_layouts=Replicate())},
        Replicate(),
    ),
    "wildcards": (
        lambda: nn.Sequential(Mlp(), Mlp()),
        {"*.net1": ColwiseParallel(), "*.net2": RowwiseParallel()},
        Replicate(),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_and_a_step(name, place):
    """Output, gradients and the parameters after a step are the plain module's."""
    make, plan, placement = PLANS[name]
    torch.manual_seed(0)
    reference = make().double()
    ours = parallelize_module(copy.deepcopy(reference), place.mesh, plan)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.25) for each in (reference, ours)]
    x = data(12, 16 if isinstance(reference, nn.Linear) else 12)
    for _ in range(2):
        there = reference(x)
        mine = ours(place.pieces(place.whole(x, 0), placement))
        assert isinstance(mine, ManualTensor) and mine.alike == {"tp"}
        torch.testing.assert_close(mine.detach().agreed(), there.detach())
        there.sum().backward()
        mine.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for theirs, own in zip(reference.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(own.detach().cpu(), theirs.detach())


def test_torchs_own_styles(place):
    """Their `use_local_output` counts as well."""
    from torch.distributed.tensor import parallel as theirs

    x = place.pieces(place.whole(data(8, 16), 0), Replicate())
    for local in (True, False):
        style = theirs.ColwiseParallel(use_local_output=local)
        out = parallelize_module(linear(), place.mesh, style)(x)
        assert isinstance(out, ManualTensor) == local
        assert out.shape == ((8, 4) if local else (8, 16))


@pytest.mark.parametrize(
    ("style", "given", "error", "message"),
    [
        (
            RowwiseParallel(output_layouts=Partial()),
            Shard(-1),
            NotImplementedError,
            "the devices' parts of a sum",
        ),
        (ColwiseParallel(input_layouts=Partial("product")), Replicate(), Exception, "product"),
    ],
)
def test_refused(style, given, error, message, place):
    ours = parallelize_module(linear(), place.mesh, style)
    with pytest.raises(error, match=message):
        ours(place.pieces(place.whole(data(6, 16), 0), given))


def test_pieces_of_more_than_the_style_is_along():
    place = Place(is_part=True)
    ours = parallelize_module(linear(), place.mesh, ColwiseParallel())
    with pytest.raises(ShardingError, match=r"over \('dp', 'tp'\).*take pieces over the part"):
        ours(place.whole(data(8, 16), 0).to_local())
