"""What is used of Lightning that has no public name.

As `isoshard.core.runtime.private_names` describes it. The names are those of the package
`lightning`; `pytorch_lightning` and `lightning_fabric` have the same. They are looked up once
a program has imported Lightning.

>>> CHOOSE_STRATEGY.attribute
'_choose_strategy'
"""

from __future__ import annotations

from isoshard.core.runtime.private_names import PrivateNames

NAMES = PrivateNames("lightning", versions="2.5 to 2.6")

_CONNECTOR = "lightning.fabric.connector._Connector"
_WITHOUT = 'Lightning does not know `accelerator="jax"`'

TRAINER_CONNECTOR = NAMES.state(
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
    why="turns the arguments of a `Trainer` into a strategy",
    without=_WITHOUT,
)

FABRIC_CONNECTOR = NAMES.state(
    _CONNECTOR, why="turns the arguments of a `Fabric` into a strategy", without=_WITHOUT
)

CHOOSE_STRATEGY = NAMES.state(
    f"{_CONNECTOR}._choose_strategy",
    why="chooses the strategy: one device",
    without=_WITHOUT,
)

CHOOSE_ACCELERATOR = NAMES.state(
    f"{_CONNECTOR}._choose_auto_accelerator",
    why='chooses for `accelerator="auto"`, where a warning reports the CPU',
    without=_WITHOUT,
)

PRECISION = NAMES.state(
    f"{_CONNECTOR}._check_and_init_precision",
    why="makes the precision, whose autocast and scaler are of a device",
    without=_WITHOUT,
)
