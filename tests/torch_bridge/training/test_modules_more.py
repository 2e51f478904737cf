"""Modules that torch's module database leaves out, and what feeds them: DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import on_both, raises_on_both
from tests.torch_bridge.training.test_training import close, draw

IMAGE = draw(2, 4, 6, 6)
ROWS = draw(5, 8)
WORDS = torch.tensor([[1, 2, 0], [4, 0, 3]])


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "SyncBatchNorm in evaluation": (lambda: nn.SyncBatchNorm(4).eval(), (IMAGE,)),
    "LSTM of two directions": (
        lambda: nn.LSTM(8, 4, bidirectional=True, batch_first=True, proj_size=2),
        (draw(2, 2, 8),),
    ),
    "AdaptiveLogSoftmax": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], div_value=2.0),
        (ROWS, torch.tensor([0, 9, 4, 2, 7])),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_equals_the_cpu(name):
    make, inputs = MODULES[name]

    def program(*inputs: torch.Tensor) -> Any:
        torch.manual_seed(0)
        module = make().to(inputs[0].device)
        out = module(*inputs)
        leaves = [t for t in torch.utils._pytree.tree_leaves(out) if t.requires_grad]
        if leaves:
            sum((leaf * leaf.detach().cos()).sum() for leaf in leaves).backward()
        gradients = [p.grad for p in module.parameters()]
        return out, [x.grad for x in inputs], gradients, list(module.buffers())

    on_both(program, *inputs)


DROPS = [
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
]


def test_dropouts_drop_the_right_share_of_the_right_things():
    """Elements, or whole channels; gradients use the forward mask; evaluation changes nothing."""
    torch.manual_seed(0)
    shapes = {nn.Dropout1d: (64, 32, 3), nn.Dropout3d: (64, 32, 2, 2, 2)}
    found = []
    for drop in DROPS:
        x = torch.ones(shapes.get(drop, (64, 32, 3, 3)), device="jax", requires_grad=True)
        layer = drop(0.25)
        y = layer(x)
        y.sum().backward()
        results = y, x.grad, layer.eval()(x), layer.train()(x)
        found.append((drop, [one.detach() for one in results]))
    xs.sync()
    for drop, results in found:
        y, grad, evaluated, again = (one.cpu() for one in results)
        kept = y > (0.9 if drop in DROPS[:4] else 0.0)
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.05), drop
        assert ((grad > 0) == kept).all(), drop
        if drop not in (nn.Dropout, nn.AlphaDropout):
            flat = kept.flatten(2).float()
            assert torch.equal(flat.amax(2), flat.amin(2)), f"{drop}: a whole channel is dropped"
        else:
            assert 0 < kept.flatten(1).float().std() < 1, drop
        assert (evaluated == 1).all() and not torch.equal(again, y), drop


def test_rrelu_in_training_and_evaluation():
    torch.manual_seed(0)
    x = torch.full((4096,), -1.0, device="jax", requires_grad=True)
    y = nn.RReLU(0.1, 0.3)(x)
    y.sum().backward()
    assert -0.3 <= y.min().item() < y.max().item() <= -0.1
    close(x.grad, -y.detach().cpu())
    on_both(lambda x: nn.RReLU().eval()(x))


def test_lazy_modules_after_a_run_on_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Tanh())
    want = model(ROWS).detach()
    model.to("jax")
    assert all(isinstance(p, nn.Parameter) and p.device.type == "jax" for p in model.parameters())
    close(model(ROWS.to("jax")), want)


def test_synchronised_batch_norm_over_a_mesh_is_batch_norm(mesh):
    """A mesh is one device: the statistics are always those of the whole batch."""
    x = draw(16, 4)
    want, got = nn.BatchNorm1d(4), nn.BatchNorm1d(4).to("jax")
    expected = want(x)
    close(got(iso.shard(x, mesh, P(("x", "y"), None))), expected)
    close(got.running_var, want.running_var)


# --- Data ----------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Ten labelled rows."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(number)), "y": torch.tensor(number % 3)}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")
def test_batches_of_a_loader_are_moved_to_the_device(mesh):
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, shuffle=False, drop_last=True)
    seen = []
    for batch in loader:
        there = {name: value.to("jax", non_blocking=True) for name, value in batch.items()}
        laid = iso.shard(batch["x"], mesh, P("x", None))
        seen.append((there["x"].sum() + laid.sum() + there["y"].sum()).item())
    assert seen == [2 * 4 * 6 + 3, 2 * 4 * 22 + 4]


def test_a_dataset_of_tensors_on_the_device():
    data = TensorDataset(draw(6, 4).to("jax"), torch.arange(6).to("jax"))
    batches = list(DataLoader(data, batch_size=3))
    assert all(isinstance(x, xs.XLAShardedTensor) for batch in batches for x in batch)
    close(torch.cat([x for x, _ in batches]), draw(6, 4))
    raises_on_both(
        lambda x: nn.Linear(3, 2).to(x.device)(x), match=r"shape|size|reduction dim", grad=False
    )
