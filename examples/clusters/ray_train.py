"""Ray Train starts the ranks of `train.py` in its workers, and starts them again when one is lost.

    python examples/clusters/ray_train.py --workers 4 -- --out /shared/run
    python examples/clusters/ray_train.py --workers 4 --tpu 4x4:TPU-V6E -- --out /shared/run --by jax

`TorchTrainer` has torch's process group ready, `JaxTrainer` JAX's runtime; `iso.distributed.init_distributed`
starts the other one beside it, with the same ranks. Arguments behind `--` are those of `train.py`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

SCRIPTS = str(Path(__file__).resolve().parent)


def train(config: dict[str, Any]) -> None:
    """What every worker runs, in a thread: SIGTERM is Ray's own there."""
    sys.path.insert(0, SCRIPTS)
    import train as script  # pyright: ignore[reportMissingImports]

    script.main(config["arguments"], signals=False)


def main() -> None:
    """Train, here or on the cluster that RAY_ADDRESS names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, required=True, help="ranks; with --tpu, TPU hosts")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--tpu", help="topology:type of a slice, as 4x4:TPU-V6E")
    parser.add_argument("--cpus", type=int, help="of a cluster that is started here, if not all")
    parser.add_argument("--restarts", type=int, default=5, help="how often workers may be lost")
    parser.add_argument("arguments", nargs="*", help="of train.py")
    args = parser.parse_args()
    ray.init(num_cpus=args.cpus)
    trainer_of, scaling = _kind(args)
    trainer = trainer_of(
        train,
        train_loop_config={"arguments": args.arguments},
        scaling_config=scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.restarts)),
    )
    trainer.fit()


def _kind(args: argparse.Namespace) -> tuple[Any, ScalingConfig]:
    if args.tpu:
        from ray.train.v2.jax import JaxTrainer

        topology, _, kind = args.tpu.partition(":")
        tpus = {"use_tpu": True, "topology": topology, "accelerator_type": kind}
        return JaxTrainer, ScalingConfig(num_workers=args.workers, **tpus)
    from ray.train.torch import TorchTrainer

    return TorchTrainer, ScalingConfig(num_workers=args.workers, use_gpu=args.gpu)


if __name__ == "__main__":
    main()
