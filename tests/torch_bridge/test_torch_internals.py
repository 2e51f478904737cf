"""Each private name of torch, called as isoshard calls it."""

import importlib
import io
import pkgutil
import sys
import typing

import pytest
import torch

import isoshard.torch_bridge
import isoshard.torch_bridge as xs
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.runtime.private_names import PrivateNameError, release
from isoshard.torch_bridge import _torch_internals as internals
from isoshard.torch_bridge._torch_internals import (
    accelerators,
    checkpoint_types,
    device_slot,
    dict_versions,
    dispatcher,
    dtensor_fields,
    dynamo_hooks,
    dynamo_values,
    higher_order_ops,
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
    return release(torch.__version__) >= release(row.known.partition(" ")[0])


def add():
    return torch.ops.aten.add.Tensor


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


@checks("torch.utils._device._device_constructors")
def functions_of_a_device():
    assert device_slot.device_functions is not None
    assert {torch.ones, torch.tensor} < set(device_slot.device_functions())


@checks("torch._ops.OpOverload", "torch._ops.OpOverload._schema")
def operators():
    assert type(add()) is dispatcher.OpOverload
    assert [a.name for a in internals.schema_of(add()).arguments] == ["self", "other", "alpha"]
    assert internals.schema_of(torch.ops.aten.add_.Tensor).is_mutable


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
    assert dict_versions._PLACE is not None
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


@checks("torch.utils._python_dispatch.TorchDispatchMode")
def dispatch_mode():
    seen = []

    class Mode(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    one = torch.ones(1)
    with Mode():
        one + one
    assert seen == [add()]


@checks(
    "torch._higher_order_ops.cond.cond_op",
    "torch._higher_order_ops.while_loop.while_loop_op",
    "torch._higher_order_ops.while_loop.while_loop_stack_output_op",
    "torch._higher_order_ops.scan.scan_op",
    "torch._higher_order_ops.map.map_impl",
)
def operators_over_functions():
    rows = ("COND", "WHILE", "STACKED_WHILE", "SCAN", "MAP")
    for operator in (getattr(higher_order_ops, row).found() for row in rows):
        assert callable(operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd])
        assert xs.XLAShardedTensor in operator.python_key_table  # ours


@checks("torch._higher_order_ops.while_loop.while_loop", "torch._dynamo.dont_skip_tracing")
def loops_of_values():
    follow = higher_order_ops.FOLLOWED.found()
    start = (torch.tensor(3), torch.tensor(1))
    step = follow(lambda n, x: (n - 1, x * 2))
    assert higher_order_ops.while_loop(follow(lambda n, x: n > 0), step, start)[1].item() == 8
    torch.compiler.reset()


@checks("torch._C._dispatch_has_kernel_for_dispatch_key")
def kernels():
    assert dispatcher.has_kernel("aten::linear", "CompositeImplicitAutograd")
    assert not dispatcher.has_kernel("aten::add.Tensor", "PrivateUse1")


@checks("torch.DispatchKey", "torch.DispatchKeySet")
def pinning():
    with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):  # torch's own kernel says so
        torch.ones(2).pin_memory("cuda")


@checks("torch._C._dispatch_has_backend_fallback", "torch._C._ExcludeDispatchKeyGuard")
def autocast():
    key = torch.DispatchKey.AutocastPrivateUse1
    assert dispatcher.has_fallback(key)  # ours
    weight = torch.ones(2, 2, device="jax")
    with torch.autocast("jax", torch.bfloat16):
        assert (weight @ weight).dtype == torch.bfloat16
        with dispatcher.excluding(torch.DispatchKeySet(key)):
            assert (weight @ weight).dtype == torch.float32


@checks("torch._C._AutoDispatchBelowAutograd")
def below_autograd():
    x = torch.ones(2, requires_grad=True)
    with dispatcher.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


@checks(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_set_dispatch_key_excluded",
)
def excluded_keys():
    key = torch.DispatchKey.FuncTorchBatched
    before = dispatcher.is_excluded(key)
    dispatcher.set_excluded(key, not before)
    try:
        assert dispatcher.is_excluded(key) is not before
    finally:
        dispatcher.set_excluded(key, before)


