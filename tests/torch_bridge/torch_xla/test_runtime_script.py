"""A script with torch_xla's own imports that uses the whole runtime: devices are `xla:0` there."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import io, sys
import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.test.test_utils as test_utils
import torch_xla.utils.utils as xu
from torch_xla import backends
from torch_xla._internal import tpu
from torch_xla.amp import autocast, syncfree
from torch_xla.utils.checkpoint import checkpoint
from torch_xla.utils.dlpack import from_dlpack, to_dlpack

xr.use_spmd()
assert xr.is_spmd() and xr.world_size() == xr.global_device_count() == 1
assert xr.global_runtime_device_count() == 8 and xr.device_type() == "CPU"
device = torch_xla.device()
assert str(device) == "xla:0" == str(xm.xla_device()) == str(torch_xla.device(2))
assert xm.get_xla_supported_devices() == ["xla:0"] and xm.xla_real_devices() == ["CPU:0"]
assert torch_xla.real_devices() == [f"CPU:{n}" for n in range(8)]
assert xm.xla_device_hw(device) == "CPU" and tpu.num_available_chips() == 0
assert torch_xla._XLAC._xla_get_default_device() == "xla:0"

mesh = xs.Mesh(np.arange(8), (8, 1), ("data", "model"))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
).to(device)
optimizer = syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)
tracker = xm.RateTracker()
losses = []
loader = xu.SampleGenerator((torch.randn(16, 16), torch.randint(0, 4, (16,))), 6)
server = xp.start_server(xu.get_free_tcp_ports()[0])

@torch_xla.compile(full_graph=True)
def train(data, target):
    optimizer.zero_grad()
    with autocast(device, dtype=torch.bfloat16):
        output = checkpoint(model, data)
    loss = torch.nn.functional.cross_entropy(output.float(), target)
    loss.backward()
    xm.optimizer_step(optimizer)
    return loss.detach()

for step, batch in enumerate(loader):
    data, target = xm.send_cpu_data_to_device(batch, device, xs.ShardingSpec(mesh, ("data", None)))
    assert xm.is_xla_tensor(data) and str(data.device) == "xla:0"
    with xp.StepTrace("train", step_num=step):
        loss = train(data, target)
    tracker.add(16)
    xm.add_step_closure(lambda loss: losses.append(loss.item()), args=(loss,))
    xm.mark_step()
assert len(losses) == 6 and losses[-1] < losses[0], losses
test_utils.print_training_update(device, step, losses[-1], tracker.rate(), tracker.global_rate())
assert "xla:0" in repr(loss)

with torch_xla.step():
    state = xm.get_rng_state()
    first = torch.rand(4, device=device)
xm.set_rng_state(state, device="xla:0")
assert torch.equal(first, torch.rand(4, device="xla"))

assert met.counter_value("UncachedCompile") >= 2 and met.counter_value("CachedCompile") >= 1
assert met.metric_data("ExecuteReplicatedTime")[0] >= 6
assert "Counter: MarkStep" in met.metrics_report()

file = io.BytesIO()
xm.save(model.state_dict(), file)
file.seek(0)
assert all(t.device.type == "cpu" for t in torch.load(file).values())

shared = from_dlpack(torch.arange(16.0))
assert str(shared.device) == "xla:0"
assert torch.utils.dlpack.from_dlpack(to_dlpack(shared))[3] == 3

x = torch.ones(8, 8).to(device)
xs.mark_sharding(x, mesh, ("data", None))
assert torch_xla._XLAC._get_xla_sharding_spec(x) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
assert "devices=[8,1]0,1,2,3,4,5,6,7" in torch_xla._XLAC._get_xla_tensors_hlo([x @ x])
assert "stablehlo.dot_general" in xm.get_stablehlo([x @ x])
backends.set_mat_mul_precision("highest")
assert xm.get_memory_info(device)["bytes_used"] > 0
assert torch.equal(xm.all_reduce(xm.REDUCE_SUM, x), x) and xm.rendezvous("done") == [b""]

dist.init_process_group("gloo", init_method="xla://")
assert dist.get_world_size() == 1
for refused in (lambda: xmp.spawn(train, nprocs=8), lambda: torch_xla.launch(train)):
    try:
        refused()
    except (ValueError, NotImplementedError) as error:
        print(type(error).__name__)
print("losses fell")
"""


def test_a_script_that_uses_the_whole_runtime(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-m", "isoshard", "run-torch-xla", str(script)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    line, *rest = done.stdout.splitlines()
    assert line.startswith("| Training Device=xla:0/0 Step=5 Loss=")
    assert [text for text in rest if "Gloo" not in text] == [
        "ValueError",
        "NotImplementedError",
        "losses fell",
    ]
