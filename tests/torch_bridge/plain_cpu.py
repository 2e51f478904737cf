"""What plain CPU torch does, as text: with and without `isoshard.torch_bridge` imported.

Each idiom is a function; what it returns, the class and message of what it raises, and its warnings
are told. The program imports torch, runs each function of `APART` in a fork, and prints as JSON
what they return.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import operator
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import jax  # once for all forks
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
def distributed_data_parallel():
    with group():
        return step(nn.parallel.DistributedDataParallel(learner()))


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
    return step(torch.compile(learner(), backend="eager", fullgraph=True))


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


@idiom
def scripted():
    def converted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(1.0)

    def force(x: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad([(x * x).sum()], [x])[0]
        assert found is not None
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against scripts
        functions = [torch.jit.script(converted), torch.jit.script(force)]
    return [function(data().requires_grad_()).tolist() for function in functions]


def told(function):
    """What an idiom does, as text."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            said = str(function())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said, sorted({f"{w.category.__name__}: {w.message}" for w in caught})


def idioms():
    return {name: told(run) for name, run in IDIOMS.items()}


def idioms_beside_the_bridge():
    importlib.import_module("isoshard.torch_bridge")
    return idioms()


CHECKPOINT = Path(tempfile.mkdtemp()) / "model.pt"


def loaded_without_the_bridge():
    sys.modules["isoshard"] = sys.modules["jax"] = None
    state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
    return {name: list(value.shape) for name, value in state.items()}


class Turned(torch.autograd.Function):
    """The identity, with seven times its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def first_import():
    """What importing isoshard after torch leaves alone, and what follows it; saves `CHECKPOINT`."""
    from torch import distributed

    sys.path.pop(0)  # this folder has one named torch_xla
    early, backend = Turned.apply, distributed.Backend
    isoshard = importlib.import_module("isoshard")
    importlib.import_module("isoshard.torch_bridge")
    loads_dynamo = "torch._dynamo" in sys.modules
    importlib.import_module("isoshard.torch_xla_bridge.drop_in")
    assert not any("torch_bridge.torch_xla" in name for name in sys.modules)
    assert "xla" not in backend.backend_list
    torch_xla = importlib.import_module("isoshard.torch_xla_bridge.torch_xla")
    assert "isoshard.torch_xla_bridge.torch_xla.runtime" not in sys.modules
    assert "xla" in backend.backend_list
    assert backend.default_device_backend_map["cpu"] == "gloo"
    for path in (
        *("runtime.world_size", "core.xla_model.mark_step", "debug.metrics.metrics_report"),
        *("distributed.xla_multiprocessing.spawn", "utils.utils.timed", "amp.autocast"),
        *("tpu.num_available_chips", "_XLAC._get_xla_sharding_spec"),
    ):
        operator.attrgetter(path)(torch_xla)
    assert torch.ones(1, device="jax").device.type == "jax"
    assert "torch_xla" not in sys.modules

    def told(function):
        try:
            return repr(function())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    refused = [
        told(lambda: torch_xla.nothing),
        told(lambda: __import__("torch_xla")),
        told(lambda: torch.ones(1).to("xla")),
    ]
    of_early = float(jax.grad(isoshard.jax_function(early))(1.0))
    x = torch.ones((), requires_grad=True)
    early(x).backward()
    torch.save(nn.Linear(3, 2).to("jax").state_dict(), CHECKPOINT)
    return loads_dynamo, refused, of_early, x.grad.item()


def backend_by_its_name():
    """Dynamo knows the backend, and imports the bridge once it is used."""
    known, before = "isoshard" in torch.compiler.list_backends(), "isoshard" in sys.modules
    function = torch.compile(lambda x: x + 1, backend="isoshard")
    after = "isoshard.torch_bridge" in sys.modules
    return known, before, after, function(torch.ones(2, device="jax")).tolist()


OLD_USES = (
    "isoshard.torch_bridge.mark_sharding",
    "isoshard.jax_function",
    "isoshard.to_jax(torch.ones(3))",
    "isoshard.sharding_of(torch.nn.ReLU())",
    "isoshard.to_torch(isoshard.to_jax(__import__('numpy').ones(3, 'f4')))",
    "isoshard.torch_bridge.compilee",
)


def with_an_old_torch():
    torch.__version__ = "2.9.0"
    names = {"torch": torch, "isoshard": importlib.import_module("isoshard")}
    said = {}
    for use in OLD_USES:
        try:
            said[use] = repr(eval(use, names))
        except Exception as error:
            said[use] = str(error)
    importlib.import_module("isoshard.torch_xla_bridge.torch_xla_backend")
    engine = [name for name in sys.modules if "torch_bridge.engine" in name]
    device = torch._C._get_privateuse1_backend_name()
    return said, (device, engine, "torch_xla" in sys.modules)


def with_narrow_integers():
    os.environ["XLA_USE_32BIT_LONG"] = "1"
    iso = importlib.import_module("isoshard")
    iso.simulate_devices(2)
    importlib.import_module("isoshard.torch_bridge")
    x = torch.arange(3, device="jax")
    assert x.dtype == torch.int64
    assert torch.tensor([2**31 - 1, -(2**31)], device="jax").tolist() == [2**31 - 1, -(2**31)]
    assert iso.to_jax(x, dtype="int32", copy=False).dtype == "int32"
    assert (torch.ones(2, dtype=torch.float64, device="jax") / 3)[0].item() == 1 / 3
    said = []
    for make in (lambda: torch.tensor([2**40], device="jax"), lambda: x + 2**40):
        try:
            said.append(repr(make()))
        except OverflowError as error:
            said.append(str(error))
    return said


APART = (
    first_import,
    loaded_without_the_bridge,
    with_an_old_torch,
    idioms,
    with_narrow_integers,
    idioms_beside_the_bridge,
    backend_by_its_name,
)


def apart(run):
    """What a function returns in a fork of this process, or what it raises, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = json.dumps(run())
        except BaseException:
            text = json.dumps(traceback.format_exc())
        with os.fdopen(writing, "w") as file:
            file.write(text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = json.loads(file.read())
    os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    results = {}
    for function in APART:
        if function is idioms:  # what the others take seconds to import
            importlib.import_module("torch.distributed.tensor")
            with torch.no_grad():  # a backward pass may start threads, which no fork has
                torch.compile(learner(), backend="eager")(data())
        results[function.__name__] = apart(function)
    print(json.dumps(results))
