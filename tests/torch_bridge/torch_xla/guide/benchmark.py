"""Times of tracing and of whole steps, and the metrics that tell why a step is slow."""

import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from _models import image_loss, images, resnet, started

device = torch_xla.device()
pictures, classes = (t.to(device) for t in images(4))
model = started(resnet, device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch_xla.sync()
met.clear_all()


def programs():
    data = met.metric_data("CompileTime")
    return 0 if data is None else data[0]


tracing, whole, compiled, losses = [], [], [], []
for _ in range(5):
    begin = time.perf_counter()
    optimizer.zero_grad()
    loss = image_loss(model, pictures, classes)
    loss.backward()
    optimizer.step()
    traced = time.perf_counter()
    torch_xla.sync()
    xm.wait_device_ops()
    end = time.perf_counter()
    tracing.append(traced - begin)
    whole.append(end - begin)
    compiled.append(programs())
    losses.append(loss.item())
assert all(0 < part < total for part, total in zip(tracing, whole, strict=True))
assert compiled == [1] * 5  # the first step compiles, the others find its program
assert min(whole[1:]) < whole[0]
assert losses == sorted(losses, reverse=True)

for rows in (4, 4, 6, 6):  # another shape is another program
    with torch.no_grad():
        model(torch.randn(rows, 3, 16, 16).to(device))
    torch_xla.sync(wait=True)
assert programs() == 3
assert "CompileTime" in met.metrics_report() and "CompileTime" in met.short_metrics_report()
assert not [name for name in met.counter_names() if name.startswith("aten::")]
