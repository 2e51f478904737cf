"""Calls of every public function of isoshard that takes a tensor, in a step.

Each name of the public modules stands here: with calls, or with the reason that there is none.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec as P
from torch.distributed.tensor import Replicate

import isoshard as iso
import isoshard.torch_bridge as xs
import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.torch_xla_bridge.torch_xla.core import functions as xf
from isoshard.torch_xla_bridge.torch_xla.core import xla_builder as xb
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm
from isoshard.torch_xla_bridge.torch_xla.distributed import spmd
from isoshard.torch_xla_bridge.torch_xla.distributed.spmd import debugging, xla_sharding
from isoshard.torch_xla_bridge.torch_xla.experimental import assume_pure as pure
from isoshard.torch_xla_bridge.torch_xla.experimental import custom_kernel as kernels
from isoshard.torch_xla_bridge.torch_xla.experimental import fori_loop, scan, xla_quantized_matmul
from isoshard.torch_xla_bridge.torch_xla.utils import checkpoint, dlpack, utils

from .tensor_calls import Call, marked, module_of, on_mesh

domain, weights = iso.domain, iso.weights

TRIPLE = iso.torch_function(lambda array: array * 3)
DOUBLE = iso.jax_function(lambda value: value * 2)
LAYER = torch.nn.Linear(8, 8).to("jax")
OF_LAYER = iso.jax_function(LAYER)
LOOP = xs.scan_layers(torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)).to("jax"))
PURE = pure.assume_pure(lambda value: value.sin() * 2)
PURE_TORCH = pure.assume_pure_torch(lambda value: value.sin() * 2)
J2T = pure.j2t_autograd(lambda array: array * 3)
MODULE = pure.PureModule(LAYER)


def _sharded(x: Any) -> Any:
    return iso.shard(x, on_mesh(), P("a"))


def _field(x: Any) -> Any:
    return iso.shard(x.reshape(1, 1, 8), on_mesh(), P(None, None, "a"))


def _kernel(x: Any) -> Any:
    return torch.ones(1, 1, 3, device=x.device)


def _points(x: Any) -> Any:
    return iso.shard(torch.stack([x, x * 2], 1), on_mesh(), P("a"))


def _in_domain(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: run(_field(x))


VERBS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "isoshard": {
        "shard": _sharded,
        "shard to nothing": lambda x: iso.shard(x, on_mesh(), P()),
        "shard copied": lambda x: iso.shard(x, on_mesh(), P("a"), copy=True),
        "shard shared": lambda x: iso.shard(x, on_mesh(), P(), copy=False),
        "shard uneven": lambda x: iso.shard(
            x[:7], on_mesh(), P("a"), uneven="pad", sizes=(1,) * 7 + (0,)
        ),
        "shard of a dictionary": lambda x: iso.shard({"a": x}, on_mesh(), P("a"))["a"],
        "shard of a module": lambda x: _made(x, lambda m: iso.shard(m, on_mesh(), P("a"))),
        "reshard": lambda x: iso.reshard(iso.shard(x, on_mesh(), P()), P("a")),
        "reshard to a mesh": lambda x: iso.reshard(x, on_mesh(), P("a")),
        "full": lambda x: iso.full(_sharded(x)),
        "full of itself": iso.full,
        "to_jax": iso.to_jax,
        "to_jax copied": lambda x: iso.to_jax(x, copy=True),
        "to_jax sharded": lambda x: iso.to_jax(x, jax.NamedSharding(on_mesh(), P("a"))),
        "to_jax of a module": lambda x: iso.to_jax(module_of(x)),
        "to_jax and back": lambda x: iso.to_torch(iso.to_jax(x) * 2),
        "to_jax of a number": lambda x: x * float(jnp.sum(iso.to_jax(x))),
        "to_torch": lambda x: iso.to_torch(x),
        "to_torch on the CPU": lambda x: iso.to_torch(x, device="cpu"),
        "to_torch of a new array": lambda x: iso.to_torch(jnp.ones(8)) * x,
        "from_local": lambda x: iso.from_local(x, on_mesh(), P("a")),
        "local_shards": iso.local_shards,
        "local_shards in torch": lambda x: iso.local_shards(x, framework="torch"),
        "sharding_of": lambda x: repr(iso.sharding_of(_sharded(x)).spec),
        "visualize": lambda x: str(iso.visualize(_sharded(x))),
        "jax_function": lambda x: DOUBLE(iso.to_jax(x)),
        "jax_function of a tensor": lambda x: DOUBLE(x),
        "jax_function of a module": lambda x: OF_LAYER(OF_LAYER.params, x),
        "jax_function with its arrays": lambda x: OF_LAYER.params,
        "jax_function and back": lambda x: iso.to_torch(DOUBLE(iso.to_jax(x))),
        "torch_function": TRIPLE,
        "torch_function once": lambda x: iso.torch_function(jnp.sin)(x),
        "torch_function that closes over": lambda x: iso.torch_function(
            lambda array, other=x: array * iso.to_jax(other)
        )(x),
        "torch_function of a tree": lambda x: iso.torch_function(lambda tree: tree["a"] * 2)(
            {"a": x}
        ),
        "save": lambda x: _in_folder(lambda path: iso.save(path / "a", {"a": x})),
        "save_safetensors": lambda x: _in_folder(
            lambda path: iso.save_safetensors(path / "a", {"a": x})
        ),
    },
    "isoshard.sharding": {
        "typeof": lambda x: repr(iso.sharding.typeof(_sharded(x))),
    },
    "isoshard.torch_bridge": {
        "mark_sharding": lambda x: xs.mark_sharding(x * 1, on_mesh(), ("a",)),
        "mark_sharding of itself": lambda x: xs.mark_sharding(x, on_mesh(), ("a",)),
        "mark_sharding_with_gradients": lambda x: xs.mark_sharding_with_gradients(
            x, on_mesh(), ("a",)
        ),
        "clear_sharding": lambda x: xs.clear_sharding(x * 1) * 2,
        "clear_sharding of a marked": lambda x: xs.clear_sharding(marked(x)) * 2,
        "shard_as": lambda x: xs.shard_as(x * 1, x),
        "enable_manual_sharding": lambda x: xs.disable_manual_sharding(
            xs.enable_manual_sharding(x, ("a",), mesh=on_mesh()) * 2,
            ("a",),
            x.shape,
            mesh=on_mesh(),
        ),
        "xla_distribute_tensor": lambda x: xs.xla_distribute_tensor(x, on_mesh(), [Replicate()]),
        "xla_distribute_module": lambda x: _made(
            x, lambda m: xs.xla_distribute_module(m, on_mesh())
        ),
        "XLAShardedTensor": lambda x: xs.XLAShardedTensor(x),
        "XLAShardedTensor marked": lambda x: xs.XLAShardedTensor(x * 1, (8,), (0,)),
        "XLAShard": lambda x: [shard.data for shard in _sharded(x).local_shards or ()],
        "ScanLayers": LOOP,
        "scan_layers": lambda x: LOOP(x * 2),
        "constrain_activations": lambda x: LAYER(x),
        "excess_precision": lambda x: _precise(x),
        "sync": lambda x: (xs.sync(), x * 2)[1],
        "TorchFunction": TRIPLE,
        "JaxFunction": lambda x: DOUBLE(x),
    },
    "isoshard.domain": {
        "avg_pool": _in_domain(lambda x: domain.avg_pool(x, 2)),
        "max_pool": _in_domain(lambda x: domain.max_pool(x, 2)),
        "conv": lambda x: domain.conv(_field(x), _kernel(x), padding=1),
        "conv_transpose": lambda x: domain.conv_transpose(_field(x), _kernel(x), padding=1),
        "cumsum": _in_domain(lambda x: domain.cumsum(x, 2)),
        "cumprod": _in_domain(lambda x: domain.cumprod(x, 2)),
        "cummax": _in_domain(lambda x: domain.cummax(x, 2)),
        "cummin": _in_domain(lambda x: domain.cummin(x, 2)),
        "fft": _in_domain(lambda x: domain.fft(x, 1)),
        "ifft": _in_domain(lambda x: domain.ifft(x, 1)),
        "rfft": _in_domain(lambda x: domain.rfft(x, 1)),
        "irfft": _in_domain(lambda x: domain.irfft(domain.rfft(x, 1), 1, length=1)),
        "halo_exchange": _in_domain(lambda x: domain.halo_exchange(x, 1, 2)),
        "interpolate": _in_domain(lambda x: domain.interpolate(x, scale=2)),
        "pad": _in_domain(lambda x: domain.pad(x, {2: (4, 4)})),
        "roll": _in_domain(lambda x: domain.roll(x, 1, 2)),
        "pack": lambda x: domain.pack(x[:7], on_mesh(), P("a"), (1,) * 7 + (0,)),
        "repack": lambda x: domain.repack(
            domain.pack(x[:7], on_mesh(), P("a"), (1,) * 7 + (0,)), (0,) + (1,) * 7
        ),
        "unpack": lambda x: domain.unpack(domain.pack(x[:7], on_mesh(), P("a"))),
        "without_padding": lambda x: domain.without_padding(domain.pack(x[:7], on_mesh(), P("a"))),
        "scatter_tensor": lambda x: domain.scatter_tensor(x, on_mesh(), ("a",)),
        "lay_out_in_blocks": lambda x: domain.lay_out_in_blocks(
            x, jax.NamedSharding(on_mesh(), P("a"))
        ),
        "knn": lambda x: domain.knn(_points(x), _points(x), 2)[0],
        "radius_search": lambda x: domain.radius_search(_points(x), _points(x), 2.0, 2)[0],
        "ring_attention": lambda x: domain.ring_attention(
            *[x.reshape(1, 8, 1, 1)] * 3, mesh=on_mesh(), axis="a"
        ),
        "ulysses_attention": lambda x: domain.ulysses_attention(
            *[x.reshape(1, 8, 1, 1).expand(1, 8, 8, 1)] * 3, mesh=on_mesh(), axis="a"
        ),
        "zigzag": lambda x: domain.zigzag(
            torch.cat([x, x]).reshape(1, 16), mesh=on_mesh(), axis="a"
        ),
        "unzigzag": lambda x: domain.unzigzag(
            torch.cat([x, x]).reshape(1, 16), mesh=on_mesh(), axis="a"
        ),
    },
    "isoshard.core.weights": {
        "save_safetensors": lambda x: _in_folder(
            lambda path: weights.save_safetensors(path / "a", {"a": x})
        ),
    },
    "torch_xla": {
        "core.functions.all_reduce": lambda x: xf.all_reduce("sum", x),
        "core.functions.all_gather": lambda x: xf.all_gather(x, 0),
        "core.functions.distributed_mm": lambda x: xf.distributed_mm(
            x.reshape(1, 8), x.reshape(8, 1)
        ),
        "core.xla_builder.call_jax": lambda x: xb.call_jax(lambda array: array * 2, (x,)),
        "core.xla_builder.tensor_shape": lambda x: type(xb.tensor_shape(x)),
        "core.xla_model.all_gather": lambda x: xm.all_gather(x),
        "core.xla_model.all_reduce": lambda x: xm.all_reduce("sum", x),
        "core.xla_model.all_reduce of a list": lambda x: xm.all_reduce("sum", [x]),
        "core.xla_model.all_to_all": lambda x: xm.all_to_all(x, 0, 0, 1),
        "core.xla_model.all_gather_bucketized": lambda x: xm.all_gather_bucketized([x, x]),
        "core.xla_model.reduce_scatter_bucketized": lambda x: xm.reduce_scatter_bucketized(
            "sum", [x, x], 1.0, 0, 1
        ),
        "core.xla_model.all_reduce_bucketized_gradients": lambda x: (
            xm.all_reduce_bucketized_gradients([x], 1.0, None, True)
        ),
        "core.xla_model.collective_broadcast": lambda x: xm.collective_broadcast([x]),
        "core.xla_model.collective_permute": lambda x: xm.collective_permute(x, [[0, 0]]),
        "core.xla_model.reduce_scatter": lambda x: xm.reduce_scatter("sum", x, 1.0, 0, 1),
        "core.xla_model.mesh_reduce": lambda x: xm.mesh_reduce("a", x, sum),
        "core.xla_model.save": lambda x: xm.save({"a": x}, io.BytesIO()),
        "core.xla_model.optimization_barrier_": lambda x: (xm.optimization_barrier_([x]), x * 2)[1],
        "core.xla_model.is_xla_tensor": lambda x: xm.is_xla_tensor(x),
        "core.xla_model.unlazy": lambda x: (xm.unlazy([x]), x * 2)[1],
        "core.xla_model.mark_step": lambda x: (xm.mark_step(), x * 2)[1],
        "core.xla_model.get_stablehlo": lambda x: len(xm.get_stablehlo([x * 2])) > 0,
        "core.xla_model.get_stablehlo_bytecode": lambda x: (
            len(xm.get_stablehlo_bytecode([x * 2])) > 0
        ),
        "core.xla_model.check_view_sharing": lambda x: xm.check_view_sharing([x]),
        "core.xla_model.for_each_instance": lambda x: xm.for_each_instance(
            [x], lambda one: True, lambda one: None
        ),
        "core.xla_model.send_cpu_data_to_device": lambda x: xm.send_cpu_data_to_device([x], "jax"),
        "core.xla_model.add_step_closure": lambda x: xm.add_step_closure(print, (x,)),
        "debug.model_comparator.compare_tensors": lambda x: _comparator().compare_tensors(
            x, x.abs(), 1e-5, 1e-5, 1
        ),
        "distributed.spmd.annotate_custom_sharding": lambda x: spmd.annotate_custom_sharding(
            x, on_mesh(), ("a",)
        ),
        "distributed.spmd.wrap_if_sharded": lambda x: spmd.wrap_if_sharded(x),
        "distributed.spmd.xla_patched_nn_linear_forward": lambda x: (
            spmd.xla_patched_nn_linear_forward(LAYER, x)
        ),
        "distributed.spmd.debugging.sharding_spec_of": lambda x: debugging.sharding_spec_of(x),
        "distributed.spmd.debugging.visualize_tensor_sharding": lambda x: type(
            debugging.visualize_tensor_sharding(marked(x))
        ),
        "distributed.spmd.debugging.construct_v1_sharding_str": lambda x: (
            debugging.construct_v1_sharding_str(marked(x))
        ),
        "distributed.spmd.xla_sharding.unwrap_sharded_tensor": lambda x: (
            xla_sharding.unwrap_sharded_tensor(x)
        ),
        "distributed.spmd.xla_sharding.wrap_as_sharded_tensor": lambda x: (
            xla_sharding.wrap_as_sharded_tensor(x * 1, (8,), (0,))
        ),
        "experimental.assume_pure.assume_pure": PURE,
        "experimental.assume_pure.assume_pure once": lambda x: pure.assume_pure(torch.sin)(x),
        "experimental.assume_pure.PureModule": MODULE,
        "experimental.assume_pure.assume_pure_torch": PURE_TORCH,
        "experimental.assume_pure.j2t_autograd": J2T,
        "experimental.custom_kernel.flash_attention": lambda x: kernels.flash_attention(
            *[x.reshape(1, 1, 8, 1)] * 3
        ),
        "experimental.custom_kernel.gmm": lambda x: kernels.gmm(
            x.reshape(8, 1).expand(8, 8), torch.ones(2, 8, 8, device=x.device), _sizes(x)
        ),
        "experimental.custom_kernel.tgmm": lambda x: kernels.tgmm(
            x.reshape(1, 8).expand(8, 8), x.reshape(8, 1).expand(8, 8), _sizes(x)
        ),
        "experimental.custom_kernel.repeat_with_fixed_output_size": lambda x: (
            kernels.repeat_with_fixed_output_size(x, (x > 0).int(), 8)
        ),
        "experimental.custom_kernel.to_jax_shape_dtype_struct": lambda x: repr(
            kernels.to_jax_shape_dtype_struct(x)
        ),
        "experimental.fori_loop.while_loop": lambda x: fori_loop.while_loop(
            lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0, device="jax"), x)
        ),
        "experimental.fori_loop.fori_loop": lambda x: fori_loop.fori_loop(
            *torch.tensor([0, 3], device="jax"), lambda v: v * 2, x
        ),
        "experimental.scan.scan": lambda x: scan.scan(lambda c, v: (c + v, c * v), x[0], x),
        "experimental.xla_quantized_matmul.quantized_matmul": lambda x: (
            xla_quantized_matmul.quantized_matmul(
                x.reshape(1, 8),
                torch.ones(8, 8, dtype=torch.int8, device=x.device),
                torch.ones(8, device=x.device),
            )
        ),
        "utils.checkpoint.checkpoint": lambda x: checkpoint.checkpoint(torch.sin, x),
        "utils.dlpack.to_jax": lambda x: dlpack.to_jax(x),
        "utils.dlpack.to_torch": lambda x: dlpack.to_torch(x),
        "utils.dlpack.to_dlpack": lambda x: dlpack.from_dlpack(dlpack.to_dlpack(x)),
        "utils.dlpack.from_dlpack": lambda x: dlpack.from_dlpack(x),
        "utils.serialization.save": lambda x: _serialized(x),
        "utils.utils.shape": lambda x: utils.shape(x),
        "utils.utils.for_each_instance_rewrite": lambda x: utils.for_each_instance_rewrite(
            [x], lambda one: True, lambda one: one * 2
        ),
        "utils.utils.flatten_nested_tuple": lambda x: utils.flatten_nested_tuple((x, (x,))),
        "utils.utils.as_list": lambda x: utils.as_list(x),
        "utils.utils.list_copy_append": lambda x: utils.list_copy_append([x], x),
        "torch_xla.sync": lambda x: (torch_xla.sync(), x * 2)[1],
    },
}
"""By module: calls; a name may have several, which begin with it."""


def _sizes(x: Any) -> Any:
    return torch.tensor([4, 4], dtype=torch.int32, device=x.device)


def _made(x: Any, change: Callable[[torch.nn.Module], Any]) -> Any:
    module = module_of(x)
    change(module)
    return module.kept * 2


def _in_folder(write: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return sorted(path.name for path in Path(folder).iterdir())


def _precise(x: Any) -> Any:
    with xs.excess_precision(False):
        return x.bfloat16() * 2


def _comparator() -> Any:
    return importlib.import_module("isoshard.torch_xla_bridge.torch_xla.debug.model_comparator")


def _serialized(x: Any) -> Any:
    from isoshard.torch_xla_bridge.torch_xla.utils import serialization

    return _in_folder(lambda path: serialization.save({"a": x}, path / "a"))


NO_TENSOR = "takes no tensor"
OTHERWISE = "is what the calls beside it are made of"
OF_FILES = "reads files, into new tensors"
OF_STEPS = "works on a step, or in it on the objects around"
OF_JAX = "takes arrays of JAX"
OF_PROCESSES = "of several processes"
LEFT_OUT: dict[str, dict[str, tuple[str, ...]]] = {
    "isoshard": {
        NO_TENSOR: (
            *("CheckpointError", "Mesh", "NamedSharding", "P", "Plan", "PlanError"),
            *("RecompilationWarning", "ShardingError", "compilation_cache", "hybrid_mesh"),
            *("latest", "make_mesh", "simulate_devices"),
        ),
        OTHERWISE: ("UnevenArray", "torch_module"),
        "a module": (
            *("checkpoint", "data", "distributed", "domain", "errors", "metrics", "onnx"),
            *("planner", "rules", "sharding", "weights"),
        ),
        OF_FILES: ("load_safetensors", "restore"),
        OF_JAX: ("create_sharded", "to_dtensor"),
    },
    "isoshard.checkpoint": {
        NO_TENSOR: ("check_storage", "latest"),
        OF_FILES: ("load_arrays", "restore"),
        "of isoshard, under another name": ("save",),
    },
    "isoshard.distributed": {NO_TENSOR: tuple(iso.distributed.__all__)},
    "isoshard.errors": {NO_TENSOR: tuple(iso.errors.__all__)},
    "isoshard.rules": {NO_TENSOR: tuple(iso.rules.__all__)},
    "isoshard.sharding": {
        NO_TENSOR: (
            *("Tiles", "normalize_spec", "parse_op_sharding", "slice_axes", "to_op_sharding"),
        ),
        OTHERWISE: ("Shard",),
    },
    "isoshard.torch_bridge": {
        NO_TENSOR: (
            *("CaptureError", "Generator", "HybridMesh", "Mesh", "ShardingSpec", "ShardingType"),
            *("get_1d_mesh", "get_global_mesh", "get_xla_supported_devices", "register_lowering"),
            *("set_global_mesh", "xla_device", "register_function_handler"),
        ),
        OTHERWISE: (
            *("StackedLayers", "TorchModule", "disable_manual_sharding", "jax_function"),
            "torch_function",
        ),
        OF_STEPS: (
            *("ActivationConstraints", "CompiledStep", "auto_plan", "compile", "torch_module"),
            *("StepReport", "memory_analysis", "print", "profile", "program_text", "report"),
        ),
    },
    "isoshard.domain": {
        NO_TENSOR: ("BlockLayout", "GraphHalo", "Neighbors", "Shards", "Within", "in_blocks"),
        "within a function of jax.shard_map": ("halo", "ring"),
        "works on a graph before a step": (
            *("partition_graph", "register_function_handler", "segment_sum"),
        ),
        OF_JAX: ("lay_in_blocks", "lift"),
    },
    "isoshard.core.weights": {
        NO_TENSOR: (
            *(
                "Agreement",
                "Concat",
                "FileFormatError",
                "Kernel",
                "MergeAxes",
                "Op",
                "Rule",
                "TransposedKernel",
            ),
            *("Split", "SplitAxis", "Transpose", "WeightError", "WeightMap", "attention"),
        ),
        "maps a module's names": ("flax_names", "linen_names", "verify"),
        OF_FILES: ("load_safetensors",),
    },
    "isoshard.data": {"of batches on the host": ("BatchOrder", "Batches", "Loader", "loader")},
    "isoshard.planner": {
        NO_TENSOR: (
            *("AxisLinks", "Chip", "Comparison", "NothingFitsError", "Report", "SearchResult"),
            *("Topology", "add_chip", "advise", "check_crossings", "chip", "chips", "compare"),
            *("crossings", "estimate", "links", "links_of", "search", "topology", "topology_of"),
        ),
    },
}
"""By module and reason: names without a call."""

FILES_OF_TORCH_XLA = {
    "_internal": "of torch_xla's installation",
    "amp": "an optimizer's step, which tests/torch_bridge/overrides trains with",
    "backends": NO_TENSOR,
    "debug.metrics": NO_TENSOR,
    "debug.profiler": NO_TENSOR,
    "distributed.fsdp": "wraps modules before a step",
    "distributed.xla_backend": OF_PROCESSES,
    "distributed.xla_multiprocessing": OF_PROCESSES,
    "experimental.distributed_checkpoint": "writes and reads files",
    "experimental.spmd_fully_sharded_data_parallel": "wraps modules before a step",
    "experimental.gradient_accumulation": OF_STEPS,
    "experimental.gru": "its module is a scan",
    "runtime": NO_TENSOR,
    "stablehlo": "exports programs",
    "test": "prints",
    "core._computations": "of computations",
    "core._op": "of computations",
    "core.xla_op_registry": "of computations",
    "isoshard.torch_xla_bridge.torch_xla": NO_TENSOR,
}
"""Modules of torch_xla's tree, or folders, whose functions are not called, by reason."""

