"""Export to StableHLO, by torch_xla's names."""

from isoshard.torch_xla_bridge.export.exporting import (
    StableHLOGraphModule,
    save_as_stablehlo,
    save_torch_model_as_stablehlo,
)
from isoshard.torch_xla_bridge.export.exporting import to_stablehlo as exported_program_to_stablehlo
from isoshard.torch_xla_bridge.export.stablehlo_bundle import (
    InputLocation,
    StableHLOExportOptions,
    StableHLOFunc,
    StableHLOFunctionMeta,
    StableHLOModelBundle,
    VariableSignature,
    VariableType,
)

__all__ = [
    "InputLocation",
    "StableHLOExportOptions",
    "StableHLOFunc",
    "StableHLOFunctionMeta",
    "StableHLOGraphModule",
    "StableHLOModelBundle",
    "VariableSignature",
    "VariableType",
    "exported_program_to_stablehlo",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
]
