"""parallelize_module: values, gradients, placements and collectives of tensor-parallel plans."""

import copy

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import NamedSharding
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as theirs

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import parallel
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from tests.torch_bridge.distributed import tp_block as tp

PLANS = pytest.mark.parametrize("plan", [tp.plan, tp.sequence_plan])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def on_dp(t, mesh):
    return iso.shard(t, mesh.get_jax_mesh(), iso.P("dp"))


def check(block, out, x, reference):
    torch.testing.assert_close(out.detach().cpu().double(), reference[0], **CLOSE)
    torch.testing.assert_close(x.grad.cpu().double(), reference[1], **CLOSE)
    for name, parameter in block.named_parameters():
        expected = reference[2][name]
        torch.testing.assert_close(parameter.grad.cpu().double(), expected, **CLOSE)


def test_a_block_has_the_values_of_the_whole_and_megatrons_collectives_two_each_way(mesh):
    block, x, weight = tp.inputs()
    reference = tp.reference(copy.deepcopy(block), x, weight)
    assert parallel.parallelize_module(block, mesh["tp"], tp.plan(parallel)) is block
    x, weight = on_dp(x, mesh).requires_grad_(), on_dp(weight, mesh)
    activation = x.nbytes // 2
    comm_mode = CommDebugMode()
    with comm_mode:
        out = block(x)
    assert comm_mode.get_axis_counts() == {("all_reduce", ("tp",)): 2}
    assert comm_mode.get_comm_bytes() == {"all_reduce": 2 * activation}
    with comm_mode:
        (out * weight).sum().backward()
    assert comm_mode.get_axis_counts() == {
        ("all_reduce", ("tp",)): 2,  # gradients of the inputs of attention and feed forward
        ("all_reduce", ("dp",)): 1,  # all gradients of parameters together
    }
    sent = [c.bytes for run in comm_mode.runs for c in run.collectives]
    # Three gradients meet where q, k and v part; XLA's CPU backend sends them as one collective.
    assert activation in sent and 3 * activation in sent
    assert "all_gather" not in comm_mode.get_comm_counts()
    check(block, out, x, reference)


def test_sequence_parallel_gathers_instead(mesh):
    """Each all-reduce becomes a sum in pieces (on CPU an all-reduce and a slice) and a gather."""
    block, x, weight = tp.inputs()
    reference = tp.reference(copy.deepcopy(block), x, weight)
    parallel.parallelize_module(block, mesh["tp"], tp.sequence_plan(parallel))
    x, weight = on_dp(x, mesh).requires_grad_(), on_dp(weight, mesh)
    comm_mode = CommDebugMode()
    with comm_mode:
        out = block(x)
    assert comm_mode.get_axis_counts() == {("all_reduce", ("tp",)): 2, ("all_gather", ("tp",)): 2}
    assert out.placements == (Shard(0), Shard(1))
    with comm_mode:
        (out * weight).sum().backward()
    counts = comm_mode.get_axis_counts()
    # Two of activations; the third is of the gradient of `x`, which lies as `x` does.
    assert counts["all_gather", ("tp",)] == 3
    # Two of activations; the third is of gradients of the norms' weights, which see pieces.
    assert counts["all_reduce", ("tp",)] == 3
    small = block.attention_norm.weight.nbytes
    assert min(c.bytes for run in comm_mode.runs for c in run.collectives) <= small
    check(block, out, x, reference)


@pytest.fixture
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@PLANS
def test_parameters_lie_as_dtensors_do(mesh, plan, fake_group):
    of_torch = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dtensors = theirs.parallelize_module(tp.Block(), of_torch["tp"], plan(theirs))
    ours = parallel.parallelize_module(tp.Block(), mesh["tp"], plan(parallel))
    seen = 0
    for (name, theirs_), mine in zip(dtensors.named_parameters(), ours.parameters(), strict=True):
        if isinstance(theirs_, DTensor):
            seen += 1
            assert mine.placements == (Replicate(), *theirs_.placements), name
            assert mine.local_shards[0].data.shape == theirs_.to_local().shape, name
        else:
            assert mine.placements is None, name
    assert seen == {tp.plan: 8, tp.sequence_plan: 10}[plan]


