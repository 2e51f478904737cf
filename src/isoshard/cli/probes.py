"""What works on this machine, found out by doing it.

A probe runs one real thing end to end and returns a sentence about what it saw, or raises.
`run` turns either into a `Result`; `survey.py` runs many of them in a process that may die.

>>> PROBES["exchange"].needs
('torch',)
>>> run("shard").status
'works'
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import isoshard as iso
from isoshard.core.errors import PrivateNameError
from isoshard.core.installation import install_command
from isoshard.core.runtime import nvidia
from isoshard.core.runtime.private_names import TRIED

from .packages import outside_tried, torch_tpu_warning, tried_versions

WORKS, MISSING, FAILS = "works", "missing", "fails"
_EXTRA = {
    "torch": "torch",
    "flax": "flax",
    "optax": "flax",
    "tensorstore": "checkpoint",
    "onnx": "onnx",
    "matplotlib": "demo",
}
_REPORT = "report it with the output of: isoshard doctor --json"


class Unavailable(Exception):
    """What the probe looks for is not on this machine; nothing is broken.

    Args:
        reason: why.
        fix: what would add it; empty if nothing does.
    """

    def __init__(self, reason: str, fix: str = ""):
        """See the class."""
        super().__init__(reason)
        self.fix = fix


@dataclasses.dataclass(frozen=True)
class Probe:
    """One thing to try.

    Attributes:
        title: what is tried, in a user's words.
        needs: modules that have to be installed for it.
        fix: what to do when it fails.
        run: tries it; returns a sentence, or a sentence and facts for `--json`.
    """

    title: str
    needs: tuple[str, ...]
    fix: str
    run: Callable[[], str | tuple[str, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """How one probe ended.

    Attributes:
        name: key of the probe in `PROBES`.
        status: "works", "missing" (not installed, or not on this machine) or "fails".
        detail: what was seen, or the reason.
        fix: what to do about it; empty when it works.
        seconds: how long it took.
        facts: what the probe measured.
    """

    name: str
    status: str
    detail: str
    fix: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(name: str) -> Result:
    """Run one probe in this process.

    Args:
        name: key of the probe in `PROBES`.

    Returns:
        Its result; an exception of the probe is its result, too.
    """
    probe, start = PROBES[name], time.perf_counter()
    absent = [module for module in probe.needs if importlib.util.find_spec(module) is None]
    if absent:
        extras = sorted({_EXTRA[module] for module in absent})
        detail = f"{' and '.join(absent)} not installed"
        return Result(name, MISSING, detail, install_command(*extras))
    facts: dict[str, Any] = {}
    try:
        outcome = probe.run()
        detail, facts = outcome if isinstance(outcome, tuple) else (outcome, {})
        status, fix = WORKS, ""
    except Unavailable as reason:
        status, detail, fix = MISSING, str(reason), reason.fix
    except Exception as error:
        status, detail, fix = FAILS, f"{type(error).__name__}: {error}", advice(name, error)
    return Result(name, status, detail, fix, time.perf_counter() - start, facts)


def advice(name: str, error: Exception | None = None) -> str:
    """What to do about a probe that failed.

    Args:
        name: key of the probe in `PROBES`.
        error: what it raised; None if its process ended or gave no answer.
    """
    probe = PROBES[name]
    if error is None and "torch" in probe.needs and (warning := torch_tpu_warning()):
        return warning
    packages = {"jax", *probe.needs} & set(TRIED)
    if isinstance(error, ImportError | PrivateNameError) or outside_tried(packages):
        return tried_versions(packages)
    return probe.fix


def _devices() -> tuple[str, dict[str, Any]]:
    """Start JAX's backend and describe every device."""
    kinds: dict[tuple[str, str], int] = {}
    for device in jax.devices():
        key = (device.platform, device.device_kind)
        kinds[key] = kinds.get(key, 0) + 1
    devices = [{"platform": p, "kind": k, "count": n} for (p, k), n in kinds.items()]
    x64 = jax.dtypes.canonicalize_dtype("int64") == "int64"
    facts = {"devices": devices, "processes": jax.process_count(), "x64": x64}
    names = ", ".join(f"{d['count']} x {d['platform']} ({d['kind']})" for d in devices)
    return f"{names}; 64-bit types are {'on' if x64 else 'off'}", facts


