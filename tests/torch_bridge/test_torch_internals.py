"""Each private name of torch is there; where its meaning matters, it does what isoshard expects."""

import importlib
import inspect
import io
import pkgutil
import sys

import pytest
import torch

import isoshard.torch_bridge
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.runtime.private_names import PrivateNameError, release
from isoshard.torch_bridge import _torch_internals as internals
from isoshard.torch_bridge._torch_internals import (
    accelerators,
    device_slot,
    dict_versions,
    dynamo_hooks,
    module_fields,
    tensor_fields,
    traced,
    undocumented,
)
from isoshard.torch_bridge.engine.recording import tensor_changes

CHECKS = {}


def checks(*paths):
    """Say of which rows a function is the test."""

    def note(function):
        assert not {*paths} & {*CHECKS}
        CHECKS.update(dict.fromkeys(paths, function))
        return function

    return note


def is_here(row):
    """Whether the installed torch is not older than the name."""
    return release(torch.__version__) >= release(row.versions.partition(" ")[0])


@checks("torch.nn.Parameter._is_param")
def parameters():
    """A tensor on the device is a parameter by what its `__dict__` has, and nothing else."""
    assert tensor_fields.PARAMETER_FIELD == "_is_param"
    tensor = torch.ones(2, device="jax")
    assert not isinstance(tensor, torch.nn.Parameter)
    tensor_changes.namespace(tensor)[tensor_fields.PARAMETER_FIELD] = True
    assert isinstance(tensor, torch.nn.Parameter)
    layer = torch.nn.Linear(2, 2)
    layer.weight = tensor
    assert layer.weight is tensor


@checks("torch._ops.OpOverload._schema")
def schemas():
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable and [a.name for a in schema.arguments] == ["self", "other", "alpha"]


class Slotless:
    pass


@checks("torch._C._dynamo.guards.dict_version")
def dictionary_versions():
    """Each way of changing a dictionary gives another version; looking gives none."""
    version = dict_versions.dict_version
    if sys.version_info >= (3, 12):
        assert version is None
        return
    thing = Slotless()
    thing.a = 0
    space = vars(thing)
    table = {"a": 0}
    known = {version(space), version(table)}
    together = dict_versions.DictVersions([space, table])
    assert dict_versions._OFFSET is not None
    assert together.read().tolist() == [version(space), version(table)]

    def store(number):
        for _ in range(100):  # specialized by then
            thing.a = object()
            thing.a = number

    for change in (
        lambda: store(1),
        lambda: setattr(thing, "b", 1),
        lambda: delattr(thing, "b"),
        lambda: space.update(a=2),
        lambda: space.__setitem__("a", 3),
        lambda: exec("a = 5", space),
        lambda: space.pop("a"),
        lambda: space.setdefault("a", 4),
        lambda: space.__ior__({"a": 6}),
        lambda: space.popitem(),
        space.clear,
    ):
        before = version(space)
        change()
        assert version(space) not in {before, *known}
        _ = (thing.__dict__, list(space.items()), space.get("a"), getattr(thing, "a", None))
        assert together.read().tolist() == [version(vars(thing)), version(table)]
        known.add(version(space))
    assert version(table) in known


@checks("torch.Tensor._make_wrapper_subclass", "torch._C._disabled_torch_function_impl")
def wrappers():
    seen = []

    class Wrapper(torch.Tensor):
        __torch_function__ = tensor_fields.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return torch.zeros(2, 3)

    made = tensor_fields.make_wrapper_subclass(
        Wrapper,
        (2, 3),
        strides=(1, 2),
        storage_offset=4,
        dtype=torch.int8,
        device=torch.device("lazy", 0),
        _extra_dispatch_keys=torch.DispatchKeySet(torch.DispatchKey.AutocastPrivateUse1),
    )
    assert (made.shape, made.stride(), made.storage_offset()) == ((2, 3), (1, 2), 4)
    assert torch.neg(made).tolist() == torch.zeros(2, 3).tolist()
    assert seen == [torch.ops.aten.neg.default]


@checks("torch.Tensor._is_view", "torch.Tensor._base")
def views():
    one = torch.ones(2, device="jax")
    assert not tensor_fields.is_view(one) and tensor_fields.is_view(one[0])
    assert tensor_fields.viewed(one) is None and tensor_fields.viewed(one[0]) is one


@checks("torch._C._autograd._get_sequence_nr")
def next_sequence_numbers():
    x = torch.ones(1, requires_grad=True)
    number = tensor_fields.next_sequence_number()
    assert tensor_fields.sequence_number((x * 1).grad_fn) == number
    assert tensor_fields.next_sequence_number() == number + 1


@checks("torch._C._current_autograd_node")
def nodes():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(tensor_fields.current_node()))
    y.backward()
    assert tensor_fields.current_node() is None and seen != [None]


@checks("torch.autograd.forward_ad._current_level")
def levels():
    assert tensor_fields.forward_levels() == -1
    with torch.autograd.forward_ad.dual_level():
        assert tensor_fields.forward_levels() == 0


@checks("torch._utils._rebuild_parameter", "torch._utils._rebuild_device_tensor_from_cpu_tensor")
def pickled():
    file = io.BytesIO()
    torch.save(torch.nn.Linear(2, 1).to("jax").weight, file)
    for name in (tensor_fields.rebuild_parameter, tensor_fields.rebuild_from_cpu):
        assert name.__name__.encode() in file.getvalue()
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=True), torch.nn.Parameter)