@checks("torch._C._len_torch_function_stack", "torch._C._len_torch_dispatch_stack")
def modes():
    before = dispatcher.open_functions(), dispatcher.open_dispatches()
    with torch.device("cpu"), internals.TorchDispatchMode():
        inside = dispatcher.open_functions(), dispatcher.open_dispatches()
    assert inside == (before[0] + 1, before[1] + 1)


@checks("torch._decomp.decomposition_table")
def decompositions():
    silu = dispatcher.decompositions[torch.ops.aten.silu_backward.default]
    one = torch.ones(1)
    torch.testing.assert_close(silu(one, one), torch.ops.aten.silu_backward(one, one))


@checks(
    "torch._prims_common.elementwise_dtypes",
    "torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND",
)
def promotion():
    metas = [torch.empty(2, device="meta", dtype=d) for d in (torch.int32, torch.bfloat16)]
    computed, given = dispatcher.elementwise_dtypes(
        *metas, type_promotion_kind=dispatcher.Promotion.DEFAULT
    )
    assert (computed, given) == (torch.float32, torch.bfloat16)


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


def test_tensors_need_no_more_than_a_public_name(monkeypatch):
    """What serves in the place of `_disabled_torch_function_impl`."""

    class Plain(torch.Tensor):
        __torch_function__ = classmethod(tensor_fields._plain_function)

    one = torch.ones(1).as_subclass(Plain)
    assert type(torch.add(one, other=one)) is torch.Tensor


@checks("torch._C._swap_tensor_impl")
def swapping():
    one, two = torch.ones(1), torch.zeros(2)
    tensor_fields.swap_contents(one, two)
    assert (one.shape, two.shape) == ((2,), (1,))


@checks("torch.Tensor._is_view", "torch.Tensor._base")
def views():
    one = torch.ones(2, device="jax")
    assert not tensor_fields.is_view(one) and tensor_fields.is_view(one[0])
    assert tensor_fields.viewed(one) is None and tensor_fields.viewed(one[0]) is one


@checks("torch.nn.Module._load_from_state_dict")
def loading():
    seen = []

    class Module(torch.nn.Linear):
        def _load_from_state_dict(self, state, prefix, *args):
            seen.append((sorted(state), prefix))
            module_fields.LOAD.of(super())(state, prefix, *args)

    module = torch.nn.Sequential(Module(1, 1))
    module.load_state_dict({"0.weight": torch.full((1, 1), 7.0), "0.bias": torch.zeros(1)})
    assert seen == [(["0.bias", "0.weight"], "0.")] and module[0].weight.item() == 7.0


@checks("torch._C._nn._parse_to")
def arguments_of_to():
    device, dtype, non_blocking, order = tensor_fields.parse_to("jax", torch.int8)
    assert (str(device), dtype, non_blocking, order) == ("jax", torch.int8, False, None)


@checks("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")
def hooks_of_tensors():
    leaf = torch.ones(1, requires_grad=True)
    assert not tensor_fields.backward_hooks(leaf) and not tensor_fields.gradient_hooks(leaf)
    leaf.register_hook(print)
    leaf.register_post_accumulate_grad_hook(print)
    assert list(tensor_fields.backward_hooks(leaf).values()) == [print]
    assert list(tensor_fields.gradient_hooks(leaf).values()) == [print]
    assert [list(hooks.values()) for hooks in tensor_fields.all_hooks(leaf)] == [[print]] * 2
    assert tensor_fields._both_hooks(leaf) == tensor_fields.all_hooks(leaf)


@checks("torch.autograd.graph.Node._sequence_nr")
def sequence_numbers():
    x = torch.ones(1, requires_grad=True)
    first, second = x * 1, x * 1
    numbers = [tensor_fields.sequence_number(one.grad_fn) for one in (first, second)]
    assert numbers[0] < numbers[1]


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


