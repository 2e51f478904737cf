"""What CPU torch refuses is refused at the call: an error of the same class, with torch's words.

Each line is a call. After `#` come words of torch's message and of ours; after `#:` of ours alone.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import DeviceError
from isoshard.core.runtime.private_names import release
from isoshard.torch_bridge.engine.operators import cpu_errors
from tests.torch_bridge.engine.spelled_calls import calls, outcome

ONE = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx entr i0e i1 i1e log_ndtr ndtri
    gammaln modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    spherical_bessel_j0 scaled_modified_bessel_k0 scaled_modified_bessel_k1"""
TWO = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p xlog1py gammainc gammaincc zeta"""
SPECIAL = [f"S.{name}(c64(2))" for name in ONE.split()]
SPECIAL += [
    f"S.{name}({operands})" for name in TWO.split() for operands in ("c64(), ones()", "1, c64()")
]

REFUSED = {
    "numbers": """
        torch.arange(3, dtype=bool, device=d); True**ones().bool(); torch.polygamma(1, c64(2))
        torch.polygamma(0, c64(2)); c64(2).polygamma_(1); torch.hash_tensor(c64(2))
        torch.mvlgamma(ones(2) + 5, 0); (ones(2) + 5).mvlgamma_(0); torch.mvlgamma(mask(2), 1)
        torch.round(long(2), decimals=1); long(2).logit_(); mask(2).clamp(mask(2), mask(2))
        mask(2).clamp_(mask(2), mask(2)); mask(2).addcdiv(mask(2), mask(2))
        ones(2).addcdiv(mask(2), mask(2)); mask(2).ldexp_(long(2)); mask(0, 2).kthvalue(1, 1)
        torch.linspace(c64(), ones(), 3, dtype=float32, device=d)
        torch.logspace(ones(), c64(), 3, dtype=float32, device=d)
        torch.linalg.cross(long(2, 3), ones(2, 3)); torch.normal(long(2), ones(2))
        torch.normal(ones(2), c64(2)); torch.linalg.eigh(long(2, 2))
        torch.linalg.eigvalsh(ones(2, 2, dtype=float16))
        torch.ormqr(ones(4, 3), ones(0), ones(4, 4)); torch.addmv(ones(5), ones(0, 10), ones(10))
        ones(1).addmv_(ones(0, 10), ones(10)); torch.addmm(mask(0, 2), mask(2, 5), mask(5, 2))
        torch.quantile(ones(5), 0.5, dim=99); torch.nanquantile(ones(5), 0.5, dim=-99)
        torch.randint(3, (2,), dtype=complex64, device=d); torch.randint_like(c64(2), 3)
        c64(2).random_(); aten._unsafe_masked_index(ones(3, dtype=uint8), mask(2), [zeros(2)], 999)
        aten._softmax_backward_data(ones(3), ones(2, 3), 1, float32)
        aten._softmax_backward_data(ones(3), long(3), 0, float32)
        aten._log_softmax_backward_data(ones(3), long(3), 0, float32)
    """,
    "places": """
        torch.histogram(ones(5), 0); torch.histogram(ones(5), long(5))
        torch.histogramdd(ones(5, 2), [0, 2]); torch.histogramdd(ones(2), [2, 2])
        torch.histogramdd(long(5, 2), [2, 2]); torch.select_scatter(ones(3, 3), ones(3), 9, 0)
        torch.select_scatter(ones(3, 3), ones(), 0, 0)
        torch.select_scatter(ones(3, 3), long(3), 0, 9)
        torch.slice_scatter(ones(3, 3), ones(3, 3), -9); torch.slice_scatter(ones(3, 3), ones(3))
        torch.slice_scatter(ones(3, 3), ones(3, 3), 0, 1, 3)
        torch.slice_scatter(ones(3, 3), ones(3, 3), 0, 0, 3, 0)
        torch.diagonal_scatter(ones(3, 3), ones(3), 0, 1, 1)
        torch.diagonal_scatter(ones(3, 3), ones(3), 0, 1, 5)
        torch.as_strided_scatter(ones(9), ones(2), (2,), (0,))
        torch.as_strided_scatter(ones(9), ones(3), (2, 2), (2, 1))
        ones(0, 3).index_fill(0, zeros(2), 1.0); ones(3).index_fill(0, zeros(1), c64())
        mask(3).index_reduce(0, zeros(2), mask(2), 'amax')
        ones(3).index_reduce(9, zeros(2), ones(2), 'amax')
        ones(3).index_reduce(0, zeros(2), long(2), 'amin')
        ones(3).index_reduce_(0, zeros(2), ones(3), 'amin')
        ones(0, 2).index_reduce(0, zeros(2), ones(2, 2), 'amax')
        aten._unsafe_masked_index_put_accumulate(long(3), mask(2), [zeros(2)], ones(2))
    """,
    "layers": """
        F.adaptive_avg_pool3d(long(1, 2, 2, 2), 1); F.group_norm(ones(2, 4), 2, long(4), ones(4))
        F.group_norm(ones(2, 4), 2, ones(4), mask(4)); F.layer_norm(ones(4), [4], ones(4), long(4))
        F.binary_cross_entropy(ones(2), long(2)); F.binary_cross_entropy(ones(2), mask(2))
        F.conv1d(ones(2, 3, 4), ones(0, 3, 3)); F.conv1d(ones(2, 3, 4), ones(3, 3, 3, 2))
        F.conv2d(ones(1, 3, 5, 5), ones(3, 3, 3, 3, 2), stride=(2, 2))
        F.conv_transpose1d(ones(1, 3, 4), ones(3, 3, 3), ones())
        F.conv_transpose2d(ones(1, 3, 4, 4), ones(3, 3, 3, 3), c64(3))
        F.ctc_loss(ones(5, 2, 4), long(2, 3), ones(2), long(2))
        F.ctc_loss(ones(5, 2, 4), long(2, 3), (-5, 5), (2, 2))
        F.ctc_loss(ones(5, 2, 4), long(2, 3, 2), (5, 5), (2, 2))
        F.ctc_loss(ones(5, 2, 4), long(3), (5, 5), (2, 2))
        F.ctc_loss(ones(5, 2, 4), long(2, 1), (5, 5), (2, 2)); F.huber_loss(ones(2), c64(2))
        F.mse_loss(ones(2), c64(2)); F.smooth_l1_loss(ones(2), c64(2))
        F.soft_margin_loss(mask(2), ones(2)); F.soft_margin_loss(ones(), ones(3))
        F.pixel_unshuffle(ones(1, 1, 1), 99); F.pixel_unshuffle(ones(0, 1, 1, 1), 99)
        ones(3, 4).to(memory_format=torch.channels_last)
        torch.zeros_like(ones(3, 4), memory_format=torch.channels_last)
        torch.dist(mask(2), mask(2)); torch.searchsorted(ones(3), ones(2), sorter=long(3).int())
        torch.searchsorted(ones(3), ones(2), sorter=zeros(2))
        ones(5).index_put((zeros(2),), ones(5)); F.max_pool2d(ones(3, 4), 2)
        F.max_pool2d(ones(1, 2, 3, 4, 5), 2); F.adaptive_avg_pool2d(ones(2, 3, 9, 0), 3)
        F.adaptive_avg_pool1d(ones(2, 3, 0), 3); F.adaptive_avg_pool3d(ones(2, 0, 9, 9, 9), 3)
        F.embedding_bag(zeros(2, 2), ones(3, 4), mode='sum', per_sample_weights=ones(2, 2).double())
        F.channel_shuffle(ones(1, 4, 3, 3), 3)
        F.interpolate(ones(1, 0, 4, 4), scale_factor=2, mode='bicubic'); F.celu(ones(3), 0.0)
        F.conv1d(ones(1, 3, 5), ones(4, 3, 2), stride=0)
        F.conv_transpose2d(ones(1, 2, 5, 5), ones(3, 4, 2, 2))
        F.conv_transpose2d(ones(1, 3, 5, 5), ones(3, 4, 2, 2), output_padding=1)
        torch.nn.NLLLoss(weight=ones(0, dtype=float16))(ones(0, 0), ones(0, dtype=int64))
        F.interpolate(ones(1, 2, 4, 4), [0, 3], mode='bicubic')
        F.interpolate(ones(1, 2, 4), [0], mode='linear')
        F.interpolate(ones(1, 2, 4, 4), [0, 3], mode='nearest')
        F.conv1d(ones(1, 1, 4), ones(1, 1, 2), dilation=-1)  #: dilation should be greater than zero
        F.conv3d(ones(1, 1, 4, 4, 4), ones(1, 1, 2, 2, 2), padding=-1)  #: negative padding
    """,
    "sizes": """
        ones(1).pow_(ones(2, 3)); ints(1).bitwise_left_shift_(ints(1, 2))
        torch._foreach_add_([ones(1)], [ones(2)]); ones(3).__setitem__(ints(0, 1), ones(5))
        ones(2, 3).index_put_([bools(1, 0)], ones(5, 1, 3)); ones(3).__setitem__(bools(1, 0), 1.0)
        ones(3)[ints(0), ints(0)]; ones(3, 3)[ints(0, 1), ints(0, 1, 2)]; ones(3)[ones(2)]
        ones(0, 3)[ints(1, 2)]; ones(0, 3).__setitem__(ints(1, 2), 1.0)
        ones(0, 3).gather(0, ints(1)[None]); ones(0, 3).take(ints(1))
        ones(3, 2).index_add(0, ints(0, 1), ones(2))
        ones(3, 2).index_reduce(0, ints(0, 1), ones(2, 1), 'prod')
        ones(2).masked_scatter(ones(2).byte(), ones(2)); torch.argmax(ones(3), out=ones(()).byte())
        torch.mm(ones(2, 2), ones(2, 2), out=ones(2, 2).half())
        torch.topk(ones(3), 2, out=(ones(2), ones(2)))
        torch.nonzero(ones(3), out=ones(3, 1).byte()); torch.add(ones(3), 1, out=ones(3).int())
        ones(8, 8, dtype=complex64).amax((0, 3)); ones(3).log_normal_(0.0, 0.0)
        ones(3, 2, 2).std((-2, 1, 4)); ones(3, 2, 2).nansum((4, -2, 1))
        ones(8, dtype=bfloat16)[1:5].view(float32); torch.as_strided(ones(3, 3), (2, 2), (2, -1))
        torch.empty_strided((2,), (-1,), device=d); torch.as_strided(ones(3, 3), (2, 2), (2, 1), -1)
        ints(1, 2).add(1, alpha=1.5); F.nll_loss(ones(3, 4), ints(0, 0, 0), weight=ones(2))
        ints(1).addcdiv(ints(1), ints(1)); torch.bucketize(ones(3), ones(2, 2))
        torch.histogramdd(ones(3, 2), [3, 3, 3]); torch.cat([ones(2), ones(())])
        torch.amax(ones(2, 0), (0, 1)); F.multilabel_margin_loss(ones(5, 4), ones(4).long())
        torch.as_strided_scatter(ones(4), ones(2), (2,), (3,), 2); ints(1).exponential_()
        ones(1).eq_(ones(2, 3)); ones(1).atan2_(ones(2, 3)); ones(1).fmod_(ones(2, 3))
        ones(1).copy_(ones(2, 3))
    """,
    "order": """
        x(float32).topk(9)  # selected index k out of range
        x(float32).topk(-1)  # selected index k out of range
        x(bool).topk(1, dim=4)  # Dimension out of range
        x(bool).topk(2)  # does not support bool dtypes
        x(complex64).topk(2)  # does not support complex dtypes
        x(complex64).kthvalue(9)  # out of range for dimension 1; x(bool).kthvalue(2)  # 'Bool'
        x(complex64).sort()  # does not support complex dtypes; x(bool).median()  # 'Bool'
        x(float32)[:, :0].nanmedian(1)  # median(): Expected
        torch.searchsorted(x(bool), x(bool))  # 'Bool'
        torch.bucketize(x(bool), x(bool)[0])  # 'Bool'
        x(complex64).max()  # not implemented for 'ComplexFloat'
        x(complex64).max(1)  # does not support complex input
        x(complex64)[:, :0].max(1)  # non-zero size; x(complex64)[0, 0].aminmax()  # ComplexFloat
        x(complex64)[0, 0].aminmax(dim=0)  # aminmax not implemented
        x(int32).var()  # std and var only support floating
        torch.std_mean(x(int32))  # std_mean only support floating
        x(int32).mean(3)  # mean(): could not infer output dtype
        x(float32).mean(dtype=int32)  # Optional dtype must be
        x(float32).sum((0, 0))  # dim 0 appears multiple times
        x(bool).all((1, -1))  # dim 1 appears multiple times
        x(float32).logsumexp(())  # doesn't match the broadcast
        x(float32)[0, 0].cummax(1)  # Expected reduction dim -1 or 0
        x(float32) << 1  # not implemented for 'Float'
        x(int32) >> 1.0  # not implemented for 'Float'
        x(float32).__ilshift__(1)  # not implemented for 'Float'; x(int32) // 0  # ZeroDivisionError
        x(int32) // 2**32  # ZeroDivisionError
        x(int32).div_(2**40, rounding_mode='trunc')  # ZeroDivisionError
        x(bool) % True  # not implemented for 'Bool'
        torch.round(x(float32), out=x(float32).double())  # Found dtype
        torch.maximum(x(complex64), x(complex64))  # maximum not implemented for
        x(complex64).fmod(x(complex64))  # not implemented for 'ComplexFloat'
        x(complex64).atan2(x(complex64))  # not implemented for 'ComplexFloat'
        torch.xlogy(x(complex64), 2)  # not implemented for 'ComplexFloat'
        x(int32).hypot(x(int32))  # not implemented for 'Int'
        x(bool).clamp(min=True)  # not implemented for 'Bool'
        x(float32).as_strided((2, 2), (1,))  # mismatch in length
        torch.as_strided_copy(x(float32), (2,), (1, 2))  # mismatch in
        torch.as_strided_scatter(x(float32), x(float32)[:, :2], (2, 2), (1,))  # mismatch in length
    """,
    "single calls": """
        ones(3, 3).index_select(0, ints(0, 1)[None])  # vector
        ones(3, 3).index_select(0, ones(1))  # int32
        ones(3, 3).index_select(2, ints(0))  # out of range
        ones(()).index_select(0, ints(0, 0))  # only 1 value
        ones(3, 3).index_add(0, ones(1), ones(1, 3))  # int32
        ones(3, 3).index_add(0, ints(0)[None], ones(1, 3))  # vector
        ones(3, 3).index_add(0, ints(0, 1), ones(1, 3))  # Number of
        ones(3, 3).index_copy(0, ones(1), ones(1, 3))  # long tensor
        ones(3, 3).index_copy(0, ints(0, 1), ones(1, 3))  # Number of
        ones(3).index_fill(0, ints(0)[None], 1)  # vector
        ones(3).put_(ones(1), ones(1))  # long tensor
        ones(3).put_(ints(0, 1), ones(1))  # same number
        ones(0).put_(ints(0), ones(1))  # empty tensor
        ones(3).masked_fill_(ones(3).byte(), 2)  # only supports boolean masks
        ones(3).index_put_((ints(0),), ones(1).double())  # source and destination dtypes match
        ones(3).byte().random_(0, 300)  # to - 1 is out of bounds
        torch.randint(-5, 5, (3,), dtype=uint8, device=d)  # from is out of bounds
        ints(1).random_(5, 5)  # random_ expects 'from'
        torch.randperm(300, dtype=uint8, device=d)  # without overflow
        torch.randperm(3000, dtype=float16, device=d)  # cannot be greater than 2049
        torch.rand_like(ints(1))  # Long; torch.bernoulli(ints(1))  # Long
        ones(3).bernoulli_(ones(2))  # must match
        torch.multinomial(ints(1, 2), 1)  # only supports floating-point
        torch.multinomial(ones(2), 0)  # n_sample <= 0
        torch.multinomial(ones(1, 2, 3), 1)  # 1 or 2; ones(1) < ones(1).cfloat()  # lt
        torch.gcd(ones(1), ones(1))  # gcd
        F.interpolate(long(1, 1, 4), scale_factor=2, mode='linear')  # Long
        torch.arange(float('nan'), device=d)  # range
        torch.arange(-5, -1e+20, -1, device=d)  # possible overflow
        torch.add(ints(1), ints(1), alpha=1.5)  # alpha must not be a floating point
        torch.add(ints(1).bool(), ints(1).bool(), alpha=1.5)  # alpha must not be a floating point
        torch.add(ones(1), 1, alpha=True)  # Boolean alpha
        ints(1).add_(1.5)  # result type Float can't be cast to the desired output type Long
        torch.where(ints(1), 1, 2)  # where expected condition to be a boolean tensor
        torch.complex(ones(1), ones(1).double())  # Expected object of scalar type Float but got
        torch.polar(ints(1), ints(1))  # Half, Float or Double tensors but got Long and Long
        torch.complex(ones(1), ones(1), out=ones(1))  # got scalar type Float for argument 'out'
        torch.neg(ints(1), out=ones(1))  # Found dtype
        torch.logcumsumexp(ones(1), 0, out=ones(1).double())  # expected scalar_type Float
    """,
    "two faults": """
        ones(2, 2, dtype=complex64).max(2); ones(2, 2, dtype=complex64).aminmax(dim=3)
        ones(2, 2, dtype=int32).fmod_(2j)
    """,
    "kinds of numbers": """
        long(2).var(); c64(2).floor(); ones(2).clamp(1j); c64(2).argmax(); mask(2).argmin(0)
        ones(0, 2).argmax(); ones(0, 2).max(); ones(2).fill_(1j); torch.full_like(ones(2), 1j)
        long(2)**-1; long(2).pow_(-2); mask(2)**-1; ones(2) - mask(2); 1 - mask(2)
        ones(2).sub_(True); torch.sign(c64(2)); torch.maximum(c64(2), c64(2))
        torch.minimum(ones(2), c64(2)); ones(2).index_add(0, long(2), long(2))
        ones(2).index_put((long(2),), long(2)); c64(2)[0].min(-1); long(2).mul_(0.5)
        F.relu(mask(2))
    """,
    "draws": """
        torch.multinomial(ones(4), 9)  #: 9 of 4
        ones(4).bernoulli_(2.0)  #: p to be in [0, 1], but got p=2
        ones(4).random_(5, 5)  #: from=5 >= to=5; torch.randint(5, 5, (3,), device=d)  #: 5 >= to=5
        ones(4).uniform_(2.0, 1.0)  #: found from=2 > to=1
        ones(4).long().uniform_()  #: not implemented for
    """,
    "out=": """
        torch.isin(ints(0, 1), ints(1), out=zeros(2))  #: Expected out tensor
        torch.isin(ints(0, 1), 2, out=zeros(2))  #: Expected out tensor
        torch.aminmax(ones(3), out=(ones(), ones(dtype=float64)))  #: Expected out tensor
    """,
    "special functions": "\n".join(SPECIAL),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("topic", REFUSED)
def test_refused_as_on_the_cpu(topic):
    beside, faults = torch.arange(4.0, device="jax") * 2, []
    for line in calls(REFUSED[topic]):
        call, _, words = line.replace("  #: ", "  # ").partition("  # ")
        want, got = (outcome(call, device) for device in ("cpu", "jax"))
        texts = (str(got),) if "  #: " in line else (str(want), str(got))
        if not isinstance(want, Exception) or type(got) is not type(want):
            faults.append(f"{call}: {want!r} on the CPU, and {got!r}")
        elif not all(words in text for text in texts):
            faults.append(f"{call}: {texts} without {words!r}")
    assert not faults, "\n".join(faults)
    assert beside.tolist() == [0.0, 2.0, 4.0, 6.0]


TAKEN = """
    ones(0, 2).median(); ones(0, 2).argmax(1); torch.full((2,), 1j, device=d)
    torch.addr(ones(2, 2), ones(2), ones(2).long()); c64(2).index_add(0, zeros(2), c64(2))
    c64(2).scatter(0, zeros(2), 1j); mask(2).scatter(0, zeros(2), 1j)
    ones(2).scatter(0, zeros(0), 1j); ones(2).scatter(0, zeros(2), 2 + 0j)
    ones(2).byte().fill_(255); ones(2).byte().masked_fill(mask(2), -255); mask(2).pow_(True)
    torch.zeros(2, device=d) ** -1; mask(2).sum() - 1; zeros(2).copy_(ones(2))
    zeros(2).eq_(ones(2)); ones(2).mul_(long(2)); torch._foreach_mul_([ones(2)], 2)[0]
    mask(2).masked_fill_(mask(2), 1); ones(2).addcdiv(long(2), ones(2))
    mask(2).addcmul(mask(2), ones(2)); F.mse_loss(long(2), ones(2) / 4)
    F.smooth_l1_loss(ones(2) / 4, long(2)); c64(3).scatter_reduce(0, zeros(0), c64(2), "amax")
    F.batch_norm(ones(2, 4, dtype=bfloat16), ones(4), ones(4), ones(4), ones(4))
    mask(2).clamp(min=mask(2)); F.soft_margin_loss(ones(3), ones())
    torch.select_scatter(ones(3, 3), long(3), 0, 1); aten._safe_softmax(long(3), 0, float32)
    torch.searchsorted(x(bool)[0].sort()[0], 2)
    torch.complex(x(float32) / 0, x(float32)).nan_to_num_(1); x(int32).floor_()
    torch.clamp_min(x(bool), x(bool)[:1]); x(bool).clamp(max=0); x(int32)[:0] // 0; x(int32) / 0
    x(float32) // 0; x(int32) // (2**32 + 1); x(int32) << (x(int32) > 1)
    torch.full_like(x(bool), 2**40); x(complex64)[:0].median()
    mask(3, 2).index_reduce(0, zeros(1), mask(1, 2), "amax")
    c64(3, 2).index_reduce(0, zeros(1), torch.full((1, 2), 2j, device=d), "prod")
    torch.searchsorted(mask(3), mask(0)); torch.linspace(0, 1 + 2j, 3, device=d)
    torch.cumsum(ones(2) * 2.5, 0, out=torch.empty(2, dtype=int32, device=d))
    torch.prod(ones(2) * 2.5, 0, out=torch.empty((), dtype=int32, device=d))
    bools(1, 0).to(uint8) * 255 + -1; ints(1, 5, 255).to(uint8) > -1
    ints(1, 5, 255).to(uint8) * 300; ints(1, 5, 255).to(uint8) & -1; ints(1, 5, 255).to(uint8) // -2
    torch.where(ints(1, 5, 255).to(uint8) > 2, ints(1, 5, 255).to(uint8), -1)
