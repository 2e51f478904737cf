"""A profile of some steps, taken by a server in this process while it trains."""

import pathlib
import tempfile
import threading
import time

import torch
import torch_xla
import torch_xla.debug.profiler as xp
import torch_xla.utils.utils as xu
from _models import image_loss, images, resnet, started

device = torch_xla.device()
pictures, classes = (t.to(device) for t in images(4))
model = started(resnet, device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def update():
    with xp.Trace("forward_and_backward"):
        optimizer.zero_grad()
        loss = image_loss(model, pictures, classes)
        loss.backward()
    optimizer.step()
    return loss


first = update().item()  # compiled before the profile begins
(port,) = xu.get_free_tcp_ports()
assert xp.start_server(port) is not None
with tempfile.TemporaryDirectory() as folder:
    before = threading.active_count()
    xp.trace_detached(f"localhost:{port}", folder, duration_ms=1000)
    end = time.monotonic() + 1.2
    number = 0
    while time.monotonic() < end:
        with xp.StepTrace("train_resnet", step_num=number):
            loss = update()
        number += 1
    while threading.active_count() > before:  # the profile is being written
        time.sleep(0.05)
    (written,) = pathlib.Path(folder).rglob("*.xplane.pb")
    content = written.read_bytes()
    assert b"train_resnet" in content and b"forward_and_backward" in content
    with tempfile.TemporaryDirectory() as other:
        xp.start_trace(other)
        update()
        torch_xla.sync(wait=True)
        xp.stop_trace()
        assert list(pathlib.Path(other).rglob("*.xplane.pb"))
assert loss.item() < first