def _accelerator() -> str:
    """Look for anything but a CPU, and for a GPU that JAX does not see."""
    platform = jax.default_backend()
    if platform != "cpu":
        return f"JAX runs on {platform}"
    cuda = nvidia.driver_cuda()
    plugins = [f"jax-cuda{major}-plugin {v}" for major, v in nvidia.cuda_plugins().items()]
    fix = "" if plugins else nvidia.install_cuda()
    if cuda is None:
        raise Unavailable("none seen by JAX, so programs run on the CPU", fix)
    driver = f"NVIDIA driver{cuda and f' for CUDA {cuda}'} found"
    if not plugins:
        raise Unavailable(f"{driver}, but JAX's CUDA plugin is not installed", fix)
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise Unavailable(f"{driver}, but this process is set to use the CPU")
    raise RuntimeError(
        f"{driver}, {' and '.join(plugins)} installed, but JAX {jax.__version__} sees no GPU"
    )


def _simulate() -> str:
    """Ask a new process for 8 virtual CPU devices; in this one the backend may be running."""
    program = "import isoshard, jax; isoshard.simulate_devices(8); print(len(jax.devices('cpu')))"
    completed = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if completed.stdout.split()[-1:] != ["8"]:
        raise RuntimeError((completed.stderr.strip() or completed.stdout).splitlines()[-1])
    return "isoshard.simulate_devices(8), before the first JAX call, gives 8 CPU devices"


def _sharded() -> jax.Array:
    """A float32 matrix with one block of rows on each device."""
    count = len(jax.devices())
    rows = np.arange(count * 64 * 16, dtype=np.float32).reshape(count * 64, 16)
    return iso.shard(rows, _mesh(), iso.P("x", None))


def _mesh() -> jax.sharding.Mesh:
    return iso.make_mesh((len(jax.devices()),), ("x",))


def _shard() -> str:
    """Shard a matrix, compute on it under jit, compare with NumPy."""
    x = _sharded()
    expected = np.asarray(x)
    np.testing.assert_allclose(jax.jit(jnp.sum)(x), expected.sum(), rtol=1e-3)
    np.testing.assert_array_equal(iso.full(x), expected)
    blocks = x.addressable_shards
    return f"a block of {blocks[0].data.shape} on each device; a jitted sum agrees with NumPy"


def _exchange() -> str:
    """Share every block of a sharded array with torch, and a torch tensor with JAX."""
    import torch

    x = _sharded()
    shards = iso.local_shards(x, framework="torch")
    blocks = [block.data.unsafe_buffer_pointer() for block in x.addressable_shards]
    if sorted(shard.data.data_ptr() for shard in shards) != sorted(blocks):
        raise RuntimeError("the torch shards of a JAX array are copies")
    tensor = torch.arange(4096.0)
    if iso.to_jax(tensor, copy=False).unsafe_buffer_pointer() != tensor.data_ptr():
        raise RuntimeError("the JAX array of a torch tensor is a copy")
    return "every block of a JAX array goes to torch, and a torch tensor to JAX, without a copy"


def _train() -> str:
    """Train a sharded linear layer on torch's `jax` device for two steps."""
    import torch

    from isoshard import torch_bridge

    size = 2 * len(jax.devices())
    layer = torch.nn.Linear(size, size).to("jax")
    torch_bridge.mark_sharding(layer.weight, _mesh(), ("x", None))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, losses = torch.ones(4, size).to("jax"), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if not losses[1] < losses[0]:
        raise RuntimeError(f"two steps of SGD took the loss from {losses[0]} to {losses[1]}")
    return f"two steps of SGD took a sharded layer's loss from {losses[0]:.3f} to {losses[1]:.3f}"


def _values() -> str:
    """Check 64-bit types on torch's `jax` device, unless the user switched them off."""
    import torch

    from isoshard.torch_bridge.common.dtypes import NARROW

    third = (torch.ones(1, dtype=torch.float64, device="jax") / 3).item()
    if third != 1 / 3:
        raise RuntimeError(f"a float64 tensor has {third} for a third")
    if NARROW:
        return "64-bit integers are kept in 32, as XLA_USE_32BIT_LONG is set"
    large = torch.tensor([2**40], device="jax") + 1
    if large.item() != 2**40 + 1:
        raise RuntimeError(f"an int64 tensor has {large.item()} for 2 ** 40 + 1")
    return "int64 and float64 tensors have 64 bits"


