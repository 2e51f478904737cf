"""What annexes may use of the JAX bridge, by name: private, and of this version only."""

from .activations import constrain_activations as constrain_activations
from .activations import has_activations as has_activations
from .call_classes import called_by as called_by
from .call_classes import of_classes as of_classes
from .graphs import is_nnx as is_nnx
from .graphs import is_random_state as is_random_state
from .graphs import is_variable as is_variable
from .graphs import join as join
from .graphs import split as split
from .layout import named_boxes as named_boxes
from .trained_and_rest import join_parts as join_parts
from .training import TrainState as TrainState
