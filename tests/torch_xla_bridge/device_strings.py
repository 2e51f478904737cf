"""The device string `"xla"`, wherever torch takes a device; run under `run-torch-xla`."""

import concurrent.futures
import copy
import io
import pickle
import sys

import jax
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.amp import autocast
from torch_xla.test import test_utils
from torch_xla.utils.checkpoint import checkpoint
from torch_xla.utils.dlpack import from_dlpack, to_dlpack

import isoshard.torch_xla_bridge.torch_xla.core.xla_model

# The very modules of isoshard, under another name.
assert xm is isoshard.torch_xla_bridge.torch_xla.core.xla_model
assert sys.modules["torch_xla"] is torch_xla
assert xm.__name__ == xm.__spec__.name == "isoshard.torch_xla_bridge.torch_xla.core.xla_model"
try:
    import torch_xla.no_such_module
except ModuleNotFoundError as error:
    assert "docs/torch_xla.md" in str(error) and error.name == "torch_xla.no_such_module"
else:
    raise AssertionError("torch_xla.no_such_module was imported")

XLA = torch.device("xla", 0)
cpu = torch.arange(6.0).reshape(2, 3)

MADE = {
    "zeros": lambda: torch.zeros(2, 3, device="xla"),
    "ones": lambda: torch.ones(2, 3, device="xla:0"),
    "empty": lambda: torch.empty(2, device="xla"),
    "rand": lambda: torch.rand(2, device=XLA),
    "arange": lambda: torch.arange(3, device="xla"),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="xla"),
    "as_tensor": lambda: torch.as_tensor(cpu, device="xla"),
    "to": lambda: cpu.to("xla"),
    "to by keyword": lambda: cpu.to(device="xla"),
    "to with a dtype": lambda: cpu.to("xla", torch.bfloat16),
    "to a device": lambda: cpu.to(torch.device("xla")),
    "to another tensor": lambda: cpu.to(torch.zeros(1, device="xla")),
    "from_dlpack": lambda: from_dlpack(torch.arange(16.0)),
    "like": lambda: torch.zeros_like(cpu, device="xla"),
    "new": lambda: torch.zeros(1, device="xla").new_ones(2),
    "to itself": lambda: torch.zeros(1, device="xla").to("xla"),
    "to jax": lambda: torch.zeros(1, device="xla").to("jax"),
    "xla_device": lambda: torch.ones(2, device=xm.xla_device()),
    "linear": lambda: torch.nn.Linear(2, 3, device="xla").weight,
    "module": lambda: torch.nn.Linear(2, 3).to("xla").weight,
    "module by keyword": lambda: torch.nn.Linear(2, 3).to(device=torch.device("xla")).weight,
    "deepcopy": lambda: copy.deepcopy(torch.ones(2, device="xla")),
    "pickle": lambda: pickle.loads(pickle.dumps(torch.ones(2, device="xla"))),
}
for name, make in MADE.items():
    made = make()
    assert made.device == XLA, (name, made.device)
    made.cpu()
    assert str(made.device) == "xla:0"
    assert "device='xla:0'" in repr(made), repr(made)

with torch.device("xla"):
    assert torch.ones(2).device == XLA
torch.set_default_device("xla")
assert torch.nn.Linear(2, 2).weight.device == XLA
torch.set_default_device(None)
assert torch.ones(1).device.type == "cpu"
assert torch.equal(torch.ones(2, 3, device="xla").cpu(), torch.ones(2, 3))
assert torch.ones(2, device="xla").to("cpu").device.type == "cpu"
assert (torch.ones(2, device="xla") + torch.ones(2, device="jax")).sum().item() == 4

x = torch.randn(4, 4, device="xla", requires_grad=True)
with torch.autocast("xla", dtype=torch.bfloat16):
    assert (x @ x).dtype == torch.bfloat16