@checks(
    "torch._C._get_privateuse1_backend_name",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch._register_device_module",
    "torch.random.manual_seed.<device module>._is_in_bad_fork",
)
def the_device():
    assert device_slot.device_name() == "jax"
    assert callable(device_slot.set_up_device) and callable(device_slot.set_device_module)
    assert torch.get_device_module("jax") is torch.get_device_module("lazy")
    assert device_slot.IN_BAD_FORK.of(torch.get_device_module("jax"))() is False


@checks(
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
    "torch.optim.optimizer._get_fused_kernels_supported_devices",
)
def lists():
    ours = isoshard.torch_bridge.XLAShardedTensor
    assert ours in device_slot.OPTIMIZED_TYPES and ours in device_slot.CLIPPED_TYPES
    assert "lazy" in device_slot.FOREACH_DEVICES.resolve()()
    assert "cuda" in device_slot.FUSED_DEVICES.resolve()()
    assert torch.ones in device_slot.device_functions()


@checks("torch.compiler._is_compiling_flag")
def compiling():
    assert not torch.compiler.is_compiling()
    traced.COMPILING.put(torch.compiler, True)
    try:
        assert torch.compiler.is_compiling()
    finally:
        traced.COMPILING.put(torch.compiler, False)


@checks(
    "torch.fx.experimental.proxy_tensor.HANDLED_TYPES",
    "torch._subclasses.fake_tensor.FakeTensor.__new__",
)
def tracers():
    assert isoshard.torch_bridge.XLAShardedTensor in traced.TRACED_TYPES.resolve()
    with torch._subclasses.FakeTensorMode() as mode:
        elements = torch.empty(2, device="meta")
        fake = traced.NEW_FAKE.resolve()(
            traced.NEW_FAKE.owner, mode, elements, torch.device("jax", 0)
        )
    assert fake.device == torch.device("jax", 0)


@checks(
    "torch._dynamo.backends.common.aot_autograd",
    "torch._dynamo.trace_rules.add",
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch",
    "torch._dynamo.variables.builder.VariableBuilder.wrap_tensor",
    "torch._dynamo.variables.builder.VariableBuilder.wrap_user_defined",
    "torch._dynamo.variables.builder.infer_subclass_type",
    "torch._guards.CompileContext.current_compile_id",
    "torch.Tensor.__coerce_same_metadata_as_tangent__",
    "torch._functorch.aot_autograd.<compiled graph>._boxed_call",
)
def dynamo():
    from isoshard.torch_bridge.dynamo import dynamo as ours

    torch.compiler.reset()  # dynamo compiles one function a limited number of times
    seen = []
    compile = dynamo_hooks.AOT_AUTOGRAD.resolve()(
        fw_compiler=lambda graph, inputs: seen.append(dynamo_hooks.current_compilation()) or graph
    )
    function = torch.compile(lambda x: x + 1, backend=compile)
    assert function(torch.ones(1)).tolist() == [2.0]
    assert seen and seen != [None]
    kinds = dynamo_hooks.TRACERS.resolve()()
    assert isoshard.torch_bridge.XLAShardedTensor in kinds
    assert dynamo_hooks.TRACE_TENSOR.resolve()
    assert kinds[isoshard.torch_bridge.Generator] is dynamo_hooks.TRACE_OBJECT.resolve()
    tensor = torch.ones(1, device="jax")
    assert dynamo_hooks.SUBCLASS.resolve()(tensor) is None
    assert dynamo_hooks.AS_TANGENT.of(tensor)(None, None) is tensor
    dynamo_hooks.LEAVE_ALONE.resolve()("isoshard.core")
    assert torch._dynamo.trace_rules.check(make_mesh)  # skipped
    graph = ours.Graph(torch.fx.symbolic_trace(torch.nn.Identity()), [tensor])
    assert traced.BOXED.of(graph) is True


@checks("torch._C._host_emptyCache")
def page_locked_memory():
    """Only builds for CUDA have it, and only they ask for it."""
    if torch.backends.cuda.is_built():
        assert accelerators.EMPTY_HOST_CACHE() is None
    else:
        with pytest.raises(PrivateNameError, match="gives back page-locked memory of CUDA"):
            accelerators.EMPTY_HOST_CACHE()


@checks("torch.version.xpu")
def builds():
    assert undocumented.XPU.resolve(None) is None


@checks("torch.nn.Module.state_dict._metadata")
def versions():
    state = torch.nn.BatchNorm1d(1).state_dict()
    assert module_fields.state_versions(state)[""]["version"] >= 2


for _module in pkgutil.iter_modules(internals.__path__):
    importlib.import_module(f"{internals.__name__}.{_module.name}")
ROWS = {row.path: row for row in internals.NAMES}


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda one: one.__name__)
def test_names_do_what_they_are_used_for(check):
    rows = [ROWS[path] for path, function in CHECKS.items() if function is check]
    if not any(map(is_here, rows)):
        pytest.skip(f"torch {torch.__version__} has it not: {rows[0].known}")
    check()


def test_every_name_is_here_or_has_a_check():
    for path, row in ROWS.items():
        if path not in CHECKS and is_here(row) and not inspect.isclass(row.owner):
            assert row.resolve() is not None  # many other tests use it, and what instances carry
    assert len(list(internals.NAMES)) == len(ROWS) and not set(CHECKS) - set(ROWS)


def test_the_error_for_a_missing_name():
    for row in ROWS.values():
        text = str(row.error())
        sentence = f"torch {torch.__version__} has no {row.path}, which {row.why}: {row.without}. "
        assert sentence in text
        assert text.endswith(f"torch {row.versions} are known to have it; install one of them.")
