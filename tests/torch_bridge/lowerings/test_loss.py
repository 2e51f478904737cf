"""Losses against CPU torch: every reduction, weights, ignored targets, half precision."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional as F

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import as_cpu
from tests.torch_bridge.lowerings.samples import INF

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_losses_and_their_gradients():
    """By every reduction, with weights, in half precision; differences below, at and above 1."""
    x, target = torch.randn(3, 5) * 2, torch.randn(3, 5)
    target[0, :3] = x[0, :3] + torch.tensor([0.0, 1.0, -1.0])
    p, truth = rand(3, 5), rand(3, 5, seed=1).round()
    p[0, :2] = torch.tensor([0.0, 1.0])
    logits, weight, positive = torch.randn(3, 5) * 50, rand(3, 5, seed=2), rand(5)
    rows = torch.tensor([[1, 3, -1, 0], [-1, 0, 1, 2], [3, 2, 1, 0]])
    scores, of_class, bce = torch.randn(3, 4), rand(4), F.binary_cross_entropy
    with_logits = F.binary_cross_entropy_with_logits
    cases = {}
    for number, how in enumerate(REDUCTIONS):
        options = {"reduction": how}
        for name, loss in {
            "mse": lambda x, t, o=options: F.mse_loss(x, t, **o),
            "smooth_l1": lambda x, t, o=options: F.smooth_l1_loss(x, t, beta=0.7, **o),
            "l1": lambda x, t, n=number: aten.smooth_l1_loss(x, t, n, 0.0),
            "huber": lambda x, t, o=options: F.huber_loss(x, t, **o),
            "soft_margin": lambda x, t, o=options: F.soft_margin_loss(x, t.detach(), **o),
        }.items():
            if how == "none" or name in ("mse", "huber", "l1")[number:]:
                cases[f"{name} {how}"] = (loss, x, target)
            if how == "mean" and name in ("smooth_l1", "soft_margin"):
                cases[f"{name} of halves"] = (loss, x.bfloat16(), target.bfloat16())
            if how == "sum":
                cases[f"{name} of nothing"] = (lambda x, t, f=loss: f(x.detach(), t.detach()),
                                               x[:0], target[:0])  # fmt: skip
        for left_out, name, loss, given in (
            ("sum", "bce", lambda p, t, o=options: bce(p, t.detach(), **o), (p, truth)),
            ("none", "weighted",
             lambda p, t, w, o=options: bce(p, t.detach(), w.detach(), **o), (p, truth, weight)),
            ("mean", "logits",
             lambda x, t, o=options: with_logits(x, t.detach(), **o), (logits, truth)),
            ("", "weighted logits", lambda x, t, w, b, o=options: with_logits(
                x, t.detach(), w.detach(), pos_weight=b.detach(), **o
            ), (logits, truth, weight, positive)),
        ):  # fmt: skip
            if how != left_out:
                cases[f"{name} {how}"] = (loss, *given)
        cases[f"margins {how}"] = (
            lambda x, t, w, o=options, p=1 + number % 2: F.multi_margin_loss(
                x, t, p, 0.8, w.detach(), **o
            ),
            *(scores, rows[:, 1], of_class),
        )
        labels = lambda x, t, o=options: F.multilabel_margin_loss(x, t, **o)  # noqa: E731
        cases[f"labels {how}"] = (labels, scores, rows)
    cases["labels of one"] = (F.multilabel_margin_loss, scores[0], rows[0])
    as_cpu(cases)


def test_negative_log_likelihoods():
    """Of one sample, of several, of images; of ignored targets, whose scores may be infinite."""
    cases = {}
    for shape in ((6, 4), (2, 4, 3, 2)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).log_softmax(1)
        for number, how in enumerate(REDUCTIONS):
            ignore = (-100, 2)[(number + len(shape) // 4) % 2]
            target = torch.randint(0, 4, shape[:1] + shape[2:])
            target.view(-1)[0] = ignore
            options = {"reduction": how, "ignore_index": ignore}
            loss = lambda x, t, w=None, o=options: F.nll_loss(x, t, w, **o)  # noqa: E731
            weighted = lambda x, t, w, loss=loss: loss(x, t, w.detach())  # noqa: E731
            case = (loss, x, target) if ignore == 2 else (weighted, x, target, rand(4))
            cases[f"{shape} {options}"] = case
    x = torch.randn(3, 4)
    cases["one"] = (F.nll_loss, x[0], torch.tensor(2))
    cases["ignored"] = (lambda x, t: F.nll_loss(x.detach(), t), x, torch.full((3,), -100))
    infinite = x.clone()
    infinite[0] = -INF
    cases["infinite"] = (F.nll_loss, infinite, torch.tensor([-100, 1, 2]))
    as_cpu(cases)
    as_cpu({"sum": (lambda x, t: F.nll_loss(x, t, reduction="sum"), x, torch.full((3,), -100))})


def test_a_class_out_of_range_gives_nan_and_never_the_score_of_a_neighbour():
    function = registry.find(aten.nll_loss_forward.default).function
    loss, _ = function(jnp.zeros((1, 3)), jnp.array([7]), None, 1, -100)
    assert jnp.isnan(loss)


@pytest.mark.parametrize("name", ["huber_loss", "soft_margin_loss", "smooth_l1_loss", "l1_loss"])
def test_the_dtype_of_a_loss_of_two_dtypes(name):
    loss = getattr(F, name)
    x, y = torch.randn(3, 4), torch.rand(3, 4)
    pairs = []
    for one, other, reduction in (
        (x, y.double(), "none"),
        (x.double(), y, "mean"),
        (x.bfloat16(), y, "sum"),
    ):
        near = (2e-2, 1e-2) if torch.bfloat16 in (one.dtype, other.dtype) else (1e-5, 1e-6)
        want = loss(one, other, reduction=reduction)
        pairs.append((loss(one.to("jax"), other.to("jax"), reduction=reduction), want, near))
    for got, want, (rtol, atol) in pairs:
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["huber_loss", "soft_margin_loss", "mse_loss", "smooth_l1_loss"])
def test_each_loss_lies_as_the_scores_do(name):
    x, target = torch.randn(4, 3, 2).permute(2, 0, 1), torch.randn(2, 4, 3)
    want = getattr(F, name)(x, target, reduction="none")
    got = getattr(F, name)(x.to("jax"), target.to("jax"), reduction="none")
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no linear_cross_entropy"
)
@pytest.mark.parametrize(
    ("reduction", "weighted"), [("mean", False), ("mean", True), ("sum", True), ("none", False)]
)
def test_linear_cross_entropy(reduction, weighted):
    """The fused one, with its gradients."""
    source = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=source) for shape in ((6, 4), (5, 4), (5,))]
    target = torch.tensor([0, 4, 2, -100, 1, 2])
    weight = rand(5) if weighted else None
    chunked = getattr(F, "LinearCrossEntropyOptions", None)
    options = chunked(batch_chunk_size=2) if chunked else None
    got = []
    for device in ("cpu", "jax"):
        x, matrix, bias = (leaf.detach().to(device).requires_grad_() for leaf in leaves)
        loss = F.linear_cross_entropy(
            x,
            matrix,
            target.to(device),
            linear_bias=bias,
            weight=None if weight is None else weight.to(device),
            reduction=reduction,
            label_smoothing=0.1 if reduction == "mean" else 0.0,
            options=options,
        )
        loss.sum().backward()
        got.append([loss.detach().cpu(), x.grad.cpu(), matrix.grad.cpu(), bias.grad.cpu()])
    torch.testing.assert_close(got[1], got[0], rtol=1e-4, atol=1e-5)


# CTC: of 12 steps, 3 samples, 5 classes.

LENGTHS, TARGETS = (12, 9, 7), (4, 0, 3)
LABELS = torch.tensor([[1, 1, 2, 4], [0, 0, 0, 0], [3, 2, 3, 0]])


def scores() -> torch.Tensor:
    made = torch.randn(12, 3, 5, generator=torch.Generator().manual_seed(0))
    return made.log_softmax(2)


def ctc(x, target, lengths, targets, *, tensors=False, **options):
    """Losses and gradients of CPU torch and of the `jax` device, which must be equal."""
    got = []
    for device in ("cpu", "jax"):
        leaf = x.to(device).detach().requires_grad_()
        sizes = lengths, targets
        if tensors:
            sizes = tuple(torch.tensor(each).to(device) for each in sizes)
        loss = F.ctc_loss(leaf, target.to(device), *sizes, **options)
        loss.sum().backward()
        got.append((loss.detach().cpu(), leaf.grad.cpu()))
    return got


def test_ctc_of_padded_and_joined_targets():
    joined = torch.cat([row[:size] for row, size in zip(LABELS, TARGETS, strict=True)])
    for want, got in (
        ctc(scores(), joined, LENGTHS, TARGETS, tensors=True, reduction="none"),
        ctc(scores(), LABELS, torch.tensor(LENGTHS), torch.tensor((3, 0, 3)), blank=4),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_ctc_of_empty_targets():
    """Of silence: the targets have no columns, or none is used."""
    for target in (LABELS, LABELS[:, :0]):
        want, got = ctc(scores(), target, LENGTHS, (0, 0, 0), reduction="none")
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_ctc_of_more_labels_than_time():
    """Three equal labels need five steps."""
    x, target = scores()[:3, :2].contiguous(), torch.tensor([[1, 1, 1], [1, 2, 3]])

    def losses(device):
        leaf, found = x.to(device).detach().requires_grad_(), []
        for zero_infinity in (False, True):
            options = {"reduction": "none", "zero_infinity": zero_infinity}
            loss = F.ctc_loss(leaf, target.to(device), (3, 3), (3, 3), **options)
            found += [loss.detach(), torch.autograd.grad(loss[1], leaf)[0][:, 1]]
        return [one.cpu() for one in found]

    torch.testing.assert_close(losses("jax"), losses("cpu"), rtol=1e-4, atol=1e-4)


def test_ctc_refusals():
    x, target = scores().to("jax"), LABELS.to("jax")
    with pytest.raises(RuntimeError, match="blank must be in label range"):
        F.ctc_loss(x, target, LENGTHS, TARGETS, blank=9)
    with pytest.raises(RuntimeError, match="must be of size 3"):
        F.ctc_loss(x, target, LENGTHS[:2], TARGETS)
    with pytest.raises(RuntimeError, match="value at most 12, but got value 40"):
        F.ctc_loss(x, target, (40, 9, 7), TARGETS)
