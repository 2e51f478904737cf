"""Calls of every name of a tensor, and of every public function that takes one.

Names are found by introspection: those of the tensor's class with arguments that torch accepts, and
functions with the calls listed here. A new name is called, or has to be listed with a reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

KINDS: dict[str, Callable[[float], torch.Tensor]] = {
    "vector": lambda k: (torch.arange(8.0) - 3.25) * k,
    "integers": lambda k: torch.arange(8) + int(k),
    "matrix": lambda k: torch.eye(4) * (k + 3) + torch.arange(16.0).view(4, 4) / 16,
    "bools": lambda k: torch.arange(8) % (int(k) + 1) == 0,
    "complex": lambda k: torch.complex(torch.arange(4.0) * k, torch.ones(4)),
    "matrices": lambda k: torch.eye(4).expand(2, 4, 4) * k + 0.25,
}
"""What calls are made of, by a number that is another one in each call."""


RANDOM = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("multinomial", "normal_", "random_", "uniform_"),
)
"""What draws: shapes are compared."""


def _ids(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)


ARGUMENTS: tuple[Callable[[torch.Tensor], tuple[Any, ...]], ...] = (
    lambda x: (),
    lambda x: (x,),
    lambda x: (2,),
    lambda x: (0,),
    lambda x: (0, 1),
    lambda x: (x, x),
    lambda x: (0, _ids(x)),
    lambda x: (0, _ids(x), x),
    lambda x: (x > 0, 2),
    lambda x: (x > 0, x),
    lambda x: ((2, 2, 2),),
    lambda x: (2, 0),
    lambda x: (0, 2, 2),
    lambda x: (2, 0, 2),
    lambda x: ((_ids(x),), x),
    lambda x: (0, _ids(x), 2),
    lambda x: (0, _ids(x), x, "sum"),
    lambda x: (0, _ids(x), x, "prod"),
    lambda x: (torch.float64,),
    lambda x: ("cpu",),
    lambda x: ((0,),),
    lambda x: ((8,), (1,)),
    lambda x: (x, (8,), (1,)),
    lambda x: (x, 0, 1),
    lambda x: ((0,), (0,)),
    lambda x: (0, (2, 4)),
    lambda x: ((2, 6),),
    lambda x: ((16,), 1.5),
    lambda x: (x[0], x[0]),
    lambda x: (x, x[0]),
    lambda x: (_ids(x) * 0, x),
    lambda x: (_ids(x),),
    lambda x: (_ids(x), 0),
    lambda x: ((2, 8),),
    lambda x: ((8,),),
    lambda x: ((),),
    lambda x: (lambda other: other,),
    lambda x: (4,),
    lambda x: (torch.ones(3, device=x.device),),
    lambda x: (x, x, x),
)
"""Tried in this order until torch accepts the call on the CPU."""

WITH_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "__array_wrap__": ("vector", lambda x: x.__array_wrap__(np.ones(8, np.float32))),
    "__bool__": ("vector", lambda x: x[0].__bool__()),
    "__nonzero__": ("vector", lambda x: x[0].__nonzero__()),
    "__complex__": ("vector", lambda x: x[0].__complex__()),
    "__float__": ("vector", lambda x: x[0].__float__()),
    "__index__": ("integers", lambda x: x[0].__index__()),
    "__int__": ("vector", lambda x: x[0].__int__()),
    "__long__": ("vector", lambda x: x[0].__long__()),
    "__copy__": ("vector", lambda x: x.__copy__()),
    "__deepcopy__": ("vector", lambda x: x.__deepcopy__({})),
    "__format__": ("vector", lambda x: x.__format__("")),
    "__reduce__": ("vector", lambda x: x.__reduce__()),
    "__reduce_ex__": ("vector", lambda x: x.__reduce_ex__(2)),
    "as_subclass": ("vector", lambda x: x.as_subclass(type(x))),
    "backward": ("vector", lambda x: _differentiated(x, lambda y: y.sum().backward())),
    "retain_grad": ("vector", lambda x: _differentiated(x, lambda y: (y * 1).retain_grad())),
    "register_hook": (
        "vector",
        lambda x: _differentiated(
            x, lambda y: (y.register_hook(lambda g: g * x), y.sum().backward())
        ),
    ),
    "register_post_accumulate_grad_hook": (
        "vector",
        lambda x: _differentiated(
            x,
            lambda y: (
                y.register_post_accumulate_grad_hook(lambda t: [t.grad.mul_(x)][1:1] or None),
                y.sum().backward(),
            ),
        ),
    ),
    "cross": ("vector", lambda x: x[:3].cross(x[3:6], 0)),
    "float_power_": ("vector", lambda x: x.double().float_power_(2)),
    "geometric_": ("vector", lambda x: x.geometric_(0.5)),
    "is_nonzero": ("vector", lambda x: x[0].is_nonzero()),
    "item": ("vector", lambda x: x[0].item()),
    "prelu": ("vector", lambda x: x.prelu(x[:1])),
    "stft": ("vector", lambda x: x.stft(4, return_complex=True)),
    "istft": ("vector", lambda x: x.stft(4, return_complex=True).istft(4)),
    "lu_solve": ("matrix", lambda x: x.lu_solve(*torch.linalg.lu_factor(x))),
    "ormqr": ("matrix", lambda x: x.ormqr(x[0], x)),
    "orgqr": ("matrix", lambda x: x.orgqr(x[0])),
    "diagonal_scatter": ("matrix", lambda x: x.diagonal_scatter(x[0])),
    "select_scatter": ("matrix", lambda x: x.select_scatter(x[0], 0, 1)),
    "index_reduce": ("vector", lambda x: x.index_reduce(0, _ids(x), x, "prod")),
    "index_reduce_": ("vector", lambda x: x.index_reduce_(0, _ids(x), x.clone(), "prod")),
    "scatter_reduce_": ("vector", lambda x: x.scatter_reduce_(0, _ids(x), x.clone(), "prod")),
    "as_strided_scatter": ("vector", lambda x: x.as_strided_scatter(x[:2], (2,), (1,))),
    "unfold": ("vector", lambda x: x.unfold(0, 2, 2)),
    "dsplit": ("matrices", lambda x: x.dsplit(2)),
    "redistribute": ("vector", lambda x: marked(x).redistribute(placements=[_replicate()])),
    "to_local": ("vector", lambda x: marked(x).to_local()),
    "full_tensor": ("vector", lambda x: marked(x).full_tensor()),
    "map2_": ("vector", lambda x: x.map2_(x, x, lambda a, b, c: a)),
    "map_": ("vector", lambda x: x.map_(x, lambda a, b: a)),
    "storage": ("vector", lambda x: x.storage()),
    "untyped_storage": ("vector", lambda x: x.untyped_storage()),
    "set_": ("vector", lambda x: x.set_(x)),
    "new": ("vector", lambda x: x.new(2).shape),
    "share_memory_": ("vector", lambda x: x.share_memory_()),
    "__hash__": ("vector", lambda x: type(x.__hash__())),
    "_cdata": ("vector", lambda x: type(x._cdata)),
    "data_ptr": ("vector", lambda x: type(x.data_ptr())),
    "addbmm": ("matrices", lambda x: x[0].addbmm(x, x)),
    "addbmm_": ("matrices", lambda x: x[0].addbmm_(x, x.clone())),
    "addmv": ("matrix", lambda x: x[0].addmv(x, x[1])),
    "addmv_": ("matrix", lambda x: x[0].addmv_(x, x[1].clone())),
    "addr_": ("matrix", lambda x: x.addr_(x[0], x[1])),
    "mv": ("matrix", lambda x: x.mv(x[0])),
    "put_": ("vector", lambda x: x.put_(_ids(x), x * 2)),
    "index_add_": ("vector", lambda x: x.index_add_(0, _ids(x) // 2, x * 2)),
    "index_copy_": ("vector", lambda x: x.index_copy_(0, _ids(x), x * 2)),
    "index_put_": ("vector", lambda x: x.index_put_((_ids(x),), x * 2)),
    "scatter_add_": ("vector", lambda x: x.scatter_add_(0, _ids(x) // 2, x * 2)),
    "nonzero_static": ("bools", lambda x: x.nonzero_static(size=9)),
}
"""Names whose arguments the table above has not, or whose call tells more with others."""

OTHERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "float(x)": ("vector", lambda x: float(x.sum())),
    "int(x)": ("vector", lambda x: int(x.sum())),
    "bool(x)": ("vector", lambda x: bool(x.sum() > 12)),
    "complex(x)": ("vector", lambda x: complex(x.sum())),
    "range(x)": ("integers", lambda x: len(range(x[0]))),
    "list index": ("integers", lambda x: [5, 6, 7, 8][x[0]]),
    "if": ("vector", lambda x: x * 2 if x.sum() > 12 else x * 3),
    "if any": ("vector", lambda x: x * 2 if (x > 12).any() else x * 3),
    "in": ("vector", lambda x: 6.75 in x),
    "list": ("vector", lambda x: list(x)),
    "sum": ("vector", lambda x: sum(x)),
    "unpacked": ("vector", lambda x: [*x][1] * 2),
    "format": ("vector", lambda x: f"{x[0]:.2f} {x}"),
    "hash": ("vector", lambda x: isinstance(hash(x), int)),
    "torch.equal": ("vector", lambda x: torch.equal(x, x * 1) and torch.equal(x, x.abs())),
    "torch.allclose": ("vector", lambda x: torch.allclose(x, x / x[0] * -3.25)),
    "memoryview": ("vector", lambda x: np.asarray(memoryview(x))),
    "numpy detached": ("vector", lambda x: x.detach().numpy()),
    "numpy forced": ("vector", lambda x: x.numpy(force=True)),
    "np.asarray": ("vector", lambda x: np.asarray(x)),
    "np.array": ("vector", lambda x: np.array(x)),
    "np.sin": ("vector", lambda x: np.sin(x)),
    "np.from_dlpack": ("vector", lambda x: np.from_dlpack(x)),
    "jnp.asarray": ("vector", lambda x: jnp.asarray(x)),
    "jnp.sin": ("vector", lambda x: jnp.sin(x)),
    "jnp.from_dlpack": ("vector", lambda x: jnp.from_dlpack(x)),
    "jax.device_put": ("vector", lambda x: jax.device_put(x)),
    "jax.jit": ("vector", lambda x: jax.jit(lambda a: a * 2)(x)),
    "torch.from_dlpack": ("vector", lambda x: torch.from_dlpack(x)),
    "to_dlpack": (
        "vector",
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    ),
    "torch.tensor": ("vector", lambda x: torch.tensor(x)),
    "torch.tensor of a list": ("vector", lambda x: torch.tensor([x[0], x[1]])),
    "torch.as_tensor": ("vector", lambda x: torch.as_tensor(x)),
    "torch.asarray": ("vector", lambda x: torch.asarray(x)),
    "torch.asarray copied": ("vector", lambda x: torch.asarray(x, copy=True)),
    "torch.Tensor": ("vector", lambda x: torch.Tensor(x.tolist())),
    "new_tensor": ("vector", lambda x: x.new_tensor(x)),
    "Parameter": ("vector", lambda x: torch.nn.Parameter(x) * 2),
    "copy": ("vector", lambda x: copy.copy(x)),
    "deepcopy": ("vector", lambda x: copy.deepcopy(x)),
    "deepcopy of a module": ("vector", lambda x: dict(copy.deepcopy(module_of(x)).named_buffers())),
    "pickle": ("vector", lambda x: pickle.loads(pickle.dumps(x))),
    "ForkingPickler": ("vector", lambda x: pickle.loads(ForkingPickler.dumps(x))),
    "torch.save": ("vector", lambda x: _saved(x)),
    "torch.save of a module": ("vector", lambda x: _saved(module_of(x).state_dict())),
    "storage of torch.save": ("vector", lambda x: x.untyped_storage().tolist()),
    "typed storage": ("vector", lambda x: list(x._typed_storage())),
    "storage copied": ("vector", lambda x: x.untyped_storage().clone().tolist()),
    "storage on the CPU": ("vector", lambda x: x.untyped_storage().cpu().tolist()),
    "nbytes of the storage": ("vector", lambda x: x.untyped_storage().nbytes()),
    "set_ to the storage": ("vector", lambda x: torch.empty_like(x).set_(x.untyped_storage())),
    "data assigned": ("vector", lambda x: _assigned(x)),
    "to the CPU": ("vector", lambda x: x.to("cpu")),
    "to the CPU and back": ("vector", lambda x: x.to("cpu").to("jax") * 2),
    "to a dtype": ("vector", lambda x: x.to(torch.float64)),
    "to itself": ("vector", lambda x: x.to("jax", copy=True)),
    "type of the CPU": ("vector", lambda x: x.type("torch.FloatTensor")),
    "copied from the device": ("vector", lambda x: torch.zeros(8).copy_(x)),
    "masked": ("vector", lambda x: x[x > 0]),
    "at an index": ("integers", lambda x: torch.arange(30, device="jax")[x]),
    "at an item": ("integers", lambda x: torch.arange(30, device="jax")[x[0].item()]),
    "state_dict": ("vector", lambda x: module_of(x).state_dict()),
    "load_state_dict": ("vector", lambda x: _loaded(x)),
    "hooked": ("vector", lambda x: _differentiated(x, lambda y: (y * x).sum().backward())),
    "default_collate": ("vector", lambda x: torch.utils.data.default_collate([x, x])),
    "data of a parameter": ("vector", lambda x: torch.nn.Parameter(x).data * 2),
    "optimizer": ("vector", lambda x: _stepped(x)),
    "clip_grad_norm_": ("vector", lambda x: _clipped(x)),
    "address": ("vector", lambda x: x.data_ptr() == x.data_ptr()),
    "shards": ("vector", lambda x: x.local_shards),
    "shards of a marked": ("vector", lambda x: marked(x).local_shards),
    "no_grad": ("vector", lambda x: _frozen(x)),
    "inference_mode": ("vector", lambda x: _inferred(x)),
    "vmap": ("vector", lambda x: torch.func.vmap(lambda a: a * 2)(x)),
    "func.grad": ("vector", lambda x: torch.func.grad(lambda a: (a**2).sum())(x)),
    "func.jvp": ("vector", lambda x: torch.func.jvp(lambda a: a**2, (x,), (x,))[1]),
    "printed": ("vector", lambda x: print(x, file=io.StringIO())),
    "repr": ("vector", lambda x: repr(x)),
}
"""What takes a tensor and is no method: conversions of Python, NumPy, JAX and torch."""

NOT_CALLED = {
    "__class__": "the class",
    "__delattr__": "Python's",
    "__dir__": "Python's",
    "__getattribute__": "Python's",
    "__getstate__": "Python's, of what pickles take otherwise",
    "__init__": "Python's",
    "__init_subclass__": "Python's",
    "__new__": "makes a tensor of another one, which is itself",
    "__setattr__": "Python's",
    "__setstate__": "for pickles of old releases",
    "__subclasshook__": "Python's",
    "__torch_dispatch__": "what each operation passes",
    "__torch_function__": "what each operation passes",
    "_make_subclass": "torch's, of memory that the device lacks",
    "_make_wrapper_subclass": "torch's, of memory that the device lacks",
    "_aval": "the bridge's own",
    "_cached_spec": "the bridge's own",
    "_chain": "the bridge's own",
    "_layout_key": "the bridge's own",
    "_is_local": "the bridge's own",
    "_single_buffer": "the bridge's own",
    "_spec": "the bridge's own",
    "_storage": "the bridge's own",
    "__dict__": "the bridge's own",
    "__doc__": "text",
    "__module__": "text",
    "__annotations__": "text",
    "__weakref__": "Python's",
    "__coerce_same_metadata_as_tangent__": "torch's, of tangents",
    "__delitem__": "tensors have none",
    "jax": "an attribute while JAX traces, and no other time",
    "invalidate_spec_cache": "torch_xla's, of marks",
    "from_local": "DTensor's constructor",
    "load_local_shards_": "writes to shards, of a tensor that is marked",
    "cuda": "another device",
    "ipu": "another device",
    "mtia": "another device",
    "xpu": "another device",
    "record_stream": "of another device",
    "lstsq": "gone from torch",
    "symeig": "gone from torch",
    "eig": "gone from torch",
    "solve": "gone from torch",
    "reinforce": "gone from torch",
    "resize": "gone from torch",
    "resize_as": "gone from torch",
}
"""Names, by reason, that are not called."""

LAYOUTS_OF_TORCH = (
    *("_coalesced_", "_dimI", "_dimV", "_indices", "_nnz", "_sparse_mask_projection", "_values"),
    *("_nested_tensor_size", "_nested_tensor_storage_offsets", "_nested_tensor_strides"),
    *("_to_dense", "ccol_indices", "coalesce", "col_indices", "crow_indices", "indices"),
    *("int_repr", "is_coalesced", "q_per_channel_axis", "q_per_channel_scales"),
    *("q_per_channel_zero_points", "q_scale", "q_zero_point", "qscheme", "resize_as_sparse_"),
    *("row_indices", "smm", "sparse_mask", "sparse_resize_", "sparse_resize_and_clear_"),
    *("sspaddmm", "to_padded_tensor", "values"),
)
"""Of sparse, quantized and nested tensors, which are not on the device."""

PRIVATE_OF_TORCH = (
    *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "_dtensor__new__"),
    *("_philox_normal_", "_philox_uniform_", "_use_count"),
)
"""Not for users, with arguments of their own."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: for messages.
        kind: of its tensor.
        run: takes the tensor.
    """

    name: str
    kind: str
    run: Callable[[Any], Any]

    def __repr__(self) -> str:
        """The name."""
        return f"<{self.name} of {self.kind}>"


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name)


def _method(x: Any, name: str, arguments: Callable[[Any], tuple[Any, ...]]) -> Any:
    return getattr(x, name)(*arguments(x))


def methods() -> tuple[list[Call], list[str]]:
    """A call of each name of a tensor on the device; and the names that have none."""
    calls, missing = [], []
    tensor = torch.ones(8, device="jax")
    left_out = {*NOT_CALLED, *LAYOUTS_OF_TORCH, *PRIVATE_OF_TORCH}
    for name in dir(tensor):
        if name in left_out:
            continue
        if name in WITH_ARGUMENTS:
            calls.append(Call(name, *WITH_ARGUMENTS[name]))
        elif not callable(getattr(type(tensor), name, None)):
            kind = (
                "complex" if name in ("real", "imag") else "matrix" if len(name) < 3 else "vector"
            )
            calls.append(Call(name, kind, functools.partial(_attribute, name=name)))
        elif found := _accepted(name):
            kind, arguments = found
            run = functools.partial(_method, name=name, arguments=arguments)
            calls.append(Call(name, kind, run))
        else:
            missing.append(name)
    return calls, missing


def _accepted(name: str) -> tuple[str, Any] | None:
    for kind, make in KINDS.items():
        for arguments in ARGUMENTS:
            x = make(1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = getattr(x, name)(*arguments(x))
                except Exception:
                    continue
            if found is not NotImplemented:
                return kind, arguments
    return None


def conversions() -> Iterator[Call]:
    """What takes a tensor beside its methods."""
    for name, (kind, run) in OTHERS.items():
        yield Call(f"conversion: {name}", kind, run)


def module_of(x: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("kept", x)
    return module


def _loaded(x: torch.Tensor) -> torch.Tensor:
    module = module_of(torch.zeros_like(x))
    module.load_state_dict({"kept": x})
    return module.kept * 2


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def _assigned(x: torch.Tensor) -> torch.Tensor:
    other = torch.zeros_like(x)
    other.data = x
    return other * 2


def _frozen(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


def _inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        target = x * 2
    return target.clone()


def _stepped(x: torch.Tensor) -> torch.Tensor:
    weight = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([weight], lr=0.5)
    (weight * weight).sum().backward()
    optimizer.step()
    return weight.detach()


def _clipped(x: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(x.clone())
    (weight * weight).sum().backward()
    return torch.nn.utils.clip_grad_norm_([weight], 1.0), weight.grad


def _differentiated(x: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
    leaf = x.detach().clone().requires_grad_()
    run(leaf)
    return leaf.grad


@functools.cache
def on_mesh() -> Any:
    """All eight devices."""
    return iso.make_mesh((8,), ("a",))


def marked(x: torch.Tensor) -> Any:
    return xs.mark_sharding(x * 1, on_mesh(), ("a",))


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
