"""Parallel styles given pieces: what PyTorch's tests of its styles say of a rank's local tensors.

Each case runs on the `tp` part of a mesh whose `dp` splits the batch (but where the style splits
the batch itself), some on a mesh of four devices too, against the whole module. On CPUs XLA writes
a reduce-scatter as an all-reduce and a slice.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

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
R, S0, S1 = Replicate(), Shard(0), Shard(1)


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
        split = [R if dim is None else Shard(dim), R] if self.is_part else None
        return distribute_tensor(t, self.root, split)

    def pieces(self, t, placement, dim=None):
        """What each device along `tp` has of a whole, or of what becomes one."""
        whole = t if t.device.type == "jax" else self.whole(t, dim)
        whole = DTensor.from_local(whole, self.mesh, [R])
        return whole.redistribute(placements=[placement]).to_local()

    def joined(self, t, placement):
        return DTensor.from_local(t, self.mesh, [placement])


@pytest.fixture
def place(request):
    """The part of a mesh; a mesh of its own where a test asks for it."""
    return Place(getattr(request, "param", "part") == "part")


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def linear(rows=16, columns=16):
    torch.manual_seed(0)
    return nn.Linear(rows, columns).double()


def embedding():
    torch.manual_seed(0)
    return nn.Embedding(16, 16).double()


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
    place, module, style, x, have, want, shape, forward=(), backward=(), split=0, counts=True
):
    """Values, gradients, the shape of what comes out, and the collectives there and back."""
    ours = parallelize_module(copy.deepcopy(module), place.mesh, style)
    x_there = x.clone().requires_grad_(x.is_floating_point())
    out_there = module(x_there)
    weight = data(*out_there.shape, seed=7)
    (out_there * weight).sum().backward()
    given = place.pieces(x, have, split).detach()
    if x.is_floating_point():
        given.requires_grad_()
    xs.sync()
    comm_mode = CommDebugMode()
    with comm_mode:
        out = ours(given)
        xs.sync()
    assert isinstance(out, ManualTensor) and out.axes == ("tp",) and out.shape == shape
    if counts:
        assert set(along(comm_mode)) <= set(forward) and (not forward or along(comm_mode))
    back = CommDebugMode()
    with back:
        whole = place.joined(out, want)
        (whole * place.whole(weight, split)).sum().backward()
        xs.sync()
    torch.testing.assert_close(whole.detach().cpu(), out_there.detach())
    if counts:
        assert set(along(back)) <= {*forward, *backward}, along(back)
    if x.is_floating_point():
        torch.testing.assert_close(place.joined(given.grad, have).cpu(), x_there.grad)
    for (name, mine), theirs in zip(ours.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, msg=name)


class Norm(nn.Module):
    """A norm in Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(data(12, seed=5))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


WORDS = torch.arange(8).reshape(4, 2)
SUM, BOTH = ["all_reduce"], ["all_reduce", "reduce_scatter"]
ROWS = {"split": None}  # the batch is the style's
LAYERS = {
    # Columns come out of copies without a move; the gradient of the copies is one sum.
    "columns": (
        (linear, ColwiseParallel(), data(8, 16), R, S1, (8, 4)),
        {"backward": SUM},
    ),
    # Rows are gathered; their gradient is summed and scattered.
    "columns of a split input": (
        (linear, ColwiseParallel(input_layouts=S0), data(32, 16), S0, S1, (32, 4)),
        {"forward": ["all_gather"], "backward": BOTH, **ROWS},
    ),
    "columns of an embedding": (
        (embedding, ColwiseParallel(), WORDS, R, Shard(2), (4, 2, 4)),
        {},
    ),
    # What the devices compute of their columns is summed; nothing moves on the way back.
    "rows": (
        (linear, RowwiseParallel(), data(8, 16), S1, R, (8, 16)),
        {"forward": SUM},
    ),
    "rows with a split output": (
        (linear, RowwiseParallel(output_layouts=S0), data(8, 16), S1, S0, (2, 16)),
        {"forward": BOTH, "backward": ["all_gather"], **ROWS},
    ),
    "rows of an embedding": (
        (embedding, RowwiseParallel(input_layouts=R), WORDS, R, R, (4, 2, 16)),
        {"forward": SUM},
    ),
    # On the two dimensions XLA exchanges rows before it sums, of a whole input as well.
    "rows of an embedding with a split output": (
        (embedding, RowwiseParallel(input_layouts=R, output_layouts=S1), WORDS[0], R, S1, (2, 4)),
        {"counts": False, **ROWS},
    ),
    # Nothing moves but the sums of the parameters' gradients.
    "a sequence": (
        (Norm, SequenceParallel(use_local_output=True), data(4, 8, 12), S1, S1, (4, 2, 12)),
        {"backward": SUM},
    ),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "part") for name in LAYERS), ("columns", "mesh")],
    indirect=["place"],
)
def test_a_layer(name, place):
    (make, style, *rest), collectives = LAYERS[name]
    check(place, make(), style, *rest, **collectives)


