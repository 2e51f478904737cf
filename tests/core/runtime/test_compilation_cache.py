"""The compilation cache on disk, across processes."""

import pytest

import isoshard as iso
from tests import fresh

PROGRAM = """
import sys
import isoshard as iso, isoshard.torch_bridge as xs, torch

iso.simulate_devices(4)
iso.compilation_cache(sys.argv[1])
mesh = iso.make_mesh((4,), ("data",))
torch.manual_seed(0)
plan = iso.Plan([("weight", iso.P(None, "data"))], default=iso.P())
model = iso.shard(torch.nn.Linear(8, 4), mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@xs.compile
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

x = torch.ones(4, 8).to("jax")
losses = [step(x).item() for _ in range(2)]
counted = iso.metrics.counters()
print(counted["compilations"], counted["cache_hits"], losses, flush=True)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    said = []
    for _ in range(2):
        done = fresh.run(PROGRAM, [str(tmp_path / "xla")], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip().split(" ", 2))
    (compiled, hits, first), (again, hits_again, second) = said
    assert int(compiled) >= 1 and hits == "0"
    assert second == first
    assert hits_again == again == compiled


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        iso.compilation_cache(tmp_path / "file" / "cache")