FUNCTIONS_OF_TORCH_XLA = {
    "of computations": (
        *("core.xla_builder.torch_function", "core.xla_builder.identity"),
        *("core.xla_builder.create_builder", "core.xla_builder.mkshape"),
        "core.xla_builder.get_computation_hlo",
    ),
    OF_PROCESSES: (
        *("core.xla_model.recv", "core.xla_model.send", "core.xla_model.rendezvous"),
        *("core.xla_model.do_on_ordinals", "core.xla_model.xla_rendezvous"),
        *("core.xla_model.set_replication", "core.xla_model.xla_replication_devices"),
        *("core.xla_model.broadcast_master_param", "distributed.data_parallel.needs_replicas"),
    ),
    NO_TENSOR: (
        *("core.xla_model.get_xla_supported_devices", "core.xla_model.xla_device"),
        *("core.xla_model.get_memory_info", "core.xla_model.is_master_ordinal"),
        *("core.xla_model.master_print", "core.xla_model.xla_real_devices"),
        *("core.xla_model.xla_device_hw", "core.xla_model.xla_device_kind"),
        *("core.xla_model.wait_device_ops", "core.xla_model.set_rng_state"),
        *("core.xla_model.get_rng_state", "core.xla_model.fork_rng"),
        *("distributed.spmd.get_1d_mesh", "distributed.spmd.set_global_mesh"),
        *("distributed.spmd.auto_policy", "distributed.spmd.apply_backward_optimization_barrier"),
        *("distributed.spmd.api.convert_to_xla_mesh", "distributed.spmd.api.with_xla"),
        "distributed.spmd.api.convert_to_xla_partition_spec",
        *("distributed.spmd.debugging.parse_op_sharding", "experimental.eager_mode"),
        "distributed.spmd.debugging.visualize_sharding",
        "distributed.spmd.xla_sharding.apply_xla_patch_to_nn_linear",
        *("experimental.custom_kernel.jax_dtype", "experimental.eager_mode_context"),
        *("experimental.custom_kernel.convert_torch_dtype_to_jax", "experimental.scan.recomputes"),
        *("experimental.custom_kernel.make_kernel_from_pallas", "utils.serialization.load"),
        *("experimental.custom_kernel.trace_pallas", "utils.utils.check_env_flag"),
        *("utils.utils.getenv_as", "utils.utils.null_print", "utils.utils.eprint"),
        *("utils.utils.get_print_fn", "utils.utils.timed", "utils.utils.get_free_tcp_ports"),
        *("utils.utils.parallel_work", "debug.model_comparator.configure"),
    ),
    "an optimizer's step, which other tests train with": (
        *("core.xla_model.optimizer_step", "core.xla_model.reduce_gradients"),
    ),
    "writes and compares files": (
        *("debug.model_comparator.save", "debug.model_comparator.tensor_file_compare"),
        "debug.model_comparator.compare",
    ),
    "of torch_bridge, under another name": (
        *("distributed.spmd.xla_distribute_module", "distributed.spmd.xla_distribute_tensor"),
        *("distributed.spmd.mark_sharding_with_gradients", "distributed.spmd.mark_sharding"),
        *("distributed.spmd.disable_manual_sharding", "distributed.spmd.enable_manual_sharding"),
        *("distributed.spmd.clear_sharding", "distributed.spmd.shard_as"),
        "experimental.scan_layers.scan_layers",
    ),
    "kernels whose like is called": (
        *("experimental.custom_kernel.gmm_backward", "experimental.custom_kernel.paged_attention"),
        "experimental.custom_kernel.quantized_matmul_int8",
        "experimental.custom_kernel.multi_queries_paged_attention",
        "experimental.custom_kernel.ragged_paged_attention",
    ),
}
"""By reason: functions of other modules of torch_xla's tree without a call."""


