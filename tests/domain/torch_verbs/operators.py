"""What torch users do with a split sample: ShardTensor's table, and what it refuses or gets wrong.

Each takes the sample `x` and a weight `w`, both two-dimensional, and gives a tensor, or several.
"""

import torch
from torch.nn import functional as F

COLUMNS = 6

FLAT = {
    "order": {
        "cumprod": lambda x, w: x.cumprod(1),
        "topk": lambda x, w: x.topk(3, 0).values,
        "slice": lambda x, w: x[3:11, 1:],
        "tril": lambda x, w: x.tril(),
        "diff": lambda x, w: x.diff(dim=0),
        "fft of the rows": lambda x, w: torch.fft.fft(x, dim=0).abs(),
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