"""


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_what_looks_refused_is_computed_as_on_the_cpu():
    """Among them integers that wrap in narrow dtypes."""
    wants, gots = ([outcome(call, d) for call in calls(TAKEN)] for d in ("cpu", "jax"))
    xs.sync()
    for call, want, got in zip(calls(TAKEN), wants, gots, strict=True):
        assert isinstance(got, torch.Tensor), f"{call}: {got!r}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), call
        torch.testing.assert_close(
            got.cpu(), want, equal_nan=True, msg=lambda text, call=call: f"{call}: {text}"
        )


OVERLAPPING = """
    x[1:].copy_(x[:-1]); x[1:].add_(x[:-1]); x[1:].addcmul_(x[:-1], x[:-1])
    x[1:].__setitem__(slice(None), x[:-1]); torch.add(x[1:], 1, out=x[:-1])
    torch.cumsum(x[1:], 0, out=x[:-1]); y.mul_(y[:1]); torch.take(y, ints(0, 1), out=y)
    torch.cat([y, y], out=y); torch.gather(y, 0, ints(0, 1), out=y)
    torch.index_select(y, 0, ints(0, 1), out=y); y.index_copy_(0, ints(1, 0), y)
    y.index_add_(0, y, ints(1, 0)); y.index_fill_(0, y, 1); y.index_put_((y,), ints(1, 0))
    y.put_(y, ints(1, 0)); y.scatter_(0, y, ints(1, 0))
    torch.cat((z, ones(2, 3)), out=z)
