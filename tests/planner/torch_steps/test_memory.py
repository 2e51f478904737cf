"""A model on "meta" is planned without allocating its weights."""

import resource

from tests import fresh

LARGE = """
import resource, torch
from isoshard import Plan
from isoshard.core.frameworks import require
from isoshard.planner.machine.topologies import topology

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(65536, 65536) for _ in range(8)])
adam = torch.optim.AdamW(model.parameters())

def step(x):
    adam.zero_grad()
    model(x).square().mean().backward()
    adam.step()

mesh = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
x = torch.empty(65536, 65536, device="meta")
require("torch").traced_step(torch.nn.Linear(2, 2, device="meta"), (x[:2, :2],), {}, mesh, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = require("torch").traced_step(step, (x,), {}, mesh, Plan.fsdp("data"))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
weights = sum(leaf.bytes for leaf in trace.inputs)
assert weights > 400e9, weights
assert grown < 0.1, grown
"""


def test_no_weights_are_allocated(tmp_path):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes here
    done = fresh.run(LARGE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
