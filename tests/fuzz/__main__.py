"""Run it: `python -m tests.fuzz`, with `--seed 7 --programs 2000`, `--seed new --minutes 2`, .."""

from __future__ import annotations

import argparse
import secrets
import sys

from .pool import Plan, fuzz


def main(arguments: list[str] | None = None) -> int:
    """Run random programs; exits with 1 if one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Random PyTorch programs on the CPU and on the jax device must agree.",
    )
    parser.add_argument("--programs", type=int, default=20_000, help="how many (20000)")
    parser.add_argument(
        "--seed",
        type=_seed,
        default=1,
        help="other programs; new: one never used (1)",
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first program (0)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--faults", type=int, default=20, help="stop after so many (20)")
    parser.add_argument("--out", default="out/fuzz", help="where programs that differ are saved")
    parser.add_argument(
        "--optimized",
        action="store_true",
        help="let XLA optimise as it does for users: the same programs, several times slower",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="only programs whose results lie in any layout"
    )
    given = parser.parse_args(arguments)
    plan = Plan(
        seed=given.seed,
        first=given.first,
        programs=given.programs,
        minutes=given.minutes,
        processes=given.processes,
        faults=given.faults,
        out=given.out,
        optimized=given.optimized,
        layouts=given.layouts,
    )
    return fuzz(plan)


def _seed(text: str) -> int:
    return secrets.randbelow(10**9) if text == "new" else int(text)


if __name__ == "__main__":
    sys.exit(main())
