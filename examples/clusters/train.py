"""A decoder of `transformers` trains under FSDP2 and tensor parallelism, and survives its ranks.

    torchrun --standalone --nproc-per-node 4 --max-restarts 5 examples/clusters/train.py --out run

Every rank is one process with one device. Some steps are torch's, the next ones JAX's, on the same
memory. Every `--every` steps the run is saved; started again, on as many ranks or on others, it
goes on from the last checkpoint that was committed, with the batch that comes next. SIGTERM saves
and ends every rank with status 75 within `--grace` seconds. `RUN/losses.jsonl` has a line for each
step. docs/clusters.md tells how SLURM, Open MPI, Kubernetes and Ray start the same script.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import isoshard as iso

SAMPLES, LENGTH, VOCABULARY = 400, 24, 64
RATE, DECAY = 3e-3, 1e-2
ADAM = 3  # a checkpoint has the parameters and two moments of each


class Decoder(torch.nn.Module):
    """A Llama with random weights, and its loss."""

    def __init__(self) -> None:
        """Small enough for a laptop's cores."""
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of every next token; `tokens` is (rows, LENGTH + 1), int32."""
        logits = self.llama(input_ids=tokens[:, :-1].long(), use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten().long()
        )


def sharded(mesh: DeviceMesh) -> Decoder:
    """The decoder, the same in every rank: heads and features over "tp", FSDP2 over "dp"."""
    torch.manual_seed(0)
    model = Decoder()
    if mesh["tp"].size() > 1:
        styles: dict[str, Any] = {"llama.lm_head": ColwiseParallel(output_layouts=Replicate())}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            styles[f"llama.model.layers.*.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            styles[f"llama.model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            styles[f"llama.model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], styles)
    for layer in model.llama.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def dataset() -> torch.Tensor:
    """Sentences of a language with a rule: (SAMPLES, LENGTH + 1), int32."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (SAMPLES,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(3, (SAMPLES,), generator=generator)
        tokens.append((5 * tokens[-1] + noise) % VOCABULARY)
    return torch.stack(tokens, 1).int()


class Trainer:
    """The model, its optimizer, and a step in either framework.

    Args:
        mesh: of the ranks, ("dp", "tp").
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Fresh; `iso.restore` fills `model` and `optimizer`."""
        self.mesh = mesh
        self.model = sharded(mesh)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.optimizer = torch.optim.AdamW(
            self.model.named_parameters(), lr=RATE, weight_decay=DECAY
        )
        with torch.device("meta"):
            self.forward = iso.jax_function(Decoder())
        self.adam = optax.adamw(RATE, weight_decay=DECAY)
        self.compiled: Any = None

    def by_torch(self, tokens: torch.Tensor) -> float:
        """A step on this rank's rows; the loss of the whole batch."""
        self.optimizer.zero_grad()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        torch.distributed.all_reduce(loss)
        return float(loss) / torch.distributed.get_world_size()

    def by_jax(self, tokens: torch.Tensor) -> float:
        """The same step by JAX, on torch's memory and back into it."""
        buffers = iso.to_jax(self.model)
        params = {name: buffers.pop(name) for name in self.names}
        held = iso.to_jax(self.optimizer)
        batch = iso.to_jax(DTensor.from_local(tokens, self.mesh, [Shard(0), Replicate()]))
        if self.compiled is None:
            layouts = jax.tree.map(lambda leaf: leaf.sharding, (params, held))
            whole = jax.NamedSharding(batch.sharding.mesh, iso.P())
            self.compiled = jax.jit(self._step, out_shardings=(*layouts, whole))
        params, held, loss = self.compiled(params, held, buffers, batch)
        iso.load_arrays(self.model, params)
        iso.load_arrays(self.optimizer, held)
        return float(loss)

    def _step(self, params: Any, held: Any, buffers: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: self.forward({**p, **buffers}, batch))(params)
        moments, *rest = self.adam.init(params)
        count = held["step"][self.names[0]].astype(jnp.int32)
        moments = moments._replace(count=count, mu=held["exp_avg"], nu=held["exp_avg_sq"])
        updates, (moments, *_) = self.adam.update(grads, (moments, *rest), params)
        steps = {name: moments.count.astype(jnp.float32) for name in params}
        held = {"exp_avg": moments.mu, "exp_avg_sq": moments.nu, "step": steps}
        return optax.apply_updates(params, updates), held, loss


def main(arguments: Sequence[str] | None = None, *, signals: bool = True) -> None:
    """Train.

    Args:
        arguments: of the command line.
        signals: False where this is not the main thread, which alone gets SIGTERM (Ray Train).
    """
    args = parsed(arguments)
    processes = iso.init_distributed()
    if processes.size % args.tp:
        raise ValueError(f"--tp {args.tp} does not divide the {processes.size} ranks")
    mesh = init_device_mesh(
        "cpu", (processes.size // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    trainer, tokens = Trainer(mesh), dataset()
    order = iso.data.BatchOrder(SAMPLES, args.batch, seed=args.seed)
    parameters = sum(param.nbytes for param in trainer.model.parameters())
    iso.check_storage(args.out, ADAM * parameters, keep=args.keep, seconds=args.grace)

    def state(step: int) -> dict[str, Any]:
        data = order.state_dict(step)
        return {"model": trainer.model, "optimizer": trainer.optimizer, "data": data, "step": step}

    def save(step: int) -> None:
        iso.save(args.out, state(step), step=step, keep=args.keep)

    start = iso.latest(args.out) or 0
    if start:
        order.check(iso.restore(args.out, state(start), step=start)["data"], start)
    log = Log(args.out, processes, start)
    batches = order.after(start, mesh.get_local_rank("dp"), mesh["dp"].size())
    asking = (signal.SIGTERM,) if signals else ()
    with iso.Termination(grace=args.grace, signals=asking) as termination:
        for step, numbers in zip(range(start, args.steps), batches, strict=False):
            in_torch = step // args.turn % 2 == 0
            train = trainer.by_torch if in_torch else trainer.by_jax
            loss = train(tokens[torch.from_numpy(numbers)])
            log.line(step=step, loss=loss, by="torch" if in_torch else "jax", rows=numbers.tolist())
            done = step + 1
            last = termination.reached()
            if last or done == args.steps or done % args.every == 0:
                save(done)
            if last and done < args.steps:
                log.line(saved=done, status=termination.STATUS)
                termination.leave()


class Log:
    """Lines of JSON, by rank 0, in a file that every start goes on with.

    Args:
        out: the folder.
        processes: of the run.
        start: the first step.
    """

    def __init__(self, out: Path, processes: iso.Processes, start: int) -> None:
        """Says who runs."""
        self.file = (out / "losses.jsonl").open("a") if processes.rank == 0 else None
        self.line(start=start, ranks=processes.size, launcher=processes.launcher)

    def line(self, **values: Any) -> None:
        """Write one line, with the time."""
        if self.file is not None:
            self.file.write(json.dumps({**values, "time": time.time()}) + "\n")
            self.file.flush()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that all ranks see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--batch", type=int, default=16, help="rows of all ranks together")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--turn", type=int, default=10, help="steps by torch, then as many by JAX")
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples")
    parser.add_argument("--grace", type=float, default=20, help="seconds from SIGTERM to the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