def _function() -> str:
    """Call a torch module from a jitted JAX program and differentiate it."""
    import torch

    function = iso.jax_function(torch.nn.Linear(4, 2))
    x = jnp.ones((3, 4))
    gradient = jax.jit(jax.grad(lambda params: function(params, x).sum()))(function.params)
    np.testing.assert_allclose(gradient["bias"], [3.0, 3.0], rtol=1e-6)
    return "a torch layer runs under jax.jit and jax.grad"


def _flax() -> str:
    """Place a Flax NNX layer by a Plan and call it."""
    from flax import nnx

    size = 2 * len(jax.devices())
    layer = nnx.Linear(size, size, rngs=nnx.Rngs(0))
    placed = iso.shard(layer, _mesh(), iso.Plan({"kernel": iso.P(None, "x"), "*": iso.P()}))
    placed(jnp.ones((1, size))).block_until_ready()
    return f"a Plan placed an NNX layer: kernel {iso.sharding_of(placed.kernel[...]).spec}"


def _checkpoint() -> str:
    """Write a sharded array by TensorStore, and read it in another layout."""
    rows = np.arange(2 * len(jax.devices()), dtype=np.float32)
    array = iso.shard(rows, _mesh(), iso.P("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "saved"
        iso.save(path, {"rows": array})
        target = iso.shard(np.zeros_like(rows), _mesh(), iso.P())
        np.testing.assert_array_equal(iso.restore(path, {"rows": target})["rows"], rows)
    return f"a checkpoint written from {len(jax.devices())} shards, read back unsharded"


def _onnx() -> str:
    """Write shardings into an ONNX model, and read them."""
    from onnx import TensorProto, helper

    size = 2 * len(jax.devices())
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name in "xy")
    w = helper.make_tensor("w", TensorProto.FLOAT, [size, size], [0.0] * size**2)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), ir_version=11)
    annotated = iso.onnx.annotate(model, _mesh(), {"w": iso.P(None, "x")})
    [sharding] = iso.onnx.layout(annotated).parameters["w"].values()
    if sharding.shard_shape((size, size)) != (size, 2):
        raise RuntimeError(f"a weight annotated as P(None, 'x') is read as {sharding.spec}")
    return f"an annotation written into a model and read back: w {sharding.spec}"


def _plot() -> str:
    """Draw a curve into memory."""
    import io

    from matplotlib.figure import Figure

    figure, file = Figure(), io.BytesIO()
    figure.subplots().plot([2.0, 1.0])
    figure.savefig(file, format="png")
    return f"a curve drawn as PNG, {len(file.getvalue()) // 1024} kB"


_JAX = "reinstall JAX for this machine: pip install --force-reinstall jax jaxlib"
_GPU = """JAX prints why: python -c "import jax; jax.devices('cuda')\""""
_BOTH = "torch sees JAX's buffers where both are installed for the same kind of device"
PROBES = {
    "devices": Probe("start JAX", (), _JAX, _devices),
    "accelerator": Probe("use an accelerator", (), _GPU, _accelerator),
    "simulate": Probe("simulate more devices", (), _REPORT, _simulate),
    "shard": Probe("shard an array, compute on it", (), _REPORT, _shard),
    "exchange": Probe("exchange buffers with torch", ("torch",), _BOTH, _exchange),
    "train": Probe("train torch on the mesh", ("torch",), _REPORT, _train),
    "numbers": Probe("count in 64 bits", ("torch",), _REPORT, _values),
    "function": Probe("call torch from JAX", ("torch",), _REPORT, _function),
    "flax": Probe("place a Flax module", ("flax",), _REPORT, _flax),
    "checkpoint": Probe("save and restore shards", ("tensorstore",), _REPORT, _checkpoint),
    "onnx": Probe("annotate an ONNX model", ("onnx",), _REPORT, _onnx),
    "plot": Probe("draw the demo's curves", ("matplotlib",), _REPORT, _plot),
}
