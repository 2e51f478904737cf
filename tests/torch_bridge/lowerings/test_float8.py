"""Floats of eight bits: torch's conversions bit by bit, dtypes of scales, products with scales."""

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

KINDS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
E4M3, E5M2, E8M0 = KINDS[0], KINDS[1], KINDS[4]
WIDER = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bits(got, want):
    """Equal to the last bit, but for which NaN."""
    assert got.dtype == want.dtype
    got, want = got.cpu(), want.cpu()
    same = torch.zeros(want.shape, dtype=torch.bool)
    if want.dtype.is_floating_point:
        same = got.float().isnan() & want.float().isnan()
        kind = INTEGERS[want.dtype.itemsize]
        got, want = got.view(kind), want.view(kind)
    wrong = ((got != want) & ~same).nonzero().flatten()[:8]
    assert not len(wrong), (wrong.tolist(), got[wrong].tolist(), want[wrong].tolist())


def patterns(kind):
    return torch.arange(256, dtype=torch.uint8).view(kind)


def awkward(dtype):
    """Every boundary of each kind: numbers, halves between them and their neighbours; extremes."""
    if not dtype.is_floating_point:
        return torch.tensor([0, 1, -1, 3, 17, 60, 100, -128, 127], dtype=dtype)
    numbers = torch.cat([patterns(kind).double() for kind in KINDS])
    numbers = numbers[numbers.isfinite()].unique()
    halves = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, halves])
    random = torch.from_numpy(np.random.default_rng(0).standard_normal(256))
    extremes = [
        0.0,
        448.0,
        464.0,
        465.0,
        480.0,
        57344.0,
        61440.0,
        61441.0,
        1e30,
        1e-30,
        1e-45,
        6e-39,
    ]
    values = torch.cat(
        [near, near * (1 + 2e-16), near * (1 - 2e-16), near * (1 + 1e-7), near * (1 - 1e-7)]
        + [random * scale for scale in (1e-3, 1.0, 100.0, 1e5)]
        + [torch.tensor([*extremes, float("inf"), float("nan")], dtype=torch.float64)]
    )
    return torch.cat([values, -values]).to(dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_pattern_as_torch_reads_it(kind):
    x = patterns(kind)
    on_device = x.to("jax")
    assert_bits(on_device, x)
    assert torch.equal(on_device.view(torch.uint8).cpu(), x.view(torch.uint8))
    for dtype in [*WIDER[:4], *KINDS]:
        assert_bits(on_device.to(dtype), x.to(dtype))
    finite = x.float().isfinite() & (x.float().abs() < 100)
    assert_bits(on_device.to(torch.int32)[finite.to("jax")], x.to(torch.int32)[finite])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", WIDER, ids=str)
def test_every_boundary_is_rounded_as_torch_rounds_it(dtype, kind):
    x = awkward(dtype)
    want = x.to(kind)
    assert_bits(x.to("jax").to(kind), want)
    assert_bits(xs.compile(lambda x: x.to(kind))(x.to("jax")), want)


def test_scales_of_powers_of_two_exist_on_the_device():
    for make in (
        lambda device: torch.zeros(3, dtype=E8M0, device=device),
        lambda device: torch.ones(3, dtype=E8M0, device=device),
        lambda device: torch.full((3,), 3.0, dtype=E8M0, device=device),
        lambda device: torch.tensor([1.0, 5.0], dtype=E8M0, device=device),
        lambda device: patterns(E8M0).to(device)[3:9].reshape(2, 3).t().contiguous(),
        lambda device: torch.cat([patterns(E8M0).to(device)[:3]] * 2),
    ):
        assert torch.equal(make("jax").view(torch.uint8).cpu(), make("cpu").view(torch.uint8))
    assert torch.empty(3, dtype=E8M0, device="jax").dtype == E8M0
    assert "float8_e8m0fnu" in repr(torch.ones(3, dtype=E8M0, device="jax"))


def test_scales_on_a_mesh_in_jax_and_on_disk(tmp_path):
    mesh = iso.make_mesh((8,), ("x",))
    x = patterns(E8M0)
    sharded = iso.shard(x, mesh, P("x"))
    array = iso.to_jax(sharded)
    assert array.dtype == jax.numpy.float8_e8m0fnu and array.sharding.spec == P("x")
    assert_bits(iso.to_torch(array), x)
    assert_bits(iso.to_torch(jax.device_put(np.asarray(array)), device="cpu"), x)
    iso.save(tmp_path / "scales", {"x": sharded})
    into = {"x": iso.shard(torch.ones(256, dtype=E8M0), mesh, P())}
    assert_bits(iso.restore(tmp_path / "scales", into)["x"], x)
    torch.save(sharded, tmp_path / "file")
    assert_bits(torch.load(tmp_path / "file", weights_only=False), x)


def factors(kinds=(E4M3, E4M3)):
    random = np.random.default_rng(1)
    left, right = (torch.from_numpy(random.standard_normal(s)) for s in ((16, 32), (24, 32)))
    return left.float().to(kinds[0]), right.float().to(kinds[1]).t()


SCALES = {
    "tensor": (torch.tensor(0.5), torch.tensor(3.0)),
    "1 x 1": (torch.full((1, 1), 0.25), torch.tensor([0.1])),
    "row": (torch.linspace(0.1, 2, 16)[:, None], torch.linspace(3, 0.2, 24)[None]),
}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
def test_products_with_scales(scales, bias):
    a, b = factors()
    scale_a, scale_b = SCALES[scales]
    bias = None if bias is None else torch.linspace(-1, 1, 24).to(bias)
    exact = (a.double() * scale_a) @ (b.double() * scale_b)
    exact = exact if bias is None else exact + bias.double()

    def product(a, b, scale_a, scale_b, dtype):
        here = None if bias is None else bias.to(a.device)
        return torch._scaled_mm(a, b, scale_a, scale_b, bias=here, out_dtype=dtype)

    there = [t.to("jax") for t in (a, b, scale_a, scale_b)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, E4M3, None):
        got = product(*there, dtype)
        want = product(a, b, scale_a, scale_b, dtype)
        assert got.dtype == want.dtype
        eps = torch.finfo(want.dtype).eps
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=eps, atol=1e-5)
        inside = exact.clamp(-448, 448) if want.dtype == E4M3 else exact
        torch.testing.assert_close(got.cpu().double(), inside, rtol=eps, atol=2e-3 + eps / 8)


