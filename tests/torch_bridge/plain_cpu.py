"""What plain CPU torch does, as text: run with and without `isoshard.torch_bridge` imported.

    python plain_cpu.py [--import] [NAME ..]

Each idiom is a function; what it returns, the class and message of what it raises, and its warnings
are printed as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings

if __name__ == "__main__" and "--import" in sys.argv:
    import isoshard.torch_bridge  # noqa: F401
import torch
from torch import nn

IDIOMS = {}


def idiom(function):
    """Put a function on the list."""
    IDIOMS[function.__name__] = function
    return function


def data():
    return torch.arange(12.0).reshape(4, 3)


def learner():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def step(model, x=None):
    """The loss and the gradients of a step."""
    loss = model(data() if x is None else x).square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return loss.item(), [None if g is None else g.abs().sum().item() for g in grads]


class Rows(torch.utils.data.Dataset):
    """Four rows."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return data()[i], i


def loaded(**options):
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, **options)
    return [(x.tolist(), i.tolist(), x.is_pinned()) for x, i in loader]


@idiom
def loader_that_pins():
    return loaded(pin_memory=True)


@idiom
def loader_with_forked_workers():
    return loaded(num_workers=1, multiprocessing_context="fork")


@idiom
def pinned_tensor():
    return data().pin_memory().is_pinned()


@contextlib.contextmanager
def group(**options):
    """A process group of one."""
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group(store=store, rank=0, world_size=1, **options)
    try:
        yield distributed
    finally:
        distributed.destroy_process_group()


@idiom
def data_parallel():
    return step(nn.DataParallel(learner()))


@idiom
def distributed_data_parallel():
    with group():
        return step(nn.parallel.DistributedDataParallel(learner()))


@idiom
def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    with group():
        model = learner()
        fully_shard(model)
        loss = model(data()).square().mean()
        loss.backward()
        return loss.item(), str(model[0].weight.device_mesh)


@idiom
def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with group():
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(data(), mesh, [Shard(0)])
        return str((x @ x.T).placements), (x @ x.T).full_tensor().tolist()


@idiom
def which_accelerator():
    asked = torch.accelerator
    return (
        str(asked.current_accelerator()),
        str(asked.current_accelerator(check_available=True)),
        asked.is_available(),
        asked.device_count(),
        torch.get_device_module().__name__,
    )


def _refusals(names):
    said = {}
    for name in names:
        try:
            said[name] = str(getattr(torch.accelerator, name)())
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@idiom
def questions_to_the_accelerator():
    return _refusals(
        (
            *("current_device_index", "synchronize", "current_stream", "empty_cache"),
            *("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"),
            *("reset_peak_memory_stats", "get_memory_info"),
        )
    )


@idiom
def streams_of_the_cpu():
    return torch.Stream(device="cpu").device.type, torch.cpu.current_stream().__class__.__name__


@idiom
def compiled_eagerly():
    torch._dynamo.reset()
    return step(torch.compile(learner(), backend="aot_eager", fullgraph=True))


@idiom
def profiled():
    with torch.profiler.profile() as profile:
        step(learner())
    names = {event.key for event in profile.key_averages()}
    columns = profile.key_averages().table(row_limit=1).splitlines()[1].split("  ")
    return sorted(name for name in names if name.startswith("aten::")), columns


@idiom
def autocast():
    with torch.autocast("cpu"):
        y = learner()(data())
    return str(y.dtype), y.float().tolist(), str(torch.get_autocast_dtype("cpu"))


@idiom
def scaled_gradients():
    scaler, model = torch.amp.GradScaler("cpu"), learner()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(data()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), model(data()).tolist()


@idiom
def random_states():
    torch.manual_seed(3)
    with torch.random.fork_rng():
        inside = torch.rand(2).tolist()
    generator = torch.Generator().manual_seed(1)
    return inside, torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist()


@idiom
def on_meta():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.to_empty(device="cpu")
    return str(model.weight.device), str(torch.get_default_device())


def told(function):
    """What an idiom does, as text."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            said = str(function())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said, sorted({f"{w.category.__name__}: {w.message}" for w in caught})


if __name__ == "__main__":
    names = [arg for arg in sys.argv[1:] if not arg.startswith("-")] or list(IDIOMS)
    results = {name: told(IDIOMS[name]) for name in names}
    print(json.dumps(results))
