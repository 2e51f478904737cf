"""README.md, claim by claim: words of its line -> the tests that show it.

Each line of text stands here, those of tables and lists too; `tests/test_readme.py` looks whether
each has tests, and whether these are there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.device_check import report

_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_TABLE_HEAD = re.compile(r"^\|.*\|\n\|[-|]+\|$", re.M)
_HEADING = re.compile(r"^#.*$", re.M)
_FIGURES = re.compile(
    f"^{re.escape(report.BEGIN)}$.*?^{re.escape(report.END)}$", re.M | re.S
)  # written by a command; tests/device_check compares them with what is kept

_README = "tests/test_readme.py::"
_LINKS = ("tests/test_site.py::test_no_link_is_broken", f"{_README}test_every_page_is_linked")
_SPEED = f"{_README}test_the_table_of_speed_is_what_was_measured"
_PEERS = f"{_README}test_what_peers_take_is_what_was_measured"
_COMPILED = f"{_README}test_what_compiled_is_what_is_noted"
_SAMPLES = f"{_README}test_a_sample_runs_alone_in_less_than_a_minute"
_COMPILE = "tests/torch_bridge/engine/capture/test_compile.py::"
_PLACE = "tests/core/transfer/test_device_put.py::"
_EXCHANGE = "tests/torch_bridge/test_exchange.py::"
_DEMO = "tests/cli/test_demo.py::TestCommand::test_the_short_one_shows_what_the_full_one_does"

CLAIMS: dict[str, tuple[str, ...]] = {
    # What it is, and the samples.
    "One sharding spec drives JAX and PyTorch": (
        "tests/core/plan/test_plan.py::test_one_plan_serves_torch_and_flax_names",
        f"{_EXCHANGE}test_a_module_shares_every_pointer_with_jax",
        "tests/jax_bridge/test_modules.py::test_to_jax_shares_the_buffers",
    ),
    "trains on a JAX mesh, as one XLA program per step": (
        "tests/torch_bridge/training/test_transformer.py::test_the_loss_curve_is_that_of_cpu_torch",
        "tests/torch_bridge/training/test_transformer.py::test_one_program_and_no_recompilation",
    ),
    "**In JAX**": (
        _SAMPLES,
        f"{_PLACE}TestPlans::test_by_name",
        "tests/jax_bridge/test_modules.py::test_a_module_is_laid_out_in_place_by_name",
    ),
    "**In PyTorch**": (_SAMPLES, f"{_README}test_the_torch_sample_compiles_one_program"),
    "**Both**": (
        _SAMPLES,
        "tests/torch_bridge/interop/test_torch_to_jax.py::test_parameters_share_the_modules_buffers",
        "tests/torch_bridge/interop/test_calling_jax.py::"
        "test_gradients_through_torch_and_jax_in_one_program",
    ),
    "captures a complete step": (
        f"{_COMPILE}test_a_step_on_a_mesh_is_one_program_and_keeps_layouts",
        "tests/torch_bridge/test_tensor.py::test_a_module_moves_and_keeps_its_parameters",
    ),
    # Try it.
    "Needs Python 3.11 to 3.14": (
        "tests/test_install.py::test_python_too_old",
        "tests/versions/test_versions.py::test_pairs_are_within_the_bounds_of_the_package",
    ),
    "The first command sets up `.venv`": (
        "tests/test_install.py::test_each_step_is_a_line",
        f"{_README}test_the_commands_of_make_are_there",
        _DEMO,
    ),
    "Without `make`": (
        "tests/test_packaging.py::test_extras_that_are_named_are_there",
        "tests/cli/test_doctor.py::test_everything_works_here",
        "tests/cli/test_command_page.py::test_an_example_runs",
    ),
    "On Linux, pip's torch is the CUDA build": _LINKS,
    "[Every command and its options]": (
        "tests/cli/test_command_page.py::test_help_is_shown_as_it_is_printed",
        "tests/cli/test_demo.py::TestCommand::test_the_full_one_is_longer_and_larger",
    ),
    "![The demo trains": (
        "tests/cli/test_demo.py::TestTraining::test_mesh_and_cpu_learn_alike_and_jax_agrees",
        "tests/cli/test_demo.py::TestTwin::test_computes_what_torch_computes_on_the_same_buffers",
    ),
    "**Seven notebooks**": (
        "tests/notebooks/test_kept.py::test_the_seven_are_there",
        "tests/test_site.py::test_notebooks_show_what_they_keep",
    ),
    "[first steps in JAX]": _LINKS,
    "[first steps in PyTorch]": _LINKS,
    "[both at once]": _LINKS,
    "[one sample over many devices]": _LINKS,
    "[from torch_xla](examples": _LINKS,
    "[ONNX with its layout]": _LINKS,
    "[planning a pod]": _LINKS,
    # What works.
    "| NumPy or JAX arrays, pytrees |": (
        f"{_PLACE}TestArrays::test_numpy",
        f"{_PLACE}TestTrees::test_one_spec",
        "tests/core/transfer/test_exchange.py::TestSharing::test_rows_are_shared",
    ),
    "| a mesh of JAX's": (
        f"{_PLACE}TestShardingOf::test_an_explicit_mesh_is_reported_as_it_is",
        "tests/core/layout/test_axis_types.py::TestAmbient::test_shard_and_reshard",
    ),
    "| a torch tensor or `nn.Module` |": (
        "tests/torch_bridge/test_tensor.py::test_moving_between_devices",
        "tests/torch_bridge/training/test_optimizers.py::test_every_optimizer_equals_the_cpu",
        "tests/torch_bridge/spmd/test_writes_through_views.py::",
        "tests/torch_bridge/autograd/test_autograd.py::test_module_hooks",
        "tests/torch_bridge/training/test_state_dicts.py::test_every_dtype_is_saved",
    ),
    "| a Flax or Equinox module |": (
        "tests/jax_bridge/test_training.py::",
        "tests/jax_bridge/test_linen.py::test_variables_are_laid_out_by_name",
        "tests/jax_bridge/test_equinox.py::test_a_step_trains",
    ),
    "| a PyTorch training step |": (
        "tests/torch_bridge/training/test_schedulers.py::test_a_scheduled_run_equals_the_cpu",
        f"{_COMPILE}test_clipping_accumulation_and_batch_norm_give_the_results_of_the_cpu",
        f"{_COMPILE}test_dropout_draws_what_the_plain_step_draws",
        "tests/torch_bridge/overrides/test_autocast_training.py::",
    ),
    "| a deep model, as it is |": (
        "tests/torch_bridge/engine/capture/test_repeat.py::test_steps_with_a_schedule",
        "tests/torch_bridge/engine/capture/test_repeat.py::test_checkpoints_in_the_middle",
    ),
    "| a model of `transformers` |": (
        "tests/torch_bridge/models/test_families.py::"
        "test_steps_are_those_of_cpu_torch_with_two_compilations",
        "tests/torch_bridge/models/test_families.py::test_a_compiled_step_is_one_program",
        "tests/torch_bridge/models/test_hf_families.py::test_its_plan_lays_out_its_model",
    ),
    "| Trainer, accelerate, Lightning": (
        "tests/torch_bridge/trainers/test_hugging_face.py::test_losses_checkpoints_and_resuming",
        "tests/torch_bridge/trainers/test_accelerate.py::test_as_on_the_cpu",
        "tests/torch_bridge/trainers/test_lightning.py::test_on_a_mesh",
        "tests/ecosystem/test_cases.py::test_the_numbers_are_those_of_the_cpu",
    ),
    "| a script of torch_xla's SPMD API |": (
        "tests/torch_xla_bridge/test_guide.py::test_the_guides_example_runs",
        "tests/with_torch_xla/test_scripts.py::test_losses_are_equal",
        "tests/with_torch_xla/test_scripts.py::test_annotations_are_equal",
    ),
    "| DTensor or FSDP2 under `torchrun` |": (
        "tests/multi_process/test_exchange.py::test_on_two_nodes_of_two",
        "tests/multi_process/test_fsdp.py::test_on_two_nodes_of_two",
    ),
    "| a tree of either framework to keep |": (
        "tests/torch_bridge/checkpoints/test_frameworks.py::"
        "test_from_torch_on_one_mesh_to_flax_on_another_and_on_one_device_and_back",
    ),
    "| weights in safetensors |": (
        "tests/core/weights/test_loading.py::test_only_what_is_needed_is_read",
        "tests/torch_bridge/test_weights.py::test_sharded_torch_into_flax",
    ),
    "| code of the other framework |": (
        "tests/torch_bridge/interop/test_torch_to_jax.py::"
        "test_values_and_gradients_are_those_of_torch",
        "tests/torch_bridge/interop/test_calling_jax.py::test_inside_a_compiled_step",
        "tests/torch_bridge/interop/test_flax_module.py::test_nnx_trains_as_in_flax",
    ),
    "| an ONNX file |": (
        "tests/onnx_bridge/executor/test_end_to_end.py::test_equal_to_torch",
        "tests/onnx_bridge/cli/test_onnx.py::TestCheck::test_faults",
        "tests/onnx_bridge/cli/test_onnx.py::TestShow::test_the_picture",
    ),
    "| one sample too large for a device |": (
        "tests/domain/test_lifting_table.py::test_operators_on_any_split",
        "tests/domain/torch_verbs/test_verbs.py::test_verbs_on_images",
    ),
    "| a machine that you do not have |": (
        "tests/planner/cli/test_plan_end_to_end.py::test_a_step_of_jax",
        "tests/planner/cli/test_plan_end_to_end.py::test_a_plan_that_is_found",
    ),
    "| a sharding, or a question of speed |": (
        "tests/core/pictures/test_visualize.py::test_rank_4_draws_the_sharded_axes",
        "tests/torch_bridge/test_metrics.py::test_a_compilation_tells_its_cause_and_line",
        "tests/torch_bridge/test_metrics.py::test_transfers_name_the_line_that_made_them",
    ),
    "[The full table]": (*_LINKS, f"{_README}test_sparse_and_quantised_tensors_are_refused"),
    # What was tested where.
    "| CPU: virtual devices": (
        "tests/multi_process/test_translation.py::test_on_four",
        "tests/test_doc_blocks.py::test_the_blocks_of_a_page_run",
    ),
    "| TPU v5e | nothing |": (_COMPILED,),
    "| GPU, H100 | nothing |": (_COMPILED,),
    "So speed on a TPU or GPU is unknown": (*_LINKS, _COMPILED),
    "is measured with torch's own tests": (
        "tests/conformance/test_report.py::test_figures_stand_on_top",
        *_LINKS,
    ),
    # Why not X alone: what is here.
    "| torch_xla 2.9 |": (
        "tests/with_torch_xla/spmd/test_exchange.py::"
        "test_nothing_can_be_shared_and_copies_are_counted",
        "tests/with_torch_xla/test_scripts.py::test_each_ran_under_its_own",
    ),
    "| torchax |": (
        "tests/torch_bridge/training/test_training.py::"
        "test_loss_gradients_and_a_step_equal_the_cpu",
        "tests/torch_bridge/engine/test_views.py::",
        _PEERS,
    ),
    "| DTensor, FSDP2 |": (
        "tests/multi_process/test_exchange.py::test_on_two_nodes_of_two",
        "tests/torch_bridge/training/test_transformer.py::"
        "test_its_collectives_are_those_of_the_hand_written_jax_step",
    ),
    "| TorchTPU |": ("tests/torch_bridge/spmd/test_annotations.py::",),
    "| ShardTensor |": (
        "tests/domain/torch_verbs/test_table.py::test_operators_of_rows",
        "tests/domain/points/test_neighbors.py::test_a_point_on_a_query_and_second_derivatives",
        "tests/domain/attention/test_ring_attention.py::test_zigzag_order_without_balance",
    ),
    "| JAX | no layer in between": (
        "tests/core/plan/test_plan.py::test_one_plan_serves_torch_and_flax_names",
        f"{_PLACE}TestTrees::test_all_faults_at_once_and_nothing_done",
    ),
    "[What is different, in detail]": _LINKS,
    # Speed.
    "`make bench` runs the same step": (f"{_README}test_the_commands_of_make_are_there", _SPEED),
    "Losses are equal to 1e-4": (
        "tests/benchmarks/test_peers.py::test_losses_that_differ_end_the_benchmark",
        _SPEED,
    ),
    "| MLP 512-2048-2048-512": (_SPEED,),
    "| GPT-2 small's shape": (_SPEED,),
    "| ResNet-50, width 16": (_SPEED,),
    "| ViT-B's shape": (_SPEED,),
    "Peers on the same steps": (_PEERS,),
    "DTensor in four processes": (_PEERS,),
    "Where we lose": (_PEERS,),
    "[How it is measured": _LINKS,
    # Read on.
    "[All pages, by what you want to do]": _LINKS,
    "- Use: [plans]": _LINKS,
    "[weights](docs/weights.md), [checkpoints]": _LINKS,
    "[DTensor](docs/dtensor.md), [serving]": _LINKS,
    "[torchrun](docs/on_torchrun.md)": _LINKS,
    "[Kubernetes](docs/on_kubernetes.md)": _LINKS,
    "[planning](docs/planning.md) and [by example]": _LINKS,
    "[by example](docs/domain_example.md)": _LINKS,
    "- Trouble:": (*_LINKS, "tests/test_troubleshooting.py::test_each_class_has_a_section"),
    "- Look up:": (
        *_LINKS,
        "tests/test_facade.py::test_the_page_on_stability_lists_the_public_names",
    ),
    "[torch_xla's names](docs/torch_xla.md), [operators]": _LINKS,
    "- Contribute:": _LINKS,
    "[debug a recompilation]": _LINKS,
    "[release](docs/releasing.md)": _LINKS,
    "- Understand:": _LINKS,
    "[architecture](docs/architecture.md)": _LINKS,
    "[What changed]": (*_LINKS, "tests/test_packaging.py::test_the_version_is_in_the_changelog"),
}


def lines(text: str) -> list[str]:
    """The lines that say something: no code, no heading of a page or a table.

    >>> lines("# A\\n\\nb `c`.\\n```sh\\nd\\n```\\n| e |\\n|---|\\n| f |\\n")
    ['b `c`.', '| f |']
    """
    for other in (_FIGURES, _FENCED, _TABLE_HEAD, _HEADING):
        text = other.sub("", text)
    return [line for line in text.splitlines() if line.strip()]


def faults(text: str, claims: dict[str, tuple[str, ...]], root: Path) -> Iterator[str]:
    """What is wrong: lines without tests, claims that no line makes, tests that are not there.

    Args:
        text: of the page.
        claims: words -> tests.
        root: the folder that tests are named from.
    """
    said = lines(text)
    for line in said:
        of = [words for words in claims if words in line]
        if len(of) != 1:
            yield f"{len(of)} claims are in the line {line!r}, one should be"
    for words, tests in claims.items():
        if not any(words in line for line in said):
            yield f"no line says {words!r}"
        if not tests:
            yield f"{words!r} has no test"
        for test in tests:
            path, _, name = test.partition("::")
            found = tests_in(root / path)
            if not found or (name and name not in found):
                yield f"{words!r}: there is no {test}"


@cache
def tests_in(path: Path) -> frozenset[str]:
    """The tests of a file by name, those of classes as `Class::test`; none if there is no file."""
    if not path.is_file():
        return frozenset()
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{one.name}" for one in node.body if hasattr(one, "name")}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))
