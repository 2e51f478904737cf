"""Lightning's Trainer and Fabric with `accelerator="jax"`, and on a mesh, as on the CPU."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
from isoshard import P
from isoshard.torch_bridge.trainers import DeviceChoiceWarning
from isoshard.torch_bridge.trainers.lightning_plan import plan_strategy

pytest.importorskip("lightning.fabric")
lightning = pytest.importorskip("lightning")
pl = pytest.importorskip("lightning.pytorch")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("default::isoshard.torch_bridge.trainers.DeviceChoiceWarning"),
]


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
        )
        self.seen = []

    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.seen.append(loss.detach())
        self.layout = getattr(x, "partition_spec", None)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, 8, generator=generator) for _ in range(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def trained(**options):
    model = Model()
    trainer = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader())
    return model, [one.item() for one in model.seen]


@pytest.fixture(scope="module")
def on_the_cpu():
    return trained(accelerator="cpu")[1]


def test_the_device_by_name(on_the_cpu):
    model, losses = trained(accelerator="jax")
    assert losses == pytest.approx(on_the_cpu, rel=1e-5)
    assert model.seen[0].device.type == "jax"


def test_on_a_mesh(on_the_cpu):
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    strategy = plan_strategy(mesh, iso.Plan.fsdp("model", min_bytes=0))
    model, losses = trained(accelerator="jax", strategy=strategy)
    assert losses == pytest.approx(on_the_cpu, rel=1e-5) and model.layout == P("data")


def test_fabric(on_the_cpu):
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    for strategy in (
        "auto",
        plan_strategy(mesh, iso.Plan.fsdp("model", min_bytes=0), package="lightning.fabric"),
    ):
        fabric = lightning.fabric.Fabric(accelerator="jax", strategy=strategy)
        model = Model().net
        net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for x, y in fabric.setup_dataloaders(loader()):
            loss = torch.nn.functional.mse_loss(net(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == pytest.approx(on_the_cpu, rel=1e-5)


def test_the_cpu_is_not_chosen_without_a_word():
    with pytest.warns(DeviceChoiceWarning, match='pass accelerator="jax"'):
        pl.Trainer(logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="the jax device is one"):
        pl.Trainer(accelerator="jax", devices=2, logger=False, enable_checkpointing=False)
