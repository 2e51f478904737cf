"""Plans: where a model's layout is written, once for every framework."""

if __name__ != "isoshard.core.plan":
    raise ImportError(f"import isoshard.core.plan, not {__name__}")

from .activations import Activation, ModuleActivations
from .difference import LeafChange, PlanDiff
from .layout_rules import Conv, Experts, Heads, LayoutRule, Linear, PlanError
from .plan import Plan
from .resolved import ResolvedActivation, ResolvedLeaf, ResolvedPlan
from .size_rules import REPLICATE_BELOW, Largest
from .unused_rules import UnusedRuleWarning

__all__ = [
    "REPLICATE_BELOW",
    "Activation",
    "Conv",
    "Experts",
    "Heads",
    "Largest",
    "LayoutRule",
    "LeafChange",
    "Linear",
    "ModuleActivations",
    "Plan",
    "PlanDiff",
    "PlanError",
    "ResolvedActivation",
    "ResolvedLeaf",
    "ResolvedPlan",
    "UnusedRuleWarning",
]