@checks("torch.autograd.Function._forward_cls")
def function_of_a_context():
    seen = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(tensor_fields.function_of(type(ctx)))
            return x.clone()

    Same.apply(torch.ones(1, requires_grad=True))
    assert seen == [Same]


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
    "torch.nn.Module._parameters",
    "torch.nn.Module._buffers",
    "torch.nn.Module._modules",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
)
def fields_of_modules():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert module_fields.own_modules(model) == {"0": model[0]}
    assert list(module_fields.own_parameters(model[0])) == ["weight", "bias"]
    assert module_fields.own_buffers(model[0])["running_mean"] is model[0].running_mean
    model.register_forward_hook(print)
    model.register_forward_pre_hook(repr)
    assert list(module_fields.forward_hooks(model).values()) == [print]
    assert list(module_fields.forward_pre_hooks(model).values()) == [repr]


@checks("torch.nested._internal.nested_tensor.NestedTensor")
def class_of_jagged_tensors():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert type(rows) is tensor_fields.jagged_class
    with pytest.raises(NotImplementedError, match="no nested tensors"):
        rows.to("jax")


@checks("torch.nn.Module._apply")
def way_of_to():
    layer = torch.nn.Linear(1, 1)
    weight = layer.weight
    assert module_fields.APPLY.of(layer)(lambda tensor: tensor.to("jax")) is layer
    assert layer.weight is weight and weight.device.type == "jax"


@checks("torch.nn.Module.state_dict._metadata")
def versions():
    state = torch.nn.BatchNorm1d(1).state_dict()
    assert module_fields.state_versions(state)[""]["version"] >= 2


