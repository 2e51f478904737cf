"""Modules and optimizers sharded over processes, to JAX and back, from the same buffers."""

import isoshard as iso
from tests.multi_process.exchanging import copies, device_mesh, pointer, raises, whole

STEPS = 5
RATE = 0.1


def start():
    iso.distributed.init_distributed(timeout=60)


def plain(bias=True):
    """The same module in every rank."""
    import torch

    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32, bias=bias),
        torch.nn.GELU(),
        torch.nn.Linear(32, 32, bias=bias),
        torch.nn.GELU(),
        torch.nn.Linear(32, 8, bias=bias),
    )


def sharded(**kwargs):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = plain()
    kwargs["mesh"] = device_mesh(torch.distributed.get_world_size())
    for layer in model:
        if len(list(layer.parameters())):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def batches(world):
    """Fifteen batches, whole: rank r takes the rth part."""
    import torch

    generator = torch.Generator().manual_seed(13)
    return [
        (torch.randn(16, 16, generator=generator), torch.randn(16, 8, generator=generator))
        for _ in range(3 * STEPS)
    ]


def torch_steps(model, optimizer, given, world):
    """Steps of data-parallel training; the mean loss over all ranks."""
    import torch

    losses = []
    for x, y in given:
        rows = slice(16 // world.size * world.rank, 16 // world.size * (world.rank + 1))
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def jax_step(transform):
    """One jitted step on the arrays handed over, with a plain twin of the module as the loss."""
    import jax
    import jax.numpy as jnp
    import optax

    twin = iso.jax_function(plain())

    def step(params, state, x, y):
        def loss_of(params):
            return jnp.mean((twin(params, x) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def kept(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)

    def run(params, state, given):
        import numpy as np

        losses = []
        mesh = next(iter(params.values())).sharding.mesh
        whole_mesh = jax.NamedSharding(mesh, iso.P())
        jitted = jax.jit(step, out_shardings=(kept(params), kept(state), whole_mesh))
        for x, y in given:
            x, y = (
                jax.make_array_from_callback(
                    tuple(t.shape),
                    jax.NamedSharding(mesh, iso.P(mesh.axis_names)),
                    lambda index, t=t: np.asarray(t)[index],
                )
                for t in (x, y)
            )
            params, state, loss = jitted(params, state, x, y)
            losses.append(float(loss.addressable_data(0)))
        return params, state, losses

    return run


def own_pointers(model):
    return {name: p.to_local().data_ptr() for name, p in model.named_parameters()}


def check_five_by_torch_five_by_jax_five_by_torch(world):
    import numpy as np
    import optax
    import torch

    given = batches(world)
    alone = sharded()
    expected = torch_steps(alone, torch.optim.SGD(alone.parameters(), RATE), given, world)

    model = sharded()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(model.named_parameters(), RATE)
    losses = torch_steps(model, optimizer, given[:STEPS], world)
    run = jax_step(transform := optax.sgd(RATE))
    with copies(0):
        arrays = iso.to_jax(model, copy=False)
        assert {n: pointer(a) for n, a in arrays.items()} == own_pointers(model)
    arrays, _, more = run(arrays, transform.init(arrays), given[STEPS : 2 * STEPS])
    losses += more
    with copies(0):
        iso.checkpoint.load_arrays(model, arrays, copy=False)
        assert {n: pointer(a) for n, a in arrays.items()} == own_pointers(model)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    del arrays
    losses += torch_steps(model, optimizer, given[2 * STEPS :], world)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(
            one.full_tensor().detach(), other.full_tensor().detach(), atol=1e-5
        )


def check_with_momentum_handed_over(world):
    import numpy as np
    import optax
    import torch

    given = batches(world)
    alone = sharded()
    expected = torch_steps(
        alone, torch.optim.SGD(alone.parameters(), RATE, momentum=0.9), given, world
    )
    for first in (STEPS, 0):  # 0: torch has no momentum yet, and gets JAX's
        model = sharded()
        optimizer = torch.optim.SGD(model.named_parameters(), RATE, momentum=0.9)
        losses = torch_steps(model, optimizer, given[:first], world)
        transform = optax.sgd(RATE, momentum=0.9)
        run = jax_step(transform)
        with copies(0):
            arrays = iso.to_jax(model, copy=False)
            state = transform.init(arrays)
            if first:
                momentum = iso.to_jax(optimizer, copy=False)["momentum_buffer"]
                own = {
                    n: optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()
                }
                assert {n: pointer(a) for n, a in momentum.items()} == {
                    n: t.to_local().data_ptr() for n, t in own.items()
                }
                state = (state[0]._replace(trace=momentum), *state[1:])
        arrays, state, more = run(arrays, state, given[first : 2 * STEPS])
        losses += more
        momentum = state[0].trace
        with copies(0):
            iso.checkpoint.load_arrays(model, arrays, copy=False)
            iso.checkpoint.load_arrays(optimizer, {"momentum_buffer": momentum}, copy=False)
        for name, param in model.named_parameters():
            buffer = optimizer.state[param]["momentum_buffer"]
            assert buffer.to_local().data_ptr() == pointer(momentum[name])
            assert buffer.placements == param.placements
        losses += torch_steps(model, optimizer, given[2 * STEPS :], world)
        np.testing.assert_allclose(losses, expected, rtol=5e-5)


def check_adam_handed_over(world):
    import numpy as np
    import optax
    import torch

    given = batches(world)
    alone = sharded()
    expected = torch_steps(alone, torch.optim.AdamW(alone.parameters(), 1e-2), given, world)
    model = sharded()
    optimizer = torch.optim.AdamW(model.named_parameters(), 1e-2)
    losses = torch_steps(model, optimizer, given[:STEPS], world)
    transform = optax.adamw(1e-2, weight_decay=1e-2)
    arrays, held = iso.to_jax(model, copy=False), iso.to_jax(optimizer, copy=False)
    state = transform.init(arrays)
    count = next(iter(held["step"].values())).astype("int32")
    adam = state[0]._replace(mu=held["exp_avg"], nu=held["exp_avg_sq"], count=count)
    arrays, state, more = jax_step(transform)(arrays, (adam, *state[1:]), given[STEPS : 2 * STEPS])
    losses += more
    adam = state[0]
    steps = {name: adam.count.astype("float32") for name in arrays}
    iso.checkpoint.load_arrays(model, arrays)
    tree = {"exp_avg": adam.mu, "exp_avg_sq": adam.nu, "step": steps}
    iso.checkpoint.load_arrays(optimizer, tree)
    losses += torch_steps(model, optimizer, given[2 * STEPS :], world)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def check_copy_into_the_memory_there_is(world):
    import jax
    import torch

    model = sharded()
    before = own_pointers(model)
    arrays = iso.to_jax(model, copy=True)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda a: a * 2, tree))(arrays)
    with copies(len(doubled)):
        iso.checkpoint.load_arrays(model, doubled, copy=True)
    assert own_pointers(model) == before
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), 2 * plain().get_parameter(name)), name
    with copies(0):  # what is there already is left alone
        iso.checkpoint.load_arrays(model, iso.to_jax(model), copy=False)


