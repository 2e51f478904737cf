"""Attention as a torchrun script writes it, `heads // tp` in the view, given pieces."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor, parallel
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from tests.torch_bridge.distributed import tp_block

TP = 4


class RankAttention(tp_block.Attention):
    """`tp_block.Attention` with the heads of one rank."""

    dropout = 0.0

    def forward(self, x):
        heads = tp_block.HEADS // TP
        q, k, v = (
            layer(x).view(x.shape[0], -1, heads, tp_block.HEAD).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout
        )
        return self.wo(mixed.transpose(1, 2).reshape(x.shape[0], -1, tp_block.WIDTH // TP))


def batch(x, mesh):
    return distribute_tensor(x, mesh, [Shard(0), Replicate()])


def of_a_rank(block):
    """The same parameters, in a block that a rank would have."""
    ours = copy.deepcopy(block).double()
    for module in ours.modules():
        if isinstance(module, tp_block.Attention):
            module.__class__ = RankAttention
    return ours


def pieces(x, mesh, placement):
    whole = DTensor.from_local(x, mesh["tp"], [Replicate()])
    return whole.redistribute(placements=[placement]).to_local()


PLANS = [(tp_block.plan, Replicate()), (tp_block.sequence_plan, Shard(1))]


def test_a_block(mesh):
    """Norms have no style in this plan: their weights' gradients are those of one copy."""
    plan, placement = PLANS[0]
    block, x, weight = tp_block.inputs()
    ours = parallel.parallelize_module(of_a_rank(block), mesh["tp"], plan(parallel))
    out_there, x_grad, grads = tp_block.reference(block, x, weight)
    here = batch(x.double(), mesh).requires_grad_()
    comm_mode = CommDebugMode()
    with comm_mode:
        out = ours(pieces(here, mesh, placement))
        whole = DTensor.from_local(out, mesh["tp"], [placement])
        (whole * batch(weight.double(), mesh)).sum().backward()
        xs.sync()
    assert isinstance(out, ManualTensor) and whole.partition_spec[0] == "dp"
    torch.testing.assert_close(whole.detach().cpu(), out_there)
    torch.testing.assert_close(here.grad.cpu(), x_grad)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), grads[name], msg=name)
    # Along dp there are the sums of the parameters' gradients, and nothing is gathered.
    assert {name for name, axes in comm_mode.get_axis_counts() if "dp" in axes} == {"all_reduce"}


def test_a_few_steps(mesh):
    """A compiled step with an optimizer, beside the plain module; the loss is of pieces."""
    plan, placement = tp_block.sequence_plan, Shard(1)
    block, x, target = tp_block.inputs()
    ours = parallel.parallelize_module(of_a_rank(block), mesh["tp"], plan(parallel))
    reference = copy.deepcopy(block).double()
    here, there = batch(x.double(), mesh), batch(target.double(), mesh)

    def loss_of_pieces():
        difference = ours(pieces(here, mesh, placement)) - pieces(there, mesh, placement)
        loss = difference.square().mean()
        return DTensor.from_local(loss / TP, mesh["tp"], [Partial()])

    def trained(module, loss_of):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

        def step():
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compiled = xs.compile(trained(ours, loss_of_pieces))
    plain = trained(reference, lambda: (reference(x.double()) - target.double()).square().mean())
    losses = [(compiled().cpu(), plain()) for _ in range(2)]
    for mine, theirs in losses:
        torch.testing.assert_close(mine, theirs)
    assert losses[-1][0] < losses[0][0]
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def test_scanned_layers(mesh):
    """Stacked and recomputed."""
    plan, placement = PLANS[1]
    torch.manual_seed(0)
    blocks = nn.ModuleList(tp_block.Block() for _ in range(2)).double()
    x, weight = (torch.randn(4, 8, 32, dtype=torch.double) for _ in range(2))
    layers = of_a_rank(blocks)
    for layer in layers:
        parallel.parallelize_module(layer, mesh["tp"], plan(parallel))
    scanned = xs.scan_layers(layers, checkpoint=True)
    there = x.clone().requires_grad_()
    hidden = there
    for block in blocks:
        hidden = block(hidden)
    (hidden * weight).sum().backward()
    here = batch(x, mesh).requires_grad_()
    out = scanned(pieces(here, mesh, placement))
    whole = DTensor.from_local(out, mesh["tp"], [placement])
    (whole * batch(weight, mesh)).sum().backward()
    torch.testing.assert_close(whole.detach().cpu(), hidden.detach())
    torch.testing.assert_close(here.grad.cpu(), there.grad)
    theirs = dict(blocks.named_parameters())
    for name, parameter in scanned.named_parameters():
        short = name.removeprefix("layers.")
        want = torch.stack([theirs[f"{layer}.{short}"].grad for layer in range(2)])
        torch.testing.assert_close(parameter.grad.cpu(), want, msg=name)