@PLANS
def test_torchs_own_styles_do_the_same(mesh, plan):
    both = plan, lambda styles: {**plan(styles), "": styles.PrepareModuleInputOutput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1),
        output_layouts=Shard(1), desired_output_layouts=Replicate(),
    )}  # fmt: skip
    for make in both:
        one, two = (
            parallel.parallelize_module(tp.Block(), mesh["tp"], make(styles))
            for styles in (parallel, theirs)
        )
        for a, b in zip(one.modules(), two.modules(), strict=True):
            assert [p.placements for p in a.parameters()] == [p.placements for p in b.parameters()]
            assert _laid_out(a) == _laid_out(b)
    assert len(_laid_out(two)) == 2


def _laid_out(module):
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook.constraint_key for hook in hooks]


def test_a_one_dimensional_mesh_and_one_style():
    mesh = init_device_mesh("jax", (8,))
    linear = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    expected = linear(x)
    parallel.parallelize_module(linear, mesh, parallel.RowwiseParallel())
    assert linear.weight.placements == (Shard(1),) and linear.bias.placements == (Replicate(),)
    out = linear(x.to("jax"))
    assert out.placements == (Replicate(),)
    torch.testing.assert_close(out.cpu(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("before", "style", "after"),
    [
        (("dp", None), "ColwiseParallel", iso.P(("dp", "tp"), None)),
        (("dp", None), "RowwiseParallel", iso.P("dp", "tp")),
        ((None, "dp"), "ColwiseParallel", iso.P("tp", "dp")),
        ((None, ("tp", "dp")), "ColwiseParallel", iso.P("tp", "dp")),
    ],
)
def test_what_other_dimensions_split_stays(mesh, before, style, after):
    linear = nn.Linear(16, 8, bias=False).to("jax")
    expected = linear.weight.detach().cpu().clone()
    xs.mark_sharding(linear.weight, mesh.get_xs_mesh(), before)
    parallel.parallelize_module(linear, mesh["tp"], getattr(parallel, style)())
    after = NamedSharding(mesh.get_jax_mesh(), after)
    assert linear.weight.named_sharding.is_equivalent_to(after, 2)
    torch.testing.assert_close(linear.weight.detach().cpu(), expected, rtol=0, atol=0)


def test_fsdp_marks_on_the_other_dimension(mesh):
    """As `fully_shard` after `parallelize_module`: rows split by tp, each again by dp."""
    block, x, weight = tp.inputs()
    reference = tp.reference(copy.deepcopy(block), x, weight)
    parallel.parallelize_module(block, mesh["tp"], tp.plan(parallel))
    for parameter in block.parameters():
        spec = [*(parameter.partition_spec or ()), None, None][: parameter.dim()]
        spec[0] = (spec[0], "dp") if spec[0] else "dp"
        xs.clear_sharding(parameter)
        xs.mark_sharding(parameter, mesh.get_xs_mesh(), tuple(spec))
    x = on_dp(x, mesh).requires_grad_()
    comm_mode = CommDebugMode()
    with comm_mode:
        out = block(x)
    assert comm_mode.get_axis_counts()["all_gather", ("dp",)] >= 8  # the parameters
    (out * on_dp(weight, mesh)).sum().backward()
    check(block, out, x, reference)
    assert block.attention.wq.weight.partition_spec == iso.P(("tp", "dp"))


def test_what_is_refused(mesh):
    linear = nn.Linear(16, 8).to("jax")
    xs.mark_sharding(linear.weight, xs.Mesh(range(8), (8,), ("all",)), ("all", None))
    with pytest.raises(iso.ShardingError, match=r"P\('all',\).*parts of one mesh"):
        parallel.parallelize_module(linear, mesh["tp"], parallel.ColwiseParallel())
    blocks = xs.scan_layers(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).to("jax"))
    with pytest.raises(ValueError, match="layers first, then scan_layers"):
        parallel.parallelize_module(blocks, mesh["tp"], {"layers": parallel.ColwiseParallel()})
    logits = on_dp(torch.zeros(8, 16), mesh)
    target = torch.zeros(8, dtype=torch.long, device="jax")
    with parallel.loss_parallel(), pytest.raises(ValueError, match="split along their classes"):
        nn.functional.cross_entropy(logits, target)
    assert nn.functional.cross_entropy(logits, target).item() == pytest.approx(2.7725887)