def check_uneven_parameters(world):
    import jax
    import numpy as np
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    reference = torch.nn.Linear(6, 5)
    model = torch.nn.Linear(6, 5)
    model.load_state_dict(reference.state_dict())
    fully_shard(model, mesh=device_mesh(world.size))
    x = torch.randn(4, 6)
    torch.distributed.broadcast(x, 0)
    with copies(0):  # FSDP2 pads, and that memory is shared
        arrays = iso.to_jax(model, copy=False)
    assert all(isinstance(a, iso.UnevenArray) for a in arrays.values())
    np.testing.assert_array_equal(whole(arrays["weight"]), reference.weight.detach())
    before = own_pointers(model)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda a: a * 2, tree))(arrays)
    with raises(iso.errors.CopyError, "weight", "bias", "FSDP2"):
        iso.checkpoint.load_arrays(model, doubled, copy=False)
    iso.checkpoint.load_arrays(model, doubled)
    assert own_pointers(model) == before
    np.testing.assert_allclose(model(x).detach(), 2 * reference(x).detach(), rtol=1e-5)


def check_parallelize_module_with_fsdp(world):
    import numpy as np
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = device_mesh(world.size // 2, 2, names=("dp", "tp"))
    reference, model = plain(), plain()
    model.append(torch.nn.BatchNorm1d(8))
    reference.append(torch.nn.BatchNorm1d(8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with raises(iso.errors.CopyError, "5.num_batches_tracked", "int64"):
        iso.to_jax(model, copy=False)
    arrays = iso.to_jax(model)  # tensor parallel alone
    assert arrays["0.weight"].sharding.spec == iso.P("tp")
    assert arrays["2.weight"].sharding.spec == iso.P(None, "tp")
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 16)
    torch.distributed.broadcast(x, 0)
    with copies(1):  # the counter of batches
        arrays = iso.to_jax(model)
        own = dict(model.named_parameters())
        for name, array in arrays.items():
            assert array.sharding.mesh.axis_names == ("dp", "tp"), name
            if name in own:
                assert pointer(array) == own[name].to_local().data_ptr()
            np.testing.assert_array_equal(whole(array), reference.state_dict()[name])
    assert arrays["0.weight"].sharding.spec == iso.P(("tp", "dp"))
    assert arrays["5.running_var"].sharding.spec == iso.P()
    assert iso.sharding_of(model) == {name: array.sharding for name, array in arrays.items()}
    import jax

    kept = jax.tree.map(lambda leaf: leaf.sharding, arrays)
    moved = jax.jit(
        lambda tree: jax.tree.map(lambda a: a + 1 if a.dtype == "float32" else a, tree),
        out_shardings=kept,
    )(arrays)
    iso.checkpoint.load_arrays(model, moved)
    for tensor in reference.state_dict().values():
        tensor += tensor.is_floating_point()
    np.testing.assert_allclose(model(x).detach(), reference(x).detach(), rtol=2e-4, atol=1e-4)


def check_a_module_left_whole_by_its_forward(world):
    import torch

    model = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(torch.randn(4, 16))
    arrays = iso.to_jax(model, copy=False)
    assert {n: pointer(a) for n, a in arrays.items()} == own_pointers(model)


def check_all_faults_in_one_error(world):
    import jax
    import torch

    model = sharded()
    before = own_pointers(model)
    arrays = iso.to_jax(model)
    whole_mesh = jax.NamedSharding(arrays["0.weight"].sharding.mesh, iso.P())
    wrong = dict(arrays)
    wrong["0.weight"] = jax.jit(lambda a: a, out_shardings=whole_mesh)(arrays["0.weight"])
    wrong["2.weight"] = arrays["2.weight"].astype("bfloat16")
    wrong["4.weight"] = arrays["0.weight"]
    wrong["4.bias"] = 3
    with raises(
        iso.ShardingError,
        "4 leaves",
        "0.weight is sharded as",
        "2.weight is float32",
        "4.weight is",
        "4.bias needs a jax.Array, not int",
    ):
        iso.checkpoint.load_arrays(model, wrong)
    assert own_pointers(model) == before
    with raises(iso.ShardingError, "no tensors named 9.weight", "0.weight"):
        iso.checkpoint.load_arrays(model, {"9.weight": arrays["0.weight"]})
    with raises(iso.errors.CopyError, "same memory"):
        one = jax.jit(lambda a: a + 1)(arrays["0.bias"])
        iso.checkpoint.load_arrays(model, {"0.bias": one, "2.bias": one}, copy=False)
    with raises(iso.ShardingError, "no DTensor", "fully_shard"):
        iso.checkpoint.load_arrays(torch.nn.Linear(2, 2), {})
    with raises(TypeError, "module or optimizer"):
        iso.checkpoint.load_arrays(3, {})
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with raises(iso.ShardingError, "kind"):
        iso.checkpoint.load_arrays(optimizer, arrays)
    with raises(iso.ShardingError, "by torch", "iso.to_jax"):
        iso.shard(model, whole_mesh.mesh, iso.P())
    with raises(TypeError, "SGD"):
        iso.shard(optimizer, whole_mesh.mesh, iso.P())


def check_rows_that_the_ranks_do_not_divide(world):
    """As the vocabulary of GPT-2: a loss for whole arrays is lifted to arrays in blocks."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(3)
        rows = 4 * world.size + 1
        return torch.nn.Sequential(torch.nn.Embedding(rows, 8), torch.nn.Linear(8, rows))

    alone, model_ = model(), fully_shard(model(), mesh=device_mesh(world.size))
    tokens = torch.arange(7)
    wanted = alone(tokens).square().mean()
    wanted.backward()
    twin = iso.jax_function(model())
    loss = iso.domain.lift(lambda params, tokens: jnp.mean(twin(params, tokens) ** 2))
    params = iso.to_jax(model_)
    assert all(isinstance(array, iso.UnevenArray) for array in params.values())
    found, gradients = jax.value_and_grad(loss)(params, np.arange(7))
    np.testing.assert_allclose(found.addressable_data(0), wanted.detach(), rtol=1e-6)
    for name, parameter in alone.named_parameters():
        np.testing.assert_allclose(whole(gradients[name]), parameter.grad, atol=1e-6)