@checks(
    "torch.amp.GradScaler._lazy_init_scale_growth_tracker",
    "torch.amp.GradScaler._maybe_opt_step",
    "torch.amp.GradScaler._scale",
    "torch.amp.GradScaler._growth_tracker",
    "torch.amp.GradScaler._per_optimizer_states",
)
def scalers():
    scaler = torch.amp.GradScaler("jax", init_scale=4.0, growth_interval=1)
    weight = torch.ones(1, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert module_fields.SCALE.of(scaler) is None
    scaler.scale(weight.sum()).backward()
    assert module_fields.SCALE.of(scaler).tolist() == 4.0
    assert module_fields.GROWTH.of(scaler).tolist() == 0
    scaler.unscale_(optimizer)
    [state] = module_fields.scaler_states(scaler).values()
    assert weight.grad.tolist() == [1.0]
    module_fields.SCALER_STEP.of(scaler)(optimizer, state)
    assert weight.tolist() == [0.0]
    unused = torch.amp.GradScaler("jax", init_scale=8.0)
    module_fields.SCALER_FIRST_USE.of(unused)(torch.device("jax"))
    assert module_fields.SCALE.of(unused).tolist() == 8.0
    assert unused.state_dict()[module_fields.GROWTH.attribute] == 0


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
    assert "lazy" in device_slot.FOREACH_DEVICES.found()()
    assert "cuda" in device_slot.FUSED_DEVICES.found()()
    assert torch.ones in device_slot.device_functions()


@checks("torch.utils._pytree")
def nested():
    flat, structure = traced.pytree.tree_flatten(((1, [2]), {"a": 3}))
    assert traced.pytree.tree_unflatten(flat, structure) == ((1, [2]), {"a": 3})
    assert traced.pytree.tree_map(lambda n: n + 1, {"a": 3}) == {"a": 4}


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
    assert isoshard.torch_bridge.XLAShardedTensor in traced.TRACED_TYPES.found()
    with torch._subclasses.FakeTensorMode() as mode:
        elements = torch.empty(2, device="meta")
        fake = traced.NEW_FAKE.found()(
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
    from isoshard.torch_bridge import dynamo as ours

    torch.compiler.reset()  # dynamo compiles one function a limited number of times
    seen = []
    compile = dynamo_hooks.AOT_AUTOGRAD.found()(
        fw_compiler=lambda graph, inputs: seen.append(dynamo_hooks.current_compilation()) or graph
    )
    function = torch.compile(lambda x: x + 1, backend=compile)
    assert function(torch.ones(1)).tolist() == [2.0]
    assert seen and seen != [None]
    kinds = dynamo_hooks.TRACERS.found()()
    assert isoshard.torch_bridge.XLAShardedTensor in kinds
    assert dynamo_hooks.TRACE_TENSOR.found()
    assert kinds[isoshard.torch_bridge.Generator] is dynamo_hooks.TRACE_OBJECT.found()
    tensor = torch.ones(1, device="jax")
    assert dynamo_hooks.SUBCLASS.found()(tensor) is None
    assert dynamo_hooks.AS_TANGENT.of(tensor)(None, None) is tensor
    dynamo_hooks.LEAVE_ALONE.found()("isoshard.core")
    assert torch._dynamo.trace_rules.check(make_mesh)  # skipped
    graph = ours.Graph(torch.fx.symbolic_trace(torch.nn.Identity()), [tensor])
    assert traced.BOXED.of(graph) is True


@checks(
    "torch._dynamo.variables.builder.VariableBuilder._id_dispatch",
    "torch._dynamo.variables.tensor.TensorVariable.call_method",
    "torch._dynamo.variables.tensor.TensorVariable.tp_getattro_impl",
    "torch._dynamo.variables.builtin.BuiltinVariable.call_isinstance",
    "torch._dynamo.variables.misc.LambdaVariable",
    "torch._dynamo.variables.base.VariableTracker",
    "torch._dynamo.variables.builder.wrap_fx_proxy",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
    "torch._dynamo.guards.install_guard",
    "torch._dynamo.guards.GuardBuilder",
    "torch._dynamo.source.AttrSource",
    "torch._dynamo.exc.unimplemented",
    "torch._dynamo.exc.FakeTensorObservedException",
    "torch._dynamo.exc.raise_observed_exception",
    "torch._dynamo.variables.functions.UserFunctionVariable",
    "torch._dynamo.variables.user_defined.UserDefinedObjectVariable",
)
def dynamo_of_layouts():
    from isoshard.torch_bridge.distributed import init_device_mesh
    from isoshard.torch_bridge.distributed.tensor import DTensor, Shard, distribute_tensor
    from isoshard.torch_bridge.distributed.tensor.parallel import (
        ColwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("jax", (8,))
    layer = parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel())

    def function(x):
        whole = layer(x).full_tensor()
        assert isinstance(whole, DTensor)
        try:
            return x.jax()  # which it has while JAX traces
        except AttributeError:
            return DTensor.from_local(whole.to_local() * 8, mesh)

    def of(placements):
        return lambda x: x.redistribute(mesh, placements)

    def computed(x):
        return (x * 2).to_local()

    torch.compiler.reset()
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x).cpu(), (layer(x) * 8).cpu())
    for wrong, error in ((of([]), dynamo_values.REFUSED), (computed, dynamo_values.END_GRAPH)):
        assert error.found()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be in a graph here"):
            torch.compile(wrong, backend="aot_eager", fullgraph=True)(x)


@checks(
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.MemberType.USE_REAL",
    "torch._dynamo.variables.script_object.CustomClassObjectVariable.tp_getattro_impl",
)
def dynamo_of_meshes():
    from isoshard.torch_bridge.distributed import init_device_mesh
    from isoshard.torch_bridge.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("jax", (8,))
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])

    def function(x):
        assert x.device_mesh.ndim == 1
        return x * mesh.size()

    torch.compiler.reset()
    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert run(x).tolist() == [8.0] * 8


