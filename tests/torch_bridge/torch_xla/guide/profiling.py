"""Times of tracing and of whole steps, metrics that tell why, and a profile of some steps."""

import pathlib
import tempfile
import threading
import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.utils.utils as xu
from _models import image_loss, images, resnet, started

device = torch_xla.device()
pictures, classes = (t.to(device) for t in images(4))
model = started(resnet, device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch_xla.sync()
met.clear_all()


def update():
    with xp.Trace("forward_and_backward"):
        optimizer.zero_grad()
        loss = image_loss(model, pictures, classes)
        loss.backward()
    optimizer.step()
    return loss


def programs():
    data = met.metric_data("CompileTime")
    return 0 if data is None else data[0]


tracing, whole, compiled, losses = [], [], [], []
for _ in range(3):
    begin = time.perf_counter()
    loss = update()
    traced = time.perf_counter()
    torch_xla.sync()
    xm.wait_device_ops()
    end = time.perf_counter()
    tracing.append(traced - begin)
    whole.append(end - begin)
    compiled.append(programs())
    losses.append(loss.item())
assert all(0 < part < total for part, total in zip(tracing, whole, strict=True))
assert compiled == [1] * 3  # the first step compiles, the others find its program
assert min(whole[1:]) < whole[0]
assert losses == sorted(losses, reverse=True)
for rows in (4, 4, 6):  # another shape is another program
    with torch.no_grad():
        model(torch.randn(rows, 3, 8, 8).to(device))
    torch_xla.sync(wait=True)
assert programs() == 3
assert "CompileTime" in met.metrics_report() and "CompileTime" in met.short_metrics_report()
assert not [name for name in met.counter_names() if name.startswith("aten::")]

(port,) = xu.get_free_tcp_ports()
assert xp.start_server(port) is not None
with tempfile.TemporaryDirectory() as folder:
    before = threading.active_count()
    xp.trace_detached(f"localhost:{port}", folder, duration_ms=1000)
    number = 0
    while number < 2 or threading.active_count() > before:  # until the profile is written
        with xp.StepTrace("train_resnet", step_num=number):
            update()
        number += 1
    (written,) = pathlib.Path(folder).rglob("*.xplane.pb")
    content = written.read_bytes()
    assert b"train_resnet" in content and b"forward_and_backward" in content