"""


def test_a_write_to_what_is_read_is_refused():
    for call in calls(OVERLAPPING):
        x, y, z = (torch.arange(n, device="jax") for n in (4, 2, 0))
        got = str(outcome(call, "jax", x=x, y=y, z=z.float()))
        assert "unsupported operation" in got, call
        assert "refer to a single memory location" in got, call


def test_a_write_to_all_of_what_is_read_is_none():
    x = torch.arange(4, device="jax")
    assert x.add_(x).tolist() == [0, 2, 4, 6]
    assert torch.add(x, 1, out=x).tolist() == [1, 3, 5, 7]
    assert x[1:3].copy_(x[1:3]).tolist() == [3, 5]
    assert x[:2].copy_(x[2:]).tolist() == [5, 7]
    assert x.masked_scatter_(x > 0, x).tolist() == [5, 7, 5, 7]
    wide = torch.arange(2.0).reshape(1, 2).to("jax").expand(2, 2)
    assert wide.copy_(wide) is wide and wide.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match="expanded tensor"):
        wide.copy_(wide + 1)


def test_is_set_to_asks_for_the_same_elements():
    x = torch.arange(4, device="jax")
    same = [x.is_set_to(other) for other in (x, x.view(4), x[:2], x.clone())]
    assert same == [True, True, False, False]
    y = torch.arange(0, device="jax").set_(x)
    assert y.is_set_to(x) and y.add_(1) is y and x.tolist() == [1, 2, 3, 4]
    assert y.set_().shape == (0,) and x.shape == (4,)
    with pytest.raises(RuntimeError, match="Could not set"):
        y.set_(torch.ones(2, device="jax"))


def test_the_message_names_what_was_given_and_a_refused_write_changes_nothing():
    x = torch.arange(3.0).to("jax")
    with pytest.raises(
        RuntimeError, match=r"^value cannot be converted to type float .*, value=1j"
    ):
        x.fill_(1j)
    with pytest.raises(RuntimeError, match="bool tensor is not supported"):
        x[1:].sub_(True)
    with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't .* shape \[2, 3\]"):
        x[:1].pow_(torch.ones(2, 3, device="jax"))
    whole = torch.ones(2, dtype=torch.int64, device="jax")
    with pytest.raises(RuntimeError, match=r"^std and var only support floating point and complex"):
        whole.var()
    with pytest.raises(RuntimeError, match=r"^Integer division with addcdiv is no longer support"):
        whole.addcdiv(whole, whole)
    with pytest.raises(NotImplementedError, match=r'^"softmax" not implemented for \'Long\''):
        whole.softmax(0)  # a kernel's name on the CPU, and its class: our words stay
    with pytest.raises(RuntimeError, match="rank 4"):
        torch.ones(2, 3, device="jax").to("cpu", memory_format=torch.channels_last)
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dims", [(-1, 0, 2), (2, -1, 0), (-1, 0)])
def test_an_axis_twice_and_one_that_is_not_there(dims):
    for name in ("all", "any", "sum", "mean", "amax", "logsumexp", "std", "nansum"):
        want, got = (outcome(f"ones(3).{name}(dim={dims})", d) for d in ("cpu", "jax"))
        assert type(got) is type(want) is not torch.Tensor, name


def test_the_only_axis_of_a_number():
    for call in ("torch.quantile(n, 0.5, dim={})", "torch.nanquantile(n, 0.5, dim={})"):
        for dim in (0, -1, 1, 99):
            want, got = (
                outcome(call.format(dim), d, n=torch.tensor(2.0, device=d)) for d in ("cpu", "jax")
            )
            assert type(got) is type(want) if isinstance(want, Exception) else got.item() == want


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_in_steps_of_less_than_one(dtype):
    """torch 2.15 repeats the first; 2.13 refuses 64 bits, and 2.11 divides by zero."""
    for bounds in ((0, 2, 0.5), (5, 0, -0.5), (0.9, 4, 0.99)):
        if release(torch.__version__) >= (2, 15):
            made = torch.arange(*bounds, dtype=dtype, device="jax")
            assert torch.equal(made.cpu(), torch.arange(*bounds, dtype=dtype))
        else:
            with pytest.raises((ValueError, RuntimeError), match="step must be nonzero"):
                torch.arange(*bounds, dtype=dtype, device="jax")


def test_errors_of_isoshard_and_of_large_calls_stay(monkeypatch):
    """A call that is refused is repeated on the CPU for its error, if that is cheap."""
    error = DeviceError("the device")
    call = (torch.ops.aten.relu.default, (torch.ones(2, device="jax"), 3), {})
    assert cpu_errors.like_cpu(*call, error) is error
    assert type(cpu_errors.like_cpu(*call, ValueError("other"))) is RuntimeError
    tensor = torch.ones(2, device="jax").expand(2**20, 2)
    monkeypatch.setattr(torch, "zeros", None)
    for shape in ((2**13, 2**13), (1, 2**20)):
        error = ValueError("too large")
        assert (
            cpu_errors.like_cpu(torch.ops.aten.repeat.default, (tensor, shape), {}, error) is error
        )


def test_a_refused_call_draws_no_numbers():
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError):
        torch.ones(2, dtype=torch.bool, device="jax").normal_()
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_that_are_accepted():
    ones = torch.ones(4, device="jax")
    assert torch.multinomial(ones, 9, replacement=True).shape == (9,)
    assert ones.clone().random_(3).shape == (4,)
    assert bool((ones.clone().uniform_(1.0, 1.0) == 1).all())


def test_indices_on_the_device_into_a_cpu_tensor_are_refused():
    table, places = torch.arange(4.0), torch.tensor([0, 1], device="jax")
    for index in (places, places == 0):
        with pytest.raises(RuntimeError, match=r"either on cpu or on the same device .* \(cpu\); "):
            table[index]
    with pytest.raises(RuntimeError, match=r"into a tensor on cpu; move them"):
        table[places] = 1.0
    assert table.to("jax")[torch.tensor([0, 3])].tolist() == [0, 3]
    assert iso.jax_function(lambda i: table[i])(iso.to_jax(places)).tolist() == [0, 1]


# --- Dtypes that kernels do not know -------------------------------------------------------------

KERNELS = """
    F.adaptive_avg_pool2d(x, 3); F.adaptive_max_pool2d(x, 3, return_indices=True)
    F.adaptive_max_pool1d(x[0], 3); F.avg_pool2d(x, 2); F.max_pool2d(x, 2)
    F.max_pool3d(x, (1, 2, 2)); F.max_unpool2d(x, zeros(1, 2, 7, 7), 1); F.unfold(x, 2)
    F.pad(x, (1, 1), mode="reflect"); F.pad(x, (1, 1), mode="replicate"); F.hardswish(x)
    F.hardsigmoid(x); F.hardtanh(x); F.elu(x); F.elu_(x); F.selu(x); F.gelu(x); F.glu(x, 1)
    F.leaky_relu(x); F.mish(x); F.silu(x); F.logsigmoid(x); F.softplus(x); x.softmax(1)
    x.log_softmax(1); F.layer_norm(x, (7,)); F.group_norm(x, 2)
    F.batch_norm(x, None, None, training=True); F.mse_loss(x, x); F.smooth_l1_loss(x, x)
    F.soft_margin_loss(x, x); F.nll_loss(x, zeros(1, 7, 7)); F.multi_margin_loss(x[0, 0], zeros(7))
    F.conv2d(x, x); F.conv_transpose2d(x, x[0, :, None]); x[0, 0] @ x[0, 0]
    torch.addmm(x[0, 0], x[0, 0], x[0, 0]); torch.addcmul(x, x, x); torch.lerp(x, x, 0.5)
    x[0, 0].trace(); torch.linalg.cross(x[..., :3], x[..., :3])
    x.scatter_reduce(0, torch.zeros_like(x, dtype=int64), x, "mean"); torch.linalg.lu(x)
    torch.linalg.solve_triangular(x, x, upper=True); torch.linalg.householder_product(x, x[..., 0])
    torch.linalg.lstsq(x, x).solution; torch.linalg.eigvals(x)
"""
OF_NOTHING = ("F.adaptive_avg_pool2d(x, 3)", "x.softmax(1)", "F.silu(x)", "F.layer_norm(x, (7,))")


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float32]
)
def test_a_dtype_that_a_kernel_does_not_know_is_refused_as_on_the_cpu(dtype):
    image, faults = torch.arange(7 * 7 * 2).remainder(5).reshape(1, 2, 7, 7).to(dtype), []
    cases = [(call, image) for call in calls(KERNELS)] + [(call, image[:0]) for call in OF_NOTHING]
    for call, x in cases:
        want, got = (outcome(call, d, x=x.to(d, copy=True)) for d in ("cpu", "jax"))
        want, got = (type(one) if isinstance(one, Exception) else None for one in (want, got))
        if want is not got:
            faults.append(f"{call}: {want} on the CPU, and {got}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("rank", (2, 3))
def test_adaptive_maxima_of_no_images(rank):
    x = torch.ones(0, 4, *[9] * rank, device="jax", requires_grad=True)
    values, places = getattr(F, f"adaptive_max_pool{rank}d")(x, 3, return_indices=True)
    assert values.shape == places.shape == (0, 4, *[3] * rank)
    values.sum().backward()
    assert x.grad.shape == x.shape