def test_by_default_a_whole_comes_out_of_sequence_parallel(place):
    model = nn.LayerNorm(12).double()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, SequenceParallel())
    out = ours(place.pieces(data(4, 8, 12), S1, 0))
    assert not isinstance(out, ManualTensor) and out.shape == (4, 8, 12)
    torch.testing.assert_close(out.detach().cpu(), model(data(4, 8, 12)).detach())


# Inputs and outputs of a module.


def test_prepared_input_and_output(place):
    x = data(2, 16).repeat(TP, 1)
    for local in (False, True):
        gather = PrepareModuleInput(
            input_layouts=S0, desired_input_layouts=R, use_local_output=local
        )
        chunk = PrepareModuleOutput(
            output_layouts=R, desired_output_layouts=S0, use_local_output=local
        )
        gathered = parallelize_module(nn.Identity(), place.mesh, gather)(place.pieces(x, S0, 0))
        chunked = parallelize_module(nn.Identity(), place.mesh, chunk)(place.pieces(x, R, 0))
        for out in (gathered, chunked):
            assert isinstance(out, ManualTensor) == local
        assert gathered.shape == (8, 16) and chunked.shape == ((2, 16) if local else (8, 16))
        assert torch.equal(gathered.agreed() if local else gathered.cpu(), x)
        assert torch.equal((place.joined(chunked, S0) if local else chunked).cpu(), x)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(8, 8)

    def forward(self, x, y, z=2.0):
        return self.linear(x) + y + z


def test_prepared_inputs_by_place(place):
    """One is moved, the other not; what is whole beside pieces becomes pieces."""
    module = Sum()
    inputs = PrepareModuleInput(
        input_layouts=(S0, None), desired_input_layouts=(R, None), use_local_output=True
    )
    parallelize_module(module.linear, place.mesh, ColwiseParallel())
    parallelize_module(module, place.mesh, inputs)
    x, y = data(8, 8), data(8, 2, seed=1)
    mine = place.pieces(x, S0, 0)
    want = copy.deepcopy(Sum().linear)(x) + y.repeat(1, TP) + 2
    for other in (place.whole(y, 0), place.pieces(y, R, 0)):
        out = module(mine, other)
        assert isinstance(out, ManualTensor) and out.shape == (8, 2)
        torch.testing.assert_close(place.joined(out, S1).detach().cpu(), want)
    with pytest.raises(ValueError, match="Sum has 3 inputs, and input_layouts has 2 entries"):
        module(mine, mine, 3.0)


def test_a_layer_called_by_name(place):
    model = linear()
    ours = parallelize_module(copy.deepcopy(model), place.mesh, ColwiseParallel())
    out = ours(input=place.pieces(data(8, 16), R, 0))
    assert out.shape == (8, 4)
    torch.testing.assert_close(place.joined(out, S1).cpu(), model(data(8, 16)))
    with pytest.raises(ValueError, match="ColwiseParallel lays out the first input of Linear"):
        ours()


