"""The compilation cache on disk, across processes."""

import os
import subprocess
import sys

import pytest

import isoshard as iso

PROGRAM = """
import os, sys
import isoshard as iso, isoshard.torch_bridge as xs, torch

def run():
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

for _ in range(2):  # two processes, which share what they import
    if os.fork() == 0:
        run()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_second_process_compiles_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "xla")],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (compiled, hits, first), (again, hits_again, second) = (
        line.split(" ", 2) for line in done.stdout.splitlines()
    )
    assert int(compiled) >= 1 and hits == "0"
    assert second == first
    assert hits_again == again == compiled


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        iso.compilation_cache(tmp_path / "file" / "cache")
