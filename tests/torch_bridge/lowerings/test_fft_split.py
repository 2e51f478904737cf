"""torch's Fourier transforms of tensors on a mesh: what is sent, forward and backward."""

import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P

BATCH, BOTH = P(("x", "y")), P("x", "y")


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(function, *tensors):
    """The results as real tensors, and gradients that differ for every element."""
    outs, losses = function(*tensors), []
    outs = outs if isinstance(outs, list) else [outs]
    outs = [torch.stack((out.real, out.imag)) if out.is_complex() else out for out in outs]
    for out in outs:
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        losses.append((out * weights.to(out.device)).sum())
    return [*(out.detach() for out in outs), *torch.autograd.grad(sum(losses), tensors)]


def run(mesh, function, specs, *tensors, **given):
    """One captured step on the mesh, compared with CPU torch in float64; gives its collectives."""
    want = gradients(function, *[x.clone().requires_grad_() for x in tensors])
    placed = [
        iso.shard(x.float(), mesh, spec, **given).requires_grad_()
        for x, spec in zip(tensors, specs, strict=True)
    ]
    step = xs.compile(lambda *placed: gradients(function, *placed))
    for have, right in zip(step(*placed), want, strict=True):
        torch.testing.assert_close(have.cpu().double(), right, rtol=1e-4, atol=1e-4)
    return collectives.summarize(xs.program_text(step))


def as_complex(x):
    return torch.complex(x, x.roll(1, -1))


TRANSFORMS = {
    "ifft of channels": (lambda x: torch.fft.ifft(x, dim=1, norm="ortho"), P("x", None, "y"),
                         (2, 3, 8)),
    "irfft2, odd": (lambda x: torch.fft.irfft2(as_complex(x), s=(6, 7)), BOTH, (2, 4, 6, 4)),
    "hfft": (lambda x: torch.fft.hfft(as_complex(x), norm="ortho"), BOTH, (2, 4, 5)),
    "padded and cut": (lambda x: torch.fft.rfftn(x, s=(4, 8), dim=(1, 2), norm="forward"),
                       BATCH, (8, 5, 6)),
}  # fmt: skip


def test_along_whole_axes_nothing_is_sent(mesh):
    functions, specs, shapes = zip(*TRANSFORMS.values(), strict=True)

    def all_of_them(*xs):
        return [function(x) for function, x in zip(functions, xs, strict=True)]

    assert run(mesh, all_of_them, specs, *(draw(*shape) for shape in shapes)) == {}


def test_half_a_spectrum_of_a_split_axis(mesh):
    run(mesh, lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=8), [P("x", "y")], draw(2, 8))


def spectral(x, weight):
    """A layer of a Fourier neural operator: the low modes, mixed by complex weights."""
    modes = weight.shape[2]
    spectrum = torch.fft.rfft2(x)
    low = torch.einsum("bihw,iohw->bohw", spectrum[:, :, :modes, :modes],
                       torch.complex(weight, weight.flip(0)))  # fmt: skip
    size = (spectrum.shape[2] - modes, spectrum.shape[3] - modes)
    low = torch.nn.functional.pad(torch.view_as_real(low), (0, 0, 0, size[1], 0, size[0]))
    return x + torch.fft.irfft2(torch.view_as_complex(low), s=x.shape[2:])


def test_a_spectral_layer_of_a_field_with_split_rows(mesh):
    """Rows are exchanged; the compiler splits the few low modes by a part of a mesh axis."""
    x, weight = draw(2, 3, 16, 16), draw(3, 3, 2, 2)
    assert "all-to-all" in run(mesh, spectral, [P("x", None, "y"), P()], x, weight)


def test_blocks_of_unequal_sizes(mesh):
    """Beside a batch that is split evenly."""
    given = {"uneven": "pad", "sizes": (None, None, (5, 2, 7, 4), None)}
    x, spec = draw(2, 2, 18, 5), P("x", None, "y")
    run(mesh, torch.fft.rfft, [spec], x, **given)
    step = xs.compile(torch.fft.rfft)
    found = step(iso.shard(x.float(), mesh, spec, **given))
    torch.testing.assert_close(found.cpu(), torch.fft.rfft(x.float()), rtol=1e-4, atol=1e-4)
    assert iso.to_jax(found).sizes == given["sizes"]
    assert collectives.summarize(xs.program_text(step)) == {}


def test_a_program_of_two_meshes(mesh):
    """JAX compiles no operator there that asks for its layout, so XLA has it."""
    other = iso.make_mesh((8,), ("z",), devices=mesh.devices.ravel())
    x = draw(8, 6)
    one, two = iso.shard(x.float(), mesh, BATCH), iso.shard(x.float(), other, P("z"))
    found, _ = xs.compile(lambda a, b: (torch.fft.fft(a), b + 1))(one, two)
    torch.testing.assert_close(found.cpu(), torch.fft.fft(x.float()), rtol=1e-4, atol=1e-4)


def test_off_a_mesh_it_is_xla_s(mesh):
    x = draw(4, 6).float().to("jax")
    step = xs.compile(torch.fft.rfft2)
    torch.testing.assert_close(step(x).cpu(), torch.fft.rfft2(x.cpu()), rtol=1e-4, atol=1e-4)
    assert "Partitioning" not in xs.program_text(step)


def test_the_verb_takes_tensors(mesh):
    x = draw(8, 6)
    given = iso.shard(x.float(), mesh, BATCH).requires_grad_()
    out = iso.domain.rfft(given, norm="ortho")
    out.abs().square().sum().backward()
    torch.testing.assert_close(out.detach().cpu(), torch.fft.rfft(x.float(), norm="ortho"))
    wide = x.clone().requires_grad_()
    torch.fft.rfft(wide, norm="ortho").abs().square().sum().backward()
    torch.testing.assert_close(given.grad.cpu().double(), wide.grad, rtol=1e-4, atol=1e-4)
