"""examples/torchrun.py, as its first lines say, in two ranks."""

import os
import re
import subprocess
import sys

import jax
import torch

from tests.multi_process.ranks import ROOT
from tools.harness.xla_flags import quick_variables


def test_torch_and_jax_go_on_from_one_anothers_memory():
    quick = quick_variables(jax.__version__, os.environ.get("XLA_FLAGS", ""))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            str(ROOT / "examples" / "torchrun.py"),
        ],
        env={**os.environ, **quick, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert re.findall(r"^(torch|JAX)", done.stdout, re.M) == [
        *("torch", "torch", "JAX", "JAX", "torch", "torch")
    ]
    torch.testing.assert_close(losses, _by_torch_alone(), rtol=0, atol=2e-5)
    assert "0 bytes were copied" in done.stdout


def _by_torch_alone():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
    batch, losses = torch.randn(64, 32), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(6):
        optimizer.zero_grad()
        loss = (net(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