def test_scanned_layers_whose_results_differ(mesh):
    """The first layer takes copies, the others what differs: the weights' gradients are sums."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8, dtype=torch.double))

        def forward(self, x, own):
            return torch.tanh(x * self.scale + own)

    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    x, own = torch.randn(4, 8).double(), torch.randn(4, 32).double()
    scales = [layer.scale.detach().clone().requires_grad_() for layer in layers]
    total = 0.0
    for part in own.chunk(TP, 1):
        hidden = x
        for scale in scales:
            hidden = torch.tanh(hidden * scale + part)
        total = total + hidden.square().sum()
    total.backward()
    scanned = xs.scan_layers(layers.to("jax"), stacked=False)
    mine = pieces(batch(x, mesh), mesh, Replicate())
    out = scanned(mine, pieces(batch(own, mesh), mesh, Shard(1)))
    assert mine.replicated_axes == {"tp"} and out.replicated_axes == frozenset()
    out.square().sum().backward()
    for layer, scale in zip(scanned, scales, strict=True):
        torch.testing.assert_close(layer.scale.grad.cpu(), scale.grad)


def test_scanned_layers_refuse_a_gradient_that_differs(mesh):
    layers = nn.ModuleList(nn.LayerNorm(8) for _ in range(2)).double().to("jax")
    out = xs.scan_layers(layers, stacked=False)(
        pieces(batch(torch.randn(4, 8).double(), mesh), mesh, Replicate())
    )
    own = pieces(batch(torch.randn(4, 32).double(), mesh), mesh, Shard(1))
    with pytest.raises(
        RuntimeError, match=r"replicated over \['tp'\], and their gradients are not"
    ):
        (out * own).sum().backward()


def test_dropout_of_attention_differs_between_devices(mesh):
    """Every device drops of its own heads: with equal heads their outputs differ."""
    torch.manual_seed(0)
    attention = RankAttention().double()
    attention.dropout = 0.5
    with torch.no_grad():
        for layer in (attention.wq, attention.wk, attention.wv):
            layer.weight.copy_(layer.weight[: tp_block.WIDTH // TP].repeat(TP, 1))
    seen = []
    styles = {name: parallel.ColwiseParallel() for name in ("wq", "wk", "wv")}
    ours = parallel.parallelize_module(
        attention, mesh["tp"], styles | {"wo": parallel.RowwiseParallel()}
    )
    ours.wo.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = batch(torch.randn(4, 8, tp_block.WIDTH, dtype=torch.double), mesh)
    for dropped in (True, False):
        ours.dropout = 0.5 if dropped else 0.0
        ours(pieces(x, mesh, Replicate()))
        heads = seen.pop().cpu().chunk(TP, -1)
        assert all(torch.equal(heads[0], other) != dropped for other in heads[1:])


@pytest.mark.parametrize("shape", [(2, TP), (TP,)])
def test_the_heads_of_a_rank_in_a_whole_tensor(shape):
    """The error says what the tensor is, and what to write."""
    mesh = init_device_mesh("jax", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    layer = nn.Linear(32, 32)
    ours = parallel.parallelize_module(layer, mesh["tp"], parallel.ColwiseParallel())
    given = r"mesh\['tp'\]" if len(shape) > 1 else "mesh"
    message = (
        r"invalid for input of size 1024; this tensor is global, of 4 times as many elements, "
        r"and its mesh has 4 devices along 'tp': .* Write -1, or the number of all heads, for "
        rf"heads // 4; or pass local tensors .*from_local\(x, {given}, "
    )
    x = torch.randn(4, 8, 32)
    for on_device in (x.to("jax"), distribute_tensor(x, mesh)):
        heads = ours(on_device)
        for of_a_rank in (heads.view, heads.reshape):
            with pytest.raises(RuntimeError, match=message):
                of_a_rank(4, 8, 8 // TP, 4)
        with pytest.raises(RuntimeError, match=r"invalid for input of size 1024$"):
            heads.view(4, 8, 3, 4)
        xs.sync()
        with pytest.raises(RuntimeError, match=message):
            heads.view(4, 8, 8 // TP, 4)
        assert heads.view(4, 8, -1, 4).shape == heads.view(4, 8, 8, 4).shape
    step = xs.compile(lambda x: ours(x).view(4, 8, 8 // TP, 4))
    with pytest.raises(RuntimeError, match=message):
        step(distribute_tensor(x, mesh))
    with pytest.raises(RuntimeError, match=r"invalid for input of size 1024$"):
        x.to("jax").view(4, 8, 2, 4)  # on no mesh