def test_a_compiled_training_step_equals_torch(mesh):
    block, x, weight = tp.inputs()
    plain = copy.deepcopy(block).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (plain(x.double()) * weight.double()).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parallel.parallelize_module(block, mesh["tp"], tp.sequence_plan(parallel))
    ours = torch.optim.SGD(block.parameters(), lr=0.1)

    @xs.compile
    def step(x, weight):
        ours.zero_grad()
        loss = (block(x) * weight).mean()
        loss.backward()
        ours.step()
        return loss.detach()

    given = on_dp(x, mesh), on_dp(weight, mesh)
    got = [step(*given).item()]
    comm_mode = CommDebugMode()
    with comm_mode:
        got.append(step(*given).item())
    assert got == pytest.approx(losses, rel=1e-4)
    assert comm_mode.get_axis_counts()["all_gather", ("tp",)] == 4
    assert block.attention.wq.weight.placements == (Replicate(), Shard(0))


def test_layers_laid_out_otherwise_are_not_scanned(mesh):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)).to("jax")
    for layer, output in zip(layers, (Replicate(), Shard(-1)), strict=True):
        style = parallel.ColwiseParallel(output_layouts=output)
        parallel.parallelize_module(layer, mesh["tp"], {"0": style})
    with pytest.raises(ValueError, match=r"0\.forward \(hooks after it with other constraints\)"):
        xs.scan_layers(layers)


def test_loss_parallel_gathers_no_classes(mesh):
    torch.manual_seed(0)
    head = nn.Linear(16, 64)
    x, target = torch.randn(8, 6, 16), torch.randint(0, 64, (8, 6))
    plain = copy.deepcopy(head).double()
    expected = nn.functional.cross_entropy(plain(x.double()).flatten(0, 1), target.flatten())
    expected.backward()
    style = parallel.ColwiseParallel(use_local_output=False)
    parallel.parallelize_module(head, mesh["tp"], style)
    x, target = on_dp(x, mesh), on_dp(target, mesh)
    comm_mode = CommDebugMode()
    with comm_mode, parallel.loss_parallel():
        loss = nn.functional.cross_entropy(head(x).flatten(0, 1), target.flatten())
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(head.weight.grad.cpu().double(), plain.weight.grad, **CLOSE)
    assert set(comm_mode.get_comm_counts()) == {"all_reduce"}
    rows = 4 * 6 * 4  # bytes of one number for each of a device's rows
    along_tp = [
        c.bytes
        for run in comm_mode.runs
        for c, axes in zip(run.collectives, run.axes, strict=True)
        if axes == ("tp",)
    ]
    assert len(along_tp) == 3 and max(along_tp) <= 2 * rows


def test_as_a_jax_function(mesh):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(16, 32)
    expected = mlp(x)
    expected.square().sum().backward()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    gradient = mlp[0].weight.grad
    function = iso.jax_function(parallel.parallelize_module(mlp, mesh["tp"], plan))
    given = iso.to_jax(on_dp(x, mesh))
    step = jax.jit(jax.grad(lambda params: (function(params, given) ** 2).sum()))
    got = step(function.params)["0.weight"]
    torch.testing.assert_close(torch.tensor(np.asarray(got)), gradient, rtol=1e-4, atol=1e-4)
    program = jax.jit(function).lower(function.params, given).compile().as_text()
    assert [found.kind for found in collectives(program)] == ["all_reduce"]


def test_a_meta_module_becomes_empty_in_pieces(mesh):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        model[3].bias = model[2].bias
    styles = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tp"], styles)
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert model[2].weight.placements == (Replicate(), Shard(1))
    assert {t.device.type for t in model.state_dict().values()} == {"jax"}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
    for layer in (model[0], model[2], model[3]):
        layer.reset_parameters()
    xs.sync()
    assert {tuple(s.data.shape) for s in model[0].weight.local_shards} == {(8, 16)}
    x = torch.randn(4, 16)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
    plain.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
    torch.testing.assert_close(model(x.to("jax")).detach().cpu(), plain(x).detach(), **CLOSE)


def test_one_meta_tensor_of_two_names_remains_one(mesh):
    with torch.device("meta"):
        layer = nn.Linear(16, 16)
        layer.other = layer.weight
        layer.register_buffer("first", torch.zeros(2))
        layer.register_buffer("second", layer.first)
    parallel.parallelize_module(layer, mesh["tp"], parallel.ColwiseParallel())
    assert layer.other is layer.weight and layer.second is layer.first
    assert layer.weight.device.type == layer.first.device.type == "jax"