def test_products_on_a_mesh_compiled_and_of_other_kinds():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    a, b = factors((E5M2, E4M3))
    scale_a, scale_b = SCALES["row"]
    want = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    step = xs.compile(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.float32))
    given = [
        iso.shard(a, mesh, P("x", None)),
        iso.shard(b, mesh, P(None, "y")),
        iso.shard(scale_a, mesh, P("x")),
        iso.shard(scale_b, mesh, P(None, "y")),
    ]
    for _ in range(2):
        torch.testing.assert_close(step(*given).cpu(), want, rtol=1e-6, atol=1e-5)


F = torch.nn.functional
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}


def blocks_of(matrix, block, dtype=torch.float32):
    """Scales of the blocks of a matrix, and what they multiply its elements by."""
    rows, columns = (-(-size // b) for size, b in zip(matrix.shape, block, strict=True))
    powers = np.random.default_rng(rows).integers(-3, 3, (rows, columns))
    scales = torch.from_numpy(2.0**powers).to(dtype)
    full = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return scales, full[: matrix.shape[0], : matrix.shape[1]]


def large(rows):
    random = np.random.default_rng(rows)
    return torch.from_numpy(random.standard_normal((rows, 300))).float().to(E4M3)


@pytest.mark.parametrize("first", ["1x128", "128x128"])
@pytest.mark.parametrize("second", ["1x128", "128x128"])
def test_products_with_scales_of_blocks(first, second):
    a, b = large(130), large(200)
    (scale_a, full_a), (scale_b, full_b) = (
        blocks_of(x, BLOCKS[kind]) for x, kind in ((a, first), (b, second))
    )
    want = (a.double() * full_a) @ (b.double() * full_b).T
    there = [x.to("jax") for x in (a, b.t(), scale_a, scale_b.t())]
    got = torch._scaled_mm(*there, out_dtype=torch.float32)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-3)
    kinds = [getattr(F.ScalingType, f"BlockWise{kind}") for kind in (first, second)]
    x, y, scale_a, scale_b = there
    got = F.scaled_mm(x, y, scale_a, kinds[0], scale_b, kinds[1], output_dtype=torch.float32)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-3)


