"""The sections: parts, time limits, what counts as a failure, and the main numbers.

This module imports neither JAX nor torch, since the process that starts the parts reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""The results of a section's parts, by part; empty for a part that did not run."""

MODELS = ("mlp", "vit", "gpt2", "llama")
"""In the order of the memory of a step, so that each raises the peak of its process. The planner
estimates 2, 4, 13 and 23 GiB on an H100."""

PLANNED_ON_CPU = ("llama",)
"""Models that the planner estimates on the CPU."""

PEERS = ("torch", "torch.compile")
"""Contestants whose failures do not count as failures of isoshard."""

LOSS_TOLERANCE = 3e-2
"""Relative, of the losses of four steps in bfloat16: an ulp is 4e-3, and each step rounds anew."""

LOGITS_TOLERANCE = 5e-2
"""Of logits in bfloat16, relative to the largest: every layer rounds."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the check.

    Attributes:
        name: of the section and of its module.
        limits: seconds for each part, by device.
        failures: returns what is wrong in the results, one line each.
        summary: returns the main numbers in one line.
        parts: names; by default one part with the section's name.
        optional: parts that may fail.
        variables: environment variables of the parts.
        timed: on a GPU its parts run one at a time, with no other part at the same time.
        more_options: returns further options of the parts, from the device and the records of the
            parts of earlier sections.
    """

    name: str
    limits: Mapping[str, float]
    failures: Callable[[Results], list[str]]
    summary: Callable[[Results], str]
    parts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    timed: bool = False
    more_options: Callable[[str, Mapping[str, Any]], dict[str, Any]] = lambda device, parts: {}

    def __post_init__(self) -> None:
        """Add the default part."""
        if not self.parts:
            object.__setattr__(self, "parts", (self.name,))


def ratio(results: Results, contestant: str, model: str) -> float | None:
    """The step time of a contestant over that of hand-written JAX; None if either is missing.

    Args:
        results: of the section "training".
        contestant: a part of that section.
        model: one of `MODELS`.

    Example:
        >>> jax, torch = ({"models": {"mlp": {"median_ms": ms}}} for ms in (2.0, 3.0))
        >>> ratio({"jax": jax, "torch": torch}, "torch", "mlp")
        1.5
    """
    times = [
        results.get(part, {}).get("models", {}).get(model, {}).get("median_ms")
        for part in (contestant, "jax")
    ]
    return times[0] / times[1] if all(times) else None


def _exchange_failures(results: Results) -> list[str]:
    return [
        f"{name}: {_message(check) or str(check['copied_bytes']) + ' bytes were copied'}"
        for name, check in results["exchange"].get("checks", {}).items()
        if not check["ok"]
    ]


def _exchange_summary(results: Results) -> str:
    checks = results["exchange"].get("checks", {})
    copied = sum(check["copied_bytes"] for check in checks.values())
    return f"{_passed(checks)}, {copied} bytes copied"


def _sample_failures(results: Results) -> list[str]:
    return [
        f"{name}, on {sample['platform'] or 'no platform'}: "
        f"{sample['output'].strip().rpartition(chr(10))[2]}"
        for name, sample in results["samples"].get("samples", {}).items()
        if not sample["ok"]
    ]


def _sample_summary(results: Results) -> str:
    return _passed(results["samples"].get("samples", {}))


def _training_failures(results: Results) -> list[str]:
    failures = []
    for model in MODELS:
        jax, isoshard = (
            results[part].get("models", {}).get(model, {}) for part in ("jax", "isoshard")
        )
        for part, result in (("jax", jax), ("isoshard", isoshard)):
            if "error" in result:
                failures.append(f"{model}, {part}: {_message(result)}")
        if "losses" in jax and "losses" in isoshard:
            pairs = zip(isoshard["losses"], jax["losses"], strict=True)
            if not all(abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in pairs):  # NaN fails
                failures.append(
                    f"{model}: the losses {isoshard['losses']} are off by more than "
                    f"{LOSS_TOLERANCE} from those of hand-written JAX, {jax['losses']}"
                )
    return failures


def _training_summary(results: Results) -> str:
    ratios = [(model, ratio(results, "isoshard", model)) for model in MODELS]
    text = ", ".join(f"{model} {value:.2f}" for model, value in ratios if value)
    return f"step time over hand-written JAX: {text or 'unknown'}"


