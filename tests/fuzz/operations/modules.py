"""Modules without randomness, and losses."""

from __future__ import annotations

import torch

from tests.fuzz.builder import Builder

_MODULES = (
    ("nn.Linear(4, 3)", (2, 4)),
    ("nn.Linear(4, 3, bias=False)", (2, 3, 4)),
    ("nn.Bilinear(4, 3, 2)", (2, 4), (2, 3)),
    ("nn.Conv1d(2, 4, 3, padding=1)", (2, 2, 6)),
    ("nn.Conv1d(2, 4, 2, stride=2, groups=2)", (2, 2, 6)),
    ("nn.Conv2d(2, 4, 3, padding=1, dilation=2)", (2, 2, 6, 5)),
    ("nn.Conv2d(2, 4, (3, 2), stride=2, padding_mode='circular', padding=1)", (1, 2, 5, 6)),
    ("nn.Conv2d(4, 4, 3, groups=4, padding='same')", (2, 4, 5, 5)),
    ("nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1)", (2, 2, 4)),
    ("nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, groups=2)", (1, 2, 4, 3)),
    ("nn.Conv3d(1, 2, 2)", (1, 1, 3, 3, 4)),
    ("nn.LayerNorm((3, 4))", (2, 3, 4)),
    ("nn.RMSNorm(4)", (2, 3, 4)),
    ("nn.GroupNorm(2, 4)", (2, 4, 3)),
    ("nn.BatchNorm1d(3)", (4, 3)),
    ("nn.BatchNorm2d(3, momentum=None)", (2, 3, 4, 2)),
    ("nn.BatchNorm1d(3).eval()", (4, 3, 2)),
    ("nn.InstanceNorm2d(2, affine=True)", (2, 2, 4, 4)),
    ("nn.InstanceNorm1d(2, track_running_stats=True)", (2, 2, 6)),
    ("nn.LocalResponseNorm(2)", (2, 4, 3)),
    ("nn.MaxPool1d(2)", (2, 2, 6)),
    ("nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)", (1, 2, 6, 5)),
    ("nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=False)", (2, 2, 6)),
    ("nn.AvgPool2d(2, ceil_mode=True)", (1, 2, 5, 5)),
    ("nn.AdaptiveAvgPool2d((2, 3))", (1, 2, 5, 6)),
    ("nn.AdaptiveMaxPool1d(2)", (2, 2, 6)),
    ("nn.LPPool1d(2, 2)", (2, 2, 6)),
    ("nn.PReLU(2)", (3, 2, 4)),
    ("nn.Softmax(dim=1)", (3, 4)),
    ("nn.Upsample(scale_factor=2)", (1, 2, 3, 3)),
    ("nn.Upsample(size=(5, 4), mode='bilinear')", (1, 2, 3, 3)),
    ("nn.PixelShuffle(2)", (1, 4, 2, 3)),
    ("nn.Unfold(2, stride=2)", (1, 2, 4, 4)),
    ("nn.Fold((4, 4), 2)", (1, 4, 9)),
    ("nn.ReflectionPad2d(1)", (1, 2, 3, 4)),
    ("nn.ZeroPad2d((1, 0, 2, 1))", (1, 2, 3, 4)),
    ("nn.ChannelShuffle(2)", (1, 4, 2, 2)),
    ("nn.Flatten()", (2, 3, 2)),
    ("nn.MultiheadAttention(4, 2, batch_first=True)", (2, 3, 4), (2, 3, 4), (2, 3, 4)),
    ("nn.LSTM(3, 2, batch_first=True)", (2, 4, 3)),
    ("nn.GRU(3, 2)", (4, 2, 3)),
    ("nn.RNN(3, 2, bidirectional=True)", (3, 2, 3)),
    ("nn.LSTMCell(3, 2)", (2, 3)),
    ("nn.GRUCell(3, 2)", (2, 3), (2, 2)),
    ("nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)", (2, 3, 4)),
    ("nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2))", (3, 4)),
)
_TUPLES = ("Attention", "LSTM", "GRU(", "nn.RNN")
_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss kl_div "
    "binary_cross_entropy_with_logits"
).split()


def _module(b: Builder) -> None:
    made, *shapes = b.one(_MODULES)
    b.bind(f"filled({made}, {b.seed()}).to(device)")
    last = b.lines[-1].text.split(" = ")[0] if b.lines and b.lines[-1].raises is None else None
    if last is None:
        return
    inputs = [_input(b, shape) for shape in shapes]
    call = f"{last}({', '.join(inputs)})"
    b.bind(f"{call}[0]" if any(name in made for name in _TUPLES) else call)


def _input(b: Builder, shape: tuple[int, ...]) -> str:
    known = b.tensors(lambda t: t.dtype == torch.float32 and t.numel() == torch.Size(shape).numel())
    if known and b.chance(60):
        return f"{b.one(known)}.reshape({shape})"
    return b.fresh(shape, torch.float32)


def _embedding(b: Builder) -> None:
    x = b.tensor(lambda t: t.dtype in (torch.int64, torch.int32) and t.numel() <= 40)
    b.bind(
        b.one(
            (
                f"F.embedding({x} % 5, {b.fresh((5, 3), torch.float32)})",
                f"filled(nn.Embedding(5, 3, padding_idx=1), {b.seed()}).to(device)({x} % 5)",
                f"F.embedding_bag({x}.reshape(1, -1) % 5, {b.fresh((5, 3), torch.float32)})",
            )
        )
    )


def _loss(b: Builder) -> None:
    x = b.tensor(lambda t: t.is_floating_point() and t.numel() > 0)
    t = b.scope[x]
    name = b.one(_LOSSES)
    wanted = b.fresh(t.shape, t.dtype)
    if "entropy" in name:
        wanted = f"{wanted}.sigmoid()"
    b.bind(f'F.{name}({x}, {wanted}, reduction="{b.one(("mean", "sum", "none"))}")')


def _classes(b: Builder) -> None:
    x = b.tensor(lambda t: t.is_floating_point() and t.dim() >= 2 and t.numel() > 0)
    n, classes, *rest = b.scope[x].shape
    labels = f"data({b.seed()}, {(n, *rest)}, torch.int64).to(device) % {classes}"
    b.bind(
        b.one(
            (
                f"F.cross_entropy({x}, {labels})",
                f'F.cross_entropy({x}, {labels}, label_smoothing=0.1, reduction="sum")',
                f"F.cross_entropy({x}, {labels}, ignore_index=0)",
                f"F.nll_loss(F.log_softmax({x}, 1), {labels})",
                f"F.cross_entropy({x}, {x}.detach().softmax(1))",
            )
        )
    )


OPERATIONS = (_module, _module, _module, _embedding, _loss, _classes)