class Two(nn.Module):
    def forward(self, x, flag):
        return x * 2, x.sum(-1), flag


@pytest.mark.parametrize("local", [False, True])
def test_prepared_on_both_sides(local, place):
    """Several outputs, of which one is no tensor; pieces or wholes inside."""
    style = PrepareModuleInputOutput(
        input_layouts=(S1, None),
        desired_input_layouts=(R, None),
        use_local_input=local,
        output_layouts=(R, R, None),
        desired_output_layouts=(S1, R, None),
    )
    module = parallelize_module(Two(), place.mesh, style)
    x = data(4, 8)
    double, total, flag = module(place.pieces(x, S1, 0), "flag")
    assert double.shape == (4, 2) and total.shape == (4,) and flag == "flag"
    torch.testing.assert_close(place.joined(double, S1).cpu(), x * 2)
    torch.testing.assert_close(total.agreed(), x.sum(-1))
    double, total, flag = module(place.whole(x, 0), "flag")
    assert not isinstance(double, ManualTensor) and double.shape == (4, 8)


# Layers one after the other.


class FeedForward(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_what_styles_make_of_pieces_counts_as_pieces(place):
    """`SequenceParallel` hands a whole on; the next layer takes it as torch takes a DTensor."""
    module, reference = (FeedForward(nn.LayerNorm(12)).double() for _ in range(2))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=S1),
        "down": RowwiseParallel(output_layouts=S1),
    }
    parallelize_module(module, place.mesh, plan)
    seen = []
    module.up.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    x, weight = data(4, 8, 12), data(4, 8, 12, seed=1)
    there = x.clone().requires_grad_()
    (reference(there) * weight).sum().backward()
    here = place.whole(x, 0).requires_grad_()
    mine = module(place.pieces(here, S1))
    assert isinstance(mine, ManualTensor) and mine.shape == (4, 2, 12)
    assert seen == [(4, 8, 8)]
    (place.joined(mine, S1) * place.whole(weight, 0)).sum().backward()
    torch.testing.assert_close(here.grad.cpu(), there.grad)
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)
    assert module(here).shape == (4, 8, 12) and seen[1] == (4, 8, 32)  # whole in, whole out


def mlp():
    torch.manual_seed(5)
    layers = {"net1": nn.Linear(12, 16), "act": nn.ReLU(), "net2": nn.Linear(16, 12)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


ROWWISE_OF_COPIES = RowwiseParallel(input_layouts=R)
PLANS = {
    "gathered columns": (mlp, {"net*": ColwiseParallel(output_layouts=R)}, R),
    "rows": (lambda: nn.Linear(16, 10), {"": RowwiseParallel()}, Shard(-1)),
    "rows of copies": (lambda: nn.Linear(16, 10), {"": ROWWISE_OF_COPIES}, R),
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
        mine = ours(place.pieces(x, placement, 0))
        assert isinstance(mine, ManualTensor) and mine.replicated_axes == {"tp"}
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
    x = place.pieces(data(8, 16), R, 0)
    for local, shape in ((True, (8, 4)), (False, (8, 16))):
        style = torch_parallel.ColwiseParallel(use_local_output=local)
        out = parallelize_module(linear(), place.mesh, style)(x)
        assert isinstance(out, ManualTensor) == local and out.shape == shape


def test_refused(place):
    x = data(6, 16)
    for style, given, error, message in (
        (
            RowwiseParallel(output_layouts=Partial()),
            Shard(-1),
            NotImplementedError,
            "are partial sums",
        ),
        (ColwiseParallel(input_layouts=Partial("product")), R, Exception, "product"),
    ):
        with pytest.raises(error, match=message):
            parallelize_module(linear(), place.mesh, style)(place.pieces(x, given, 0))
    ours = parallelize_module(linear(), place.mesh, ColwiseParallel())
    with pytest.raises(ShardingError, match=r"over \('dp', 'tp'\).*local tensors over the submesh"):
        ours(place.whole(data(8, 16), 0).to_local())
