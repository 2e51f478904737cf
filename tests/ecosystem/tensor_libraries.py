"""Libraries of tensors: names of axes, metrics, dictionaries, graphs, schedules, tables."""

from __future__ import annotations

import torch

from tests.ecosystem.case import Numbers, case, data


@case("diffusers", "DDPM noise, DDIM steps", again=True)
def _schedulers(device: str) -> Numbers:
    from diffusers import DDIMScheduler, DDPMScheduler

    x, noise = data(2, 1, 8, 8).to(device), data(2, 1, 8, 8, seed=1).to(device)
    noisy = DDPMScheduler().add_noise(x, noise, torch.tensor([10, 500]).to(device))
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(5, device=device)
    sample = noisy
    for t in scheduler.timesteps:
        sample = scheduler.step(sample * 0.1, t, sample).prev_sample
    return [noisy, sample]


@case("torchmetrics", "eleven metrics", again=True)
def _metrics(device: str) -> Numbers:
    import torchmetrics as tm

    scores = data(64, 5).softmax(-1).to(device)
    labels = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(1)).to(device)
    x, y = data(64, seed=2).to(device), data(64, seed=3).to(device)
    classes = {"task": "multiclass", "num_classes": 5}
    of_labels = (
        tm.Accuracy(**classes),
        tm.F1Score(**classes, average="macro"),
        tm.ConfusionMatrix(**classes),
        tm.AUROC(**classes),
        tm.AveragePrecision(**classes),
        tm.CalibrationError(**classes),
    )
    of_numbers = (
        tm.MeanSquaredError(),
        tm.R2Score(),
        tm.PearsonCorrCoef(),
        tm.SpearmanCorrCoef(),
        tm.ExplainedVariance(),
    )
    found = []
    for metric in of_labels:
        metric = metric.to(device)
        for part in range(0, 64, 32):
            metric.update(scores[part : part + 32], labels[part : part + 32])
        found.append(metric.compute())
    return [*found, *(metric.to(device)(x, y) for metric in of_numbers)]


@case("tensordict", "to, stack, index, mask, consolidate, TensorDictModule")
def _tensordict(device: str) -> Numbers:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    one = TensorDict({"a": data(4, 3), "b": {"c": data(4)}}, batch_size=[4]).to(device)
    both = torch.stack([one, one * 2])
    mask = (data(4, seed=1) > 0).to(device)
    whole = one.consolidate()
    torch.manual_seed(0)
    module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["a"], out_keys=["d"]).to(device)
    results = both["a"], both[1, 2]["b", "c"], one[mask]["a"], whole["a"], module(one)["d"]
    return [result.detach() for result in results]


@case("torchrl", "advantages, a replay buffer", again=True)
def _torchrl(device: str) -> Numbers:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    values, later, reward = (data(2, 6, 1, seed=n).to(device) for n in range(3))
    done = torch.zeros(2, 6, 1, dtype=torch.bool).to(device)
    done[0, 3] = True
    found = generalized_advantage_estimate(0.9, 0.95, values, later, reward, done)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, device=device), batch_size=4)
    buffer.extend(TensorDict({"x": data(8, 3).to(device)}, batch_size=[8]))
    return [*found, buffer[:]["x"]]


@case("einops", "rearrange, reduce, layers")
def _einops(device: str) -> Numbers:
    import einops
    from einops.layers.torch import EinMix, Rearrange

    torch.manual_seed(0)
    x = data(2, 3, 8, 8).to(device)
    mix = EinMix("b c p q -> b d p q", weight_shape="c d", bias_shape="d", c=3, d=4).to(device)
    net = torch.nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4))
    found = einops.reduce(x, "b c (h p) (w q) -> b c h w", "max", p=2, q=2), net(x), mix(x)
    return [result.detach() for result in found]


@case("einx", "rearrange, dot, mean, add")
def _einx(device: str) -> Numbers:
    import einx

    x, w = data(2, 6, 8).to(device), data(8, 4, seed=1).to(device)
    return [
        einx.id("b (h w) c -> b h w c", x, h=2),
        einx.dot("b s [c], [c] d -> b s d", x, w),
        einx.mean("b [s] c", x),
        einx.add("b s c, c -> b s c", x, w[:, 0]),
    ]


@case("pandas", "DataFrames of tensors, and tensors of DataFrames")
def _pandas(device: str) -> Numbers:
    import pandas

    tensor = data(4, 3).to(device)
    frame = pandas.DataFrame(tensor, columns=list("abc"))
    frame["d"] = (tensor[:, 0] * 2).tolist()
    return [torch.from_numpy(frame.to_numpy(copy=True)).to(device), torch.tensor(frame["d"].sum())]