def functions_of_torch_xla() -> set[str]:
    """The functions of torch_xla's tree that take something, each under one name."""
    found: dict[int, str] = {}
    infos = pkgutil.walk_packages(torch_xla.__path__, f"{torch_xla.__name__}.")
    for name in (torch_xla.__name__, *(info.name for info in infos)):
        try:
            module = importlib.import_module(name)
        except ImportError:  # of a package that is not installed
            continue
        short = name.removeprefix(f"{torch_xla.__name__}.")
        for key, value in vars(module).items():
            ours = inspect.isfunction(value) and value.__module__.startswith("isoshard")
            if ours and key[0] != "_" and inspect.signature(value).parameters:
                found.setdefault(id(value), f"{short}.{key}")
    return set(found.values())


def unlisted() -> list[str]:
    """Public names with neither a call nor a reason."""
    missing = []
    for name in (*VERBS, *LEFT_OUT):
        if name == "torch_xla":
            continue
        called = VERBS.get(name, {})
        left_out = {one for names in LEFT_OUT.get(name, {}).values() for one in names}
        public = set(importlib.import_module(name).__all__)
        missing += [
            f"{name}.{one}"
            for one in sorted(public - left_out)
            if one not in {key.split(" ")[0] for key in called}
        ]
        missing += [f"{name}.{one}, which is gone" for one in sorted(left_out - public)]
    named = {key.split(" ")[0] for key in VERBS["torch_xla"]}
    named |= {one for names in FUNCTIONS_OF_TORCH_XLA.values() for one in names}
    folders = tuple(f"{one}." for one in FILES_OF_TORCH_XLA)
    missing += [
        one for one in sorted(functions_of_torch_xla() - named) if not one.startswith(folders)
    ]
    return missing


def verbs() -> Iterator[Call]:
    """The calls."""
    for module, calls in VERBS.items():
        for name, run in calls.items():
            yield Call(f"{module.removeprefix('isoshard.')}: {name}", "vector", run)