with torch.amp.autocast("xla", dtype=torch.bfloat16, enabled=False):
    assert (x @ x).dtype == torch.float32


def in_autocast():
    with torch.autocast("xla"):
        large = torch.full((2, 2), 300.0, device="xla")
        return (large @ large).dtype, torch.get_autocast_dtype("xla")


with concurrent.futures.ThreadPoolExecutor(1) as threads:  # torch keeps the dtype by thread
    for found in (in_autocast(), threads.submit(in_autocast).result(), in_autocast()):
        assert found == (torch.bfloat16, torch.bfloat16), found
    torch.set_autocast_dtype("xla", torch.float16)
    assert in_autocast() == (torch.float16, torch.float16)
    assert threads.submit(in_autocast).result() == (torch.bfloat16, torch.bfloat16)
    torch.set_autocast_dtype("xla", torch.bfloat16)
y = torch.utils.checkpoint.checkpoint(lambda t: (t @ t).sin(), x, use_reentrant=False)
with autocast(torch_xla.device(), dtype=torch.bfloat16):
    (y.sum() + checkpoint(lambda t: t @ t, x).sum()).backward()
assert x.grad.device == XLA

mesh = xs.Mesh(range(xr.global_runtime_device_count()), (1, 1), ("x", "y"))
t = torch.ones(4, 2, device="xla")
assert xs.mark_sharding(t, mesh, (0, None)).partition_spec == (0, None)
assert xs.mark_sharding(t, mesh, ("x", None)).partition_spec == ("x", None)
assert t.t().partition_spec == jax.sharding.PartitionSpec(None, "x")
assert (t + 1).partition_spec is None
xs.clear_sharding(t)
assert t.partition_spec is None

for name in ("add", "div"):  # torch_xla moves a CPU operand
    operation, ours, theirs = (
        getattr(torch, name),
        torch.tensor([6.0, 8.0]),
        torch.tensor([2.0, 3.0]),
    )
    for mixed in (operation(ours.to("xla"), theirs), operation(ours, theirs.to("xla"))):
        assert mixed.device == XLA and torch.equal(mixed.cpu(), operation(ours, theirs)), name

try:
    torch.ones(2, device="xla") @ torch.ones(2)
except RuntimeError as error:
    assert "one on xla:0 and one on cpu" in str(error) and ".to('xla')" in str(error), error
else:
    raise AssertionError("a product with a CPU tensor was computed")

torch.manual_seed(7)
first = torch.rand(3, device="xla")
torch.manual_seed(7)
assert torch.equal(first.cpu(), torch.rand(3, device="xla").cpu())

file = io.BytesIO()
torch.save({"w": torch.arange(3.0, device="xla")}, file)
for place, want in ((None, XLA), ("xla", XLA), ("xla:0", XLA), ("cpu", torch.device("cpu"))):
    file.seek(0)
    loaded = torch.load(file, map_location=place)["w"]
    assert loaded.device == want and loaded.tolist() == [0, 1, 2], (place, loaded)

assert str(torch_xla.device()) == "xla:0" == str(xm.xla_device()) == str(torch_xla.device(0))
assert xm.get_xla_supported_devices() == ["xla:0"] and xm.xla_real_devices() == ["CPU:0"]
assert torch_xla._XLAC._xla_get_default_device() == "xla:0"
assert xm.xla_device_hw("xla:0") == "CPU" and xm.get_memory_info("xla")["bytes_used"] > 0
xm.set_rng_state(5, device="xla:0")
assert xm.get_rng_state(device="xla") == 5
sent = xm.send_cpu_data_to_device(cpu, "xla")[0]
assert sent.device == XLA and torch.utils.dlpack.from_dlpack(to_dlpack(sent))[1, 2] == 5
test_utils.print_training_update(XLA, 3, 0.5, 1.0, 1.0)

model = torch.nn.Linear(3, 2).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
model(cpu.to("xla")).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
xm.mark_step()
print("every string is understood")