@checks(
    "torch._C._accelerator_getAccelerator",
    "torch._C._get_accelerator",
    "torch._utils._is_privateuse1_backend_available",
    "torch.nn.parallel.data_parallel._get_available_device_type",
    "torch.autograd._supported_activities",
    *(row.path for row in accelerators.QUESTIONS.values()),
)
def the_accelerator():
    """More of it: test_accelerator.py."""
    torch.ones(1, device="jax")
    assert accelerators.ACCELERATOR.found()() == torch.device("jax")
    assert accelerators.ACCELERATOR_OR_CPU.found()() == torch.device("cpu")
    if is_here(accelerators.OUTSIDE_THE_TREE):
        assert accelerators.OUTSIDE_THE_TREE.found()() is True
    assert accelerators.REPLICATED_OVER.found()() is None
    assert {str(a) for a in accelerators.PROFILED.found()()} == {"ProfilerActivity.CPU"}
    arguments = {
        **dict.fromkeys(("exchangeDevice", "maybeExchangeDevice", "setDeviceIndex"), (0,)),
        **dict.fromkeys(("getDeviceCapability", "getDeviceStats", "getMemoryInfo"), (0,)),
        **dict.fromkeys(("getStream", "synchronizeDevice"), (0,)),
        "setStream": (None,),
    }
    for name, question in accelerators.QUESTIONS.items():
        if not name.startswith("reset") and is_here(question):
            question.found()(*arguments.get(name, ()))
    for name in ("resetAccumulatedStats", "resetPeakStats"):
        with pytest.warns(UserWarning, match="it is not reset"):
            accelerators.QUESTIONS[name].found()(0)


@checks("torch._C._host_emptyCache")
def page_locked_memory():
    """Only builds for CUDA have it, and only they ask for it."""
    if torch.backends.cuda.is_built():
        assert accelerators.EMPTY_HOST_CACHE() is None
    else:
        with pytest.raises(PrivateNameError, match="gives back page-locked memory of CUDA"):
            accelerators.EMPTY_HOST_CACHE()


@checks("torch.distributed.tensor.DTensor._local_tensor")
def local_tensors(mesh):
    tensor = torch.distributed.tensor.distribute_tensor(torch.ones(2), mesh)
    local = torch.zeros(2)
    dtensor_fields.LOCAL_TENSOR.put(tensor, local)
    assert dtensor_fields.LOCAL_TENSOR.of(tensor) is local
    assert tensor.to_local().tolist() == [0.0, 0.0]


@checks("torch.distributed._functional_collectives.AsyncCollectiveTensor")
def unfinished(mesh):
    kind = dtensor_fields.UNFINISHED.found(())
    assert kind(torch.ones(2)).wait().tolist() == [1.0, 1.0]


@checks(
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
)
def a_layout_as_torch_keeps_it():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    t = xs.mark_sharding(torch.ones(4, 8, device="jax"), mesh, ("x", None))
    spec = t._spec
    assert isinstance(spec, dtensor_fields.DTENSOR_SPEC.found())
    assert isinstance(spec.tensor_meta, dtensor_fields.TENSOR_META.found())
    assert spec.placements == t.placements and spec.tensor_meta.shape == t.shape


@checks("torch.distributed.tensor.placement_types._StridedShard")
def strided():
    placement = dtensor_fields.STRIDED_SHARD.found()(1, split_factor=2)
    assert (placement.dim, placement.split_factor) == (1, 2)


@checks("torch.distributed.tensor._api")
def asking():
    module = dtensor_fields.ASKING.found()
    assert module.distribute_tensor is torch.distributed.tensor.distribute_tensor


