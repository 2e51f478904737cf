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
import tempfile
import warnings
from pathlib import Path

if __name__ == "__main__" and "--import" in sys.argv:
    import isoshard.torch_bridge  # noqa: F401
import torch
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F

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
def loader_with_spawned_workers():
    return loaded(num_workers=1, multiprocessing_context="spawn", pin_memory=True)


@idiom
def pinned_tensor():
    return data().pin_memory().is_pinned()


@idiom
def pinned_factory():
    try:
        torch.ones(2, pin_memory=True)
    except RuntimeError:  # the words differ: the allocator that is asked is another
        return "refused"


def _doubled(x, results):
    results.put((x * 2).tolist())


def _child(method):
    context = torch.multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_doubled, args=(data(), results))
    child.start()
    try:
        return results.get(timeout=60)
    finally:
        child.join(60)
        child.kill()


@idiom
def forked_child():
    return _child("fork")


@idiom
def spawned_child():
    return _child("spawn")


@idiom
def shared_memory():
    x = data().share_memory_()
    return x.is_shared(), x.tolist()


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
def group_with_the_default_backend():
    with group() as distributed:
        x = data()
        distributed.all_reduce(x)
        gathered = [None]
        distributed.all_gather_object(gathered, {"a": 1})
        distributed.barrier()
        backend = distributed.get_backend(), str(distributed.get_backend_config())
        return backend, x.tolist(), gathered


@idiom
def group_with_gloo():
    with group(backend="gloo") as distributed:
        x = data()
        distributed.broadcast(x, 0)
        return distributed.get_backend(), x.tolist()


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
def fully_sharded_the_older_way():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with group():
        return step(FullyShardedDataParallel(learner()))


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
def compiled_by_inductor():
    torch._dynamo.reset()
    model = learner()
    return step(torch.compile(model))


@idiom
def compiled_eagerly():
    torch._dynamo.reset()
    return step(torch.compile(learner(), backend="aot_eager", fullgraph=True))


@idiom
def exported():
    program = torch.export.export(learner().eval(), (data(),))
    return str(program.graph), program.module()(data()).tolist()


@idiom
def scripted():
    return step(torch.jit.script(learner()))


@idiom
def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step(torch.jit.trace(learner(), data()))


@idiom
def fx():
    graph = torch.fx.symbolic_trace(learner())
    made = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(data())
    return str(graph.graph), str(made.graph), step(graph)


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
def scaled_by_default():
    return torch.amp.GradScaler().is_enabled()


@idiom
def recomputed():
    model = learner()
    run = torch.utils.checkpoint.checkpoint
    return step(lambda_module(lambda x: run(model, x, use_reentrant=False), model))


def lambda_module(function, holder):
    """A module that runs a function."""

    class Ran(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = holder

        def forward(self, x):
            return function(x)

    return Ran()


@idiom
def every_optimizer():
    losses = {}
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Rprop"):
        model = learner()
        optimizer = getattr(torch.optim, name)(model.parameters())
        step(model)
        optimizer.step()
        losses[name] = model(data()).sum().item()
    return losses


@idiom
def clipped():
    model = learner()
    step(model)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()


@idiom
def random_states():
    torch.manual_seed(3)
    with torch.random.fork_rng():
        inside = torch.rand(2).tolist()
    generator = torch.Generator().manual_seed(1)
    return inside, torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist()


@idiom
def saved():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        torch.save({"model": learner().state_dict(), "x": data()}, path)
        back = torch.load(path)
        mapped = torch.load(path, map_location="cpu", mmap=True)
    return back["x"].tolist(), sorted(mapped["model"]), str(back["x"].device)


@idiom
def transforms():
    from torch import func

    model = learner()
    params = dict(model.named_parameters())
    one = func.vmap(func.grad(lambda x: func.functional_call(model, params, (x,)).sum()))(data())
    hessian = func.hessian(lambda x: x.sin().sum())(torch.ones(2))
    return one.tolist(), hessian.tolist()


@idiom
def attention():
    q = torch.linspace(0, 1, 48).reshape(1, 2, 4, 6)
    heads = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    nn.init.constant_(heads.in_proj_weight, 0.1)
    nn.init.constant_(heads.out_proj.weight, 0.1)
    with torch.no_grad():
        x, _ = heads(q[0, :, :, :4], q[0, :, :, :4], q[0, :, :, :4])
    return F.scaled_dot_product_attention(q, q, q).sum().item(), x.sum().item()


@idiom
def other_tensors():
    nested = torch.nested.nested_tensor([data(), data()[:2]], layout=torch.jagged)
    sparse = data().to_sparse()
    quantized = torch.quantize_per_tensor(data(), 0.1, 0, torch.qint8)
    return nested.sum().item(), sparse.sum().item(), quantized.dequantize().sum().item()


@idiom
def on_meta():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.to_empty(device="cpu")
    return str(model.weight.device), str(torch.get_default_device())


@idiom
def timed():
    return torch.utils.benchmark.Timer("x + 1", globals={"x": data()}).timeit(2).number_per_run


@idiom
def hooks_and_anomalies():
    found = []
    x = data().requires_grad_()
    x.register_hook(lambda grad: found.append(grad.sum().item()))
    with torch.autograd.set_detect_anomaly(True):
        x.exp().sum().backward()
    return found


@idiom
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        return torch.empty(2).tolist()[0] != 0, data().index_add(0, torch.tensor([0]), data()[:1])
    finally:
        torch.use_deterministic_algorithms(False)


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
    import torch.fx.experimental.proxy_tensor
    import torch.utils.benchmark
    import torch.utils.checkpoint

    names = [arg for arg in sys.argv[1:] if not arg.startswith("-")] or list(IDIOMS)
    results = {name: told(IDIOMS[name]) for name in names}
    print(json.dumps(results))