def swizzled(scales):
    """Scales in the order that tensor cores read them, with padding."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows // 128, 128, columns // 4, 4).permute(0, 2, 1, 3)
    flat = tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1)
    return flat.view(scales.dtype)


@pytest.mark.parametrize("swizzle", ["NO_SWIZZLE", "SWIZZLE_32_4_4"])
@pytest.mark.parametrize(("kind", "dtype"), [("1x32", E8M0), ("1x16", E4M3)], ids=str)
def test_products_of_mx_formats(kind, dtype, swizzle):
    a, b = large(130), large(40)
    (scale_a, full_a), (scale_b, full_b) = (blocks_of(x, BLOCKS[kind], dtype) for x in (a, b))
    want = (a.double() * full_a) @ (b.double() * full_b).T
    if swizzle != "NO_SWIZZLE":
        scale_a, scale_b = swizzled(scale_a), swizzled(scale_b)
    kind, swizzle = getattr(F.ScalingType, f"BlockWise{kind}"), getattr(F.SwizzleType, swizzle)
    x, y, scale_a, scale_b = (x.to("jax") for x in (a, b.t(), scale_a, scale_b))
    got = F.scaled_mm(
        x, y, scale_a, kind, scale_b, kind, swizzle, swizzle, output_dtype=torch.float32
    )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-3)


def test_grouped_products_with_scales_of_rows():
    random = np.random.default_rng(0)

    def float8(*shape):
        return torch.from_numpy(random.standard_normal(shape)).float().to(E4M3)

    def scales(*shape):
        return torch.from_numpy(random.uniform(0.5, 2, shape)).float()

    offs = torch.tensor([16, 32, 64], dtype=torch.int32)
    spans = [slice(start, end) for start, end in ((0, 16), (16, 32), (32, 64))]
    a, b, sa, sb = float8(64, 32), float8(3, 16, 32), scales(64), scales(3, 16)
    rows, columns = a.double() * sa[:, None], b.double() * sb[:, :, None]
    want = torch.cat([rows[span] @ columns[g].T for g, span in enumerate(spans)])
    jax_offs = offs.to("jax")
    there = [x.to("jax") for x in (a, b.transpose(1, 2), sa, sb)]
    got = torch._scaled_grouped_mm(*there, offs=jax_offs, out_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)
    row = F.ScalingType.RowWise
    x, y, scale_a, scale_b = there
    got = F.scaled_grouped_mm(x, y, scale_a, row, scale_b, row, offs=jax_offs)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)
    inner_a, inner_b, sa, sb = float8(8, 64), float8(16, 64), scales(24), scales(48)
    want = torch.stack(
        [
            (inner_a[:, span].double() @ inner_b[:, span].double().T)
            * sa.view(3, 8, 1)[g]
            * sb.view(3, 1, 16)[g]
            for g, span in enumerate(spans)
        ]
    )
    there = [x.to("jax") for x in (inner_a, inner_b.t(), sa, sb)]
    got = torch._scaled_grouped_mm(*there, offs=jax_offs)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=2e-2)


def test_products_that_cannot_be():
    a, b = (t.to("jax") for t in factors())
    one, rows = torch.tensor(1.0, device="jax"), torch.ones(16, 1, device="jax")
    for args, message in (
        ((a, b, rows, one), r"float32 scales, one for each matrix or \(16, 1\) and \(1, 24\)"),
        ((a, b, one.double(), one), r"scale_a \(\) of torch\.float64"),
        ((a.float(), b, one, one), r"got torch\.float32; quantize first"),
        ((a, b.t(), one, one), "shapes cannot be multiplied"),
        ((a, b, one, one, rows), "Bias must be size 24"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            torch._scaled_mm(*args)


F4 = torch.float4_e2m1fn_x2


def test_packed_floats_of_four_bits_are_moved_viewed_and_saved(tmp_path):
    x = torch.arange(32, dtype=torch.uint8).view(F4)
    there = x.to("jax")
    assert there.dtype == F4
    for made in (
        lambda x: x,
        lambda x: x.clone(),
        lambda x: x[3:7],
        lambda x: x.view(4, 8).t().contiguous(),
        lambda x: torch.cat([x[:2], x[30:]]),
        lambda x: torch.stack([x, x]),
        lambda x: torch.zeros(3, dtype=F4, device=x.device),
        lambda x: torch.empty_like(x).copy_(x),
    ):
        got = made(there)
        assert got.dtype == F4
        want = made(x).view(torch.uint8)
        assert torch.equal(got.cpu().view(torch.uint8), want)
        assert torch.equal(got.view(torch.uint8).cpu(), want)
    assert torch.empty(3, dtype=F4, device="jax").shape == (3,)
    assert torch.equal(
        there.view(torch.uint8).view(F4).cpu().view(torch.uint8), x.view(torch.uint8)
    )
    mesh = iso.make_mesh((8,), ("x",))
    sharded = iso.shard(x, mesh, P("x"))
    assert sharded.dtype == F4 and iso.sharding_of(sharded).spec == P("x")
    assert iso.to_jax(sharded).dtype == np.uint8
    iso.save(tmp_path / "weights", {"x": sharded})
    into = {"x": iso.shard(torch.zeros(32, dtype=F4), mesh, P())}
    found = iso.restore(tmp_path / "weights", into)["x"]
    assert found.dtype == F4
    assert torch.equal(found.cpu().view(torch.uint8), x.view(torch.uint8))
    torch.save(sharded, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=False)
    assert loaded.dtype == F4
    assert torch.equal(loaded.cpu().view(torch.uint8), x.view(torch.uint8))


def test_packed_floats_are_not_computed_with():
    x = torch.arange(32, dtype=torch.uint8).view(F4).to("jax")
    for function in (
        lambda: x + x,
        lambda: x.float(),
        lambda: x * 2,
        lambda: torch.ones(32, device="jax").to(F4),
        lambda: torch.arange(32, dtype=torch.uint8, device="jax").to(F4),
        lambda: x == x,
        lambda: x.sum(),
        lambda: torch.ones(3, dtype=F4, device="jax"),
    ):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"mplemented|float4|Float4"):
            function()