def _decode_failures(results: Results) -> list[str]:
    logits, expected = (results[part].get("logits") for part in ("isoshard", "torch"))
    if not logits or not expected:
        return []
    tolerance = LOGITS_TOLERANCE * max(map(abs, expected))
    if all(abs(a - b) <= tolerance for a, b in zip(logits, expected, strict=True)):  # NaN fails
        return []
    return [
        f"the logits of the first token are off by more than {tolerance:.2g} from those of torch: "
        f"{logits}, {expected}"
    ]


def _decode_summary(results: Results) -> str:
    rates = {part: result.get("tokens_per_second") for part, result in results.items()}
    return ", ".join(f"{part} {rate:,.0f} tokens/s" for part, rate in rates.items() if rate)


def _planner_failures(results: Results) -> list[str]:
    return [
        f"{model}, depth {depth!r}: {_message(result)}"
        for depth, estimates in results["planner"].get("depths", {}).items()
        for model, result in estimates.items()
        if "error" in result
    ]


def _planner_summary(results: Results) -> str:
    lines = []
    for depth, estimates in results["planner"].get("depths", {}).items():
        for quantity in ("time", "memory"):
            ratios = {
                model: estimate.get(f"{quantity}_ratio") for model, estimate in estimates.items()
            }
            text = ", ".join(f"{model} {value:.2f}" for model, value in ratios.items() if value)
            lines += [f"{depth}, {quantity}: {text}"] if text else []
    return f"predicted over measured: {'; '.join(lines)}" if lines else "nothing was measured"


def _operator_failures(results: Results) -> list[str]:
    result = results["operators"]
    failures = [
        f"{failure['entry']}, {failure['column']}: {failure['reason']}"
        + (f" (largest error {failure['error']:.1e})" if failure["error"] else "")
        for failure in result.get("failures", ())
    ]
    if result and result["entries"] < result["of"]:
        failures.append(f"only {result['entries']} of {result['of']} entries, for lack of time")
    return failures


def _operator_summary(results: Results) -> str:
    result = results["operators"]
    columns = result.get("counts", {}).items()
    text = ", ".join(f"{name} {counts['passed']}/{counts['compared']}" for name, counts in columns)
    return f"{result.get('entries', 0)} entries; passed: {text}"


def _passed(results: Mapping[str, Any]) -> str:
    return f"{sum(result['ok'] for result in results.values())} of {len(results)} pass"


def _message(result: Mapping[str, Any]) -> str:
    """The error of a result; empty if it has none."""
    error = result.get("error")
    return f"{error['type']}: {error['message']}" if error else ""


def _training_options(device: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"models": MODELS}


def _planner_options(device: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    results = parts.get("training", {}).get("isoshard", {}).get("results", {})
    models = PLANNED_ON_CPU if device == "cpu" else MODELS
    return {"models": models, "measured": results.get("models", {})}


SECTIONS = {
    section.name: section
    for section in (
        Section("exchange", {"gpu": 60, "cpu": 120}, _exchange_failures, _exchange_summary),
        Section("samples", {"gpu": 90, "cpu": 120}, _sample_failures, _sample_summary),
        Section(
            "training",
            {"gpu": 100, "cpu": 120},
            _training_failures,
            _training_summary,
            parts=("jax", "isoshard", *PEERS),
            optional=PEERS,
            timed=True,
            more_options=_training_options,
        ),
        Section(
            "decode",
            {"gpu": 60, "cpu": 120},
            _decode_failures,
            _decode_summary,
            parts=("isoshard", "torch"),
            timed=True,
        ),
        Section(
            "planner",
            {"gpu": 90, "cpu": 120},
            _planner_failures,
            _planner_summary,
            # It plans for a described machine and uses no GPU.
            variables={"JAX_PLATFORMS": "cpu"},
            more_options=_planner_options,
        ),
        # Last, because it is useful even if its time is short.
        Section(
            "operators",
            {"gpu": 240, "cpu": 120},
            _operator_failures,
            _operator_summary,
            # The autotuner compiles and times several kernels per product, only for speed.
            variables={"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
        ),
    )
}
"""In the order in which they run."""
