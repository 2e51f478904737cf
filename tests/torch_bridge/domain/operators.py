"""What torch users do with a split sample: ShardTensor's table, and what it refuses or gets wrong.

Each takes the sample `x` and a weight `w`, both two-dimensional, or (`SPATIAL`) an image and a
kernel; and gives a tensor, or several.
"""

import torch
from torch.nn import functional as F

COLUMNS = 6

FLAT = {
    "reductions": {
        "var": lambda x, w: x.var(0),
        "prod": lambda x, w: x.prod(0),
        "log_softmax": lambda x, w: F.log_softmax(x, 1),
        "layer_norm": lambda x, w: F.layer_norm(x, (COLUMNS,), w[0], w[1]),
        "argmax": lambda x, w: x.argmax(0),
        "cross_entropy": lambda x, w: F.cross_entropy(
            x, torch.arange(len(x), device=x.device) % COLUMNS
        ),
    },
    "order": {
        "cumprod": lambda x, w: x.cumprod(1),
        "topk": lambda x, w: x.topk(3, 0).values,
        "slice": lambda x, w: x[3:11, 1:],
        "tril": lambda x, w: x.tril(),
        "diff": lambda x, w: x.diff(dim=0),
        "fft of the rows": lambda x, w: torch.fft.fft(x, dim=0).abs(),
    },
    "shapes": {
        "flat": lambda x, w: x.flatten(),
        "unbind": lambda x, w: [row * 2 for row in x[:2].unbind(0)],
        "select a row": lambda x, w: x[7] * 2,
        "index": lambda x, w: x[torch.tensor([0, 15, 3], device=x.device)],
        "gather": lambda x, w: x.gather(0, x.argsort(0)),
        "set a row": lambda x, w: x.index_fill(0, torch.tensor([4], device=x.device), 1.0),
        "chunk": lambda x, w: [part * 2 for part in x.chunk(3, 0)],
        "repeat": lambda x, w: x.repeat(2, 1),
        "expand": lambda x, w: x[None].expand(3, -1, -1) * w[0],
        "unfold": lambda x, w: x.unfold(0, 4, 2) * 2,
    },
    "products": {
        "cdist": lambda x, w: torch.cdist(x, x + 1),
        "cross": lambda x, w: torch.linalg.cross(x[:, :3], x[:, 3:]),
        "embedding": lambda x, w: F.embedding((x[:, 0].abs() * 2).long(), w),
        "mlp": lambda x, w: F.gelu(F.relu(F.linear(x, w)) @ w),
        "causal attention": lambda x, w: F.scaled_dot_product_attention(
            *[(x @ w).view(1, -1, 2, 3).transpose(1, 2)] * 3, is_causal=True
        ),
    },
}

# An image [2, 4, rows, 6] and a kernel [4, 4, 3, 3]; the split axis is the third.
SPATIAL = {
    "convolutions": {
        "conv2d": lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], padding=1),
        "conv_transpose2d, odd": lambda x, w: F.conv_transpose2d(
            x, w, stride=2, padding=1, output_padding=1
        ),
    },
    "windows": {
        "pixel_shuffle": lambda x, w: F.pixel_shuffle(x, 2),
        "unfold": lambda x, w: F.unfold(x, 3, padding=1),
        "group_norm": lambda x, w: F.group_norm(x, 2, w[0, :, 0, 0]),
        "grid_sample": lambda x, w: F.grid_sample(
            x, torch.tanh(x[:, :2, :5].permute(0, 2, 3, 1)), align_corners=False
        ),
    },
}
