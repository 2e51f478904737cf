"""examples/torchrun.py, as its first lines say."""

import os
import re
import subprocess
import sys

from tests.multi_process.ranks import ROOT


def test_torch_and_jax_go_on_from_one_anothers_memory():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
            str(ROOT / "examples" / "torchrun.py"),
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
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
    steps = [after / before for before, after in zip(losses, losses[1:], strict=False)]
    assert len(losses) == 6 and all(0.9 < step < 0.98 for step in steps)
    assert "0 bytes were copied" in done.stdout