@checks("torch.distributed.tensor.parallel.ParallelStyle._apply")
def styles(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel

    layer = torch.nn.Linear(2, 2)
    assert dtensor_fields.APPLY_STYLE.of(ColwiseParallel())(layer, mesh) is layer
    assert isinstance(layer.weight, torch.distributed.tensor.DTensor)


@checks("torch.DisableTorchFunctionSubclass")
def functions_without_overrides():
    x = torch.ones(1, device="jax").as_subclass(xs.XLAShardedTensor)
    with undocumented.DisableTorchFunctionSubclass():
        assert (x + 1).tolist() == [2.0]


@checks(
    "torch.is_autocast_enabled",
    "torch.get_autocast_dtype",
    "torch.is_autocast_cache_enabled",
    "torch.set_autocast_dtype",
    "torch.is_anomaly_enabled",
)
def switches():
    before = undocumented.get_autocast_dtype("jax")
    undocumented.SET_AUTOCAST_DTYPE.found()("jax", torch.bfloat16)
    try:
        with torch.autocast("jax", cache_enabled=False), torch.autograd.set_detect_anomaly(True):
            assert undocumented.is_autocast_enabled("jax")
            assert undocumented.get_autocast_dtype("jax") is torch.bfloat16
            assert not undocumented.caches_casts()
            assert undocumented.is_anomaly_enabled()
    finally:
        undocumented.SET_AUTOCAST_DTYPE.found()("jax", before)
    assert not undocumented.is_autocast_enabled("jax") and not undocumented.is_anomaly_enabled()
    assert undocumented.caches_casts()


@checks("torch.fx.node.has_side_effect")
def side_effects():
    """A call whose result is not used stays in a graph."""

    def unused(_):
        return None

    undocumented.has_side_effect(unused)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(unused, (x,))
    graph.output(x)
    graph.eliminate_dead_code()
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


@checks("torch.nn.parameter.UninitializedTensorMixin")
def lazy_modules():
    layer = torch.nn.LazyLinear(2)
    assert isinstance(layer.weight, undocumented.Uninitialized)
    assert not isinstance(torch.nn.Linear(1, 1).weight, undocumented.Uninitialized)
    assert isinstance(torch.nn.LazyBatchNorm1d().running_mean, undocumented.Uninitialized)


@checks("torch.utils.weak.WeakIdKeyDictionary", "torch.utils.weak.WeakTensorKeyDictionary")
def weak_dictionaries():
    for make in (undocumented.WeakIdKeyDictionary, undocumented.WeakTensorKeyDictionary):
        tensor, known = torch.ones(2), make()
        known[tensor] = 1
        assert known[tensor] == 1 and torch.ones(2) not in known
        del tensor
        assert not len(known)


@checks("torch.version.xpu")
def builds():
    assert undocumented.XPU.found(None) is None


@checks(
    "torch.distributed.Backend.backend_list",
    "torch.distributed.rendezvous.register_rendezvous_handler",
)
def process_groups():
    import isoshard.torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401

    assert {"gloo", "xla"} < set(undocumented.BACKENDS.found())
    with pytest.raises(RuntimeError, match="already registered"):
        undocumented.RENDEZVOUS.found()("xla", print)


@checks(
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.STATE_DICT_TYPE",
    "torch.distributed.checkpoint.planner.LoadItemType",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.storage.WriteResult",
)
def checkpoints():
    types = checkpoint_types
    chunk = types.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    index = types.MetadataIndex("w", chunk.offsets, 0)
    assert index == types.MetadataIndex("w", chunk.offsets) and index.fqn == "w"
    known = types.Metadata({"w": types.BytesStorageMetadata()})
    assert isinstance(known.state_dict_metadata["w"], types.BytesStorageMetadata)
    assert types.LoadItemType.BYTE_IO is not types.LoadItemType.TENSOR
    assert types.WriteItemType.SHARD is not types.WriteItemType.TENSOR
    assert types.WriteResult(index, 8, None).size_in_bytes == 8
    assert typing.get_origin(types.STATE_DICT_TYPE) is dict


ROWS = {row.path: row for row in internals.NAMES}


@pytest.fixture
def mesh():
    """One process that is a group, and its mesh."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", ROWS)
def test_the_name_does_what_it_is_used_for(path, request):
    if not is_here(ROWS[path]):
        pytest.skip(f"torch {torch.__version__} has it not: {ROWS[path].known}")
    check = CHECKS[path]
    check(*[request.getfixturevalue("mesh")] * check.__code__.co_argcount)


def test_every_check_is_of_a_row_and_every_module_is_read_here():
    assert not set(CHECKS) - set(ROWS)
    for module in pkgutil.iter_modules(internals.__path__):
        importlib.import_module(f"{internals.__name__}.{module.name}")
    assert len(list(internals.NAMES)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_is_said_of_a_name_makes_sentences(row):
    text = str(row.error())
    assert f"torch {torch.__version__} has no {row.path}, which {row.why}: {row.without}. " in text
    assert text.endswith(f"torch {row.known} are known to have it; install one of them.")
    assert not row.why.endswith(".") and not row.without.endswith(".")
