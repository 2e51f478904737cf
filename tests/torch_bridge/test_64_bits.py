"""64-bit dtypes are what they say on the device, whatever `jax_enable_x64` is for JAX itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.spmd import annotate_custom_sharding

LARGE = 2**40 + 3
THIRD = 1 / 3
WIDE = [torch.int64, torch.uint64, torch.float64, torch.complex128]


@pytest.fixture(autouse=True)
def jax_stays_as_it_is():
    before = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == before


@pytest.fixture
def line():
    return iso.make_mesh((8,), ("x",))


def numbers(dtype):
    base = torch.arange(8, dtype=torch.float64) / 3
    if dtype.is_complex:
        return torch.complex(base, base.flip(0))
    if dtype.is_floating_point:
        return base
    return (torch.arange(8, dtype=torch.int64) + LARGE).to(dtype)


MADE = {
    "moved": lambda: torch.tensor([LARGE]).to("jax"),
    "full": lambda: torch.full((2,), LARGE, device="jax"),
    "arange": lambda: torch.arange(LARGE, LARGE + 2, device="jax"),
    "masked": lambda: torch.zeros(2, dtype=torch.int64, device="jax").masked_fill(
        torch.ones(2, dtype=torch.bool, device="jax"), LARGE
    ),
    "product": lambda: torch.tensor([3 * 10**9], device="jax") * 3,
    "bounds": lambda: torch.tensor([2**63 - 1, -(2**63)], device="jax"),
    "cast": lambda: torch.tensor([3e9], device="jax").long(),
    "float64": lambda: torch.ones(2, dtype=torch.float64, device="jax") / 3,
    "sum of doubles": lambda: (torch.ones(3, device="jax") / 3).sum(dtype=torch.float64),
    "a double beside": lambda: torch.ones(2, device="jax") * torch.tensor(THIRD).double(),
    "complex128": lambda: torch.tensor([1 + 2j], dtype=torch.complex128, device="jax") / 3,
    "bits": lambda: torch.tensor([1.5], device="jax").double().view(torch.int64),
    "pairs": lambda: torch.tensor([1.5, 2.5], device="jax").view(torch.int64),
    "nonzero": lambda: torch.tensor([0, 3], device="jax").nonzero(),
    "sort": lambda: torch.tensor([LARGE, 1], device="jax").sort().values,
    "cumsum": lambda: torch.full((3,), LARGE, device="jax").cumsum(0),
    "shift": lambda: torch.tensor([1], device="jax") << 40,
    "unsigned": lambda: torch.tensor([2**64 - 1], dtype=torch.uint64, device="jax"),
    "hash": lambda: torch.hash_tensor(torch.ones(3, device="jax")),
}


def test_as_on_the_cpu(monkeypatch):
    got = {name: make() for name, make in MADE.items()}
    with monkeypatch.context() as on_cpu:
        for maker in ("tensor", "ones", "zeros", "full", "arange"):
            make = getattr(torch, maker)
            on_cpu.setattr(
                torch, maker, lambda *a, make=make, **k: make(*a, **{**k, "device": "cpu"})
            )
        on_cpu.setattr(torch.Tensor, "to", lambda self, *a, **k: self)
        wanted = {name: make() for name, make in MADE.items()}
    for name, want in wanted.items():
        assert got[name].device.type == "jax" and got[name].dtype == want.dtype, name
        torch.testing.assert_close(got[name].cpu(), want, rtol=1e-15, atol=0, msg=name)


@pytest.mark.parametrize("dtype", WIDE[::3])
class TestEveryVerb:
    def test_moved_there_and_back(self, dtype, line):
        want = numbers(dtype)
        laid = iso.shard(want, line, P("x"))
        uneven = iso.shard(want[:5], line, P("x"), uneven="pad")
        assert laid.dtype == dtype
        moved = iso.reshard(laid, P())
        for one in (want.to("jax"), laid, moved, iso.full(laid), laid.clone(), laid.detach()):
            torch.testing.assert_close(one.cpu(), want, rtol=0, atol=0)
        for one in (uneven, uneven.clone(), iso.full(uneven)):
            torch.testing.assert_close(one.cpu(), want[:5], rtol=0, atol=0)
        pieces = [piece.data for piece in iso.local_shards(laid, framework="torch")]
        torch.testing.assert_close(torch.cat(pieces), want, rtol=0, atol=0)
        assert (
            str(jnp.dtype(str(dtype).removeprefix("torch.")))
            in str(iso.sharding.typeof(laid)).lower()
        )

    def test_as_it_is_in_jax_by_its_name(self, dtype):
        name = str(dtype).removeprefix("torch.")
        want = numbers(dtype)
        array = iso.to_jax(want.to("jax"), dtype=name)
        assert array.dtype == name
        np.testing.assert_array_equal(np.asarray(array), want.numpy())
        torch.testing.assert_close(iso.to_torch(array).cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("format", ["zarr", "torch"])
def test_saved_and_restored(format, line, tmp_path):
    want = {str(dtype): numbers(dtype) for dtype in WIDE}
    saved = {name: iso.shard(one, line, P("x")) for name, one in want.items()}
    iso.save(tmp_path / "a", saved, format=format)
    for device in ("jax", "cpu"):
        like = {name: torch.zeros_like(one, device=device) for name, one in want.items()}
        for name, got in iso.restore(tmp_path / "a", like).items():
            assert (got.dtype, got.device.type) == (want[name].dtype, device)
            torch.testing.assert_close(got.cpu(), want[name], rtol=0, atol=0)


def test_in_a_compiled_step():
    want = [numbers(dtype) for dtype in (torch.int64, torch.float64, torch.complex128)]

    def double(*given):
        return [x + x for x in given]

    given = [one.to("jax") for one in want]
    for step in (xs.compile(double), torch.compile(double, backend="isoshard")):
        for _ in range(2):
            for got, one in zip(step(*given), want, strict=True):
                torch.testing.assert_close(got.cpu(), one + one, rtol=0, atol=0)


class TestForJax:
    """JAX in 32 bits has arrays of 32 bits, with the same values, or learns why not."""

    def test_integers_that_fit(self, counted):
        found = iso.to_jax(torch.arange(4, device="jax"))
        assert found.dtype == jnp.int32 and found.tolist() == [0, 1, 2, 3]
        assert counted("narrowed") == 1 and counted("narrowed_bytes") == 16

    @pytest.mark.parametrize("device", ["cpu", "jax"])
    def test_integers_that_do_not(self, device):
        with pytest.raises(iso.errors.CopyError, match=rf"int64 .*{LARGE}.* int32.*dtype='int64'"):
            iso.to_jax(torch.tensor([1, LARGE], device=device))
        with pytest.raises(iso.errors.CopyError, match=rf"ids: int64 .*-{LARGE}.* int32"):
            iso.to_jax({"ids": torch.tensor([-LARGE], device=device)})

    @pytest.mark.parametrize("device", ["cpu", "jax"])
    def test_floats(self, device):
        x = torch.ones(2, dtype=torch.float64, device=device) / 3
        with pytest.raises(
            iso.errors.CopyError, match=r"float64 would lose .*jax_enable_x64.*'float32'"
        ):
            iso.to_jax(x)
        assert iso.to_jax(x, dtype="float32").dtype == jnp.float32
        assert iso.to_jax(x, dtype="float64").dtype == np.float64
        with jax.enable_x64(True):
            assert iso.to_jax(x)[0] == THIRD

    def test_memory_is_shared_where_the_dtype_stays(self):
        x = torch.arange(4, device="jax")
        with pytest.raises(iso.errors.CopyError, match=r"int64 is int32 in JAX"):
            iso.to_jax(x, copy=False)
        with jax.enable_x64(True):
            first, again = iso.to_jax(x, copy=False), iso.to_jax(x, copy=False)
            assert first.unsafe_buffer_pointer() == again.unsafe_buffer_pointer()
        wide = iso.to_jax(x, dtype="int64", copy=False)
        assert wide.unsafe_buffer_pointer() == first.unsafe_buffer_pointer()

    def test_functions_of_jax_compute_as_jax_is_set(self):
        f = iso.torch_function(lambda x: x + 1)
        assert f(torch.arange(3, device="jax")).dtype == torch.int32
        with pytest.raises(TypeError, match=r"given torch\.float64.*jax_enable_x64.*\.float\(\)"):
            f(torch.ones(2, dtype=torch.float64, device="jax"))
        with jax.enable_x64(True):
            assert f(torch.arange(3, device="jax")).dtype == torch.int64
            assert f(torch.ones(2, dtype=torch.float64, device="jax")).dtype == torch.float64

    @pytest.mark.parametrize("compiled", [False, True])
    def test_torch_code_in_jax_computes_in_its_dtypes(self, compiled):
        def code(x):
            assert x.dtype == torch.int32
            return (x.long() + LARGE - LARGE), x.double().mul(THIRD).float(), x.argmax()

        f = iso.jax_function(code)
        found = (jax.jit(f) if compiled else f)(jnp.arange(3))
        assert [one.dtype for one in found] == [jnp.int32, jnp.float32, jnp.int32]
        assert found[0].tolist() == [0, 1, 2]

    def test_results_of_64_bits_say_what_to_do(self):
        with pytest.raises(iso.errors.CopyError, match=r"float64 would lose precision"):
            jax.jit(iso.jax_function(lambda x: x.double()))(jnp.ones(3))

    def test_buffers_of_64_bits_go_through_a_scan(self):
        f = iso.jax_function(torch.nn.BatchNorm1d(3))
        assert f.buffers["num_batches_tracked"].dtype == jnp.int32
        assert f.shapes["num_batches_tracked"].dtype == jnp.int32

        def body(buffers, x):
            y, buffers = f.with_buffers(f.parameters, buffers, x)
            return buffers, y.sum()

        buffers, _ = jax.lax.scan(body, f.buffers, jnp.ones((5, 4, 3)))
        assert buffers["num_batches_tracked"] == 5


def test_gradients_of_gradients_in_float64():
    def program(device):
        torch.manual_seed(0)
        x = torch.randn(3, 4, dtype=torch.float64).to(device).requires_grad_()
        w = torch.randn(4, 2, dtype=torch.float64).to(device).requires_grad_()
        y = torch.nn.functional.gelu(x @ w).logsumexp(0) * torch.sin(x).sum()
        first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        return *first, *torch.autograd.grad(sum(one.cos().sum() for one in first), (x, w))

    for got, want in zip(program("jax"), program("cpu"), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-12, atol=1e-12)


def test_domain_verbs_keep_64_bits(line):
    even = iso.shard(torch.arange(8) + LARGE, line, P("x"))
    uneven = iso.shard(torch.arange(5) + LARGE, line, P("x"), uneven="pad")
    for x in (even, uneven):
        found = iso.domain.roll(x, 1, 0)
        assert found.dtype == torch.int64
        assert found.tolist() == torch.roll(x.cpu(), 1, 0).tolist()


def test_random_numbers_of_the_whole_range():
    torch.manual_seed(0)
    found = torch.randint(0, LARGE, (1000,), device="jax").cpu()
    assert found.dtype == torch.int64 and 2**39 < found.max() < LARGE and found.min() >= 0
    whole = torch.empty(1000, dtype=torch.int64, device="jax").random_().cpu()
    assert whole.max() > 2**62 and whole.min() >= 0
    both = torch.empty(1000, dtype=torch.int64, device="jax").random_(-(2**63), None).cpu()
    assert both.min() < -(2**62) and both.max() > 2**62
    fine = torch.rand(1000, dtype=torch.float64, device="jax").cpu()
    assert (fine != fine.float().double()).any() and torch.randn(
        3, device="jax"
    ).dtype.itemsize == 4


def test_one_program_over_two_meshes_of_the_same_devices():
    grid, row = xs.Mesh(range(8), (2, 4), ("x", "y")), xs.Mesh(range(8), (8,), ("z",))
    whole = torch.arange(64).reshape(8, 8) << 33
    first = xs.mark_sharding(whole.to("jax"), grid, ("x", "y"))
    xs.sync()
    second = xs.mark_sharding(whole.to("jax"), row, ("z", None))
    xs.sync()
    sum_of_both = annotate_custom_sharding(first + 2 * second, row, (None, "z"))
    assert torch.equal(sum_of_both.cpu(), 3 * whole)


def test_pieces_of_unequal_size_are_loaded_back():
    row = xs.Mesh(range(8), (8,), ("z",))
    whole = torch.arange(9) << 33
    laid = xs.mark_sharding(whole.to("jax"), row, ("z",), sizes="chunk")
    shards = laid.local_shards
    for shard in shards:
        shard.data *= -1
    laid.load_local_shards_(shards)
    assert torch.equal(laid.cpu(), -whole)
