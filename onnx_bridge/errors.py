"""The errors of the ONNX bridge.

>>> error = AnnotationError("its groups hold 1 and 2 devices", node="up", tensor="w", axis=0)
>>> print(error)
node 'up', tensor 'w', axis 0: its groups hold 1 and 2 devices
>>> error.tensor, error.axis
('w', 0)
"""

from __future__ import annotations

from collections.abc import Sequence

from isoshard.core.kit import CodedError, CodedWarning, ShardingError


class AnnotationError(ShardingError, code="ISO007"):
    """An annotation is no NamedSharding, or contradicts itself or its graph.

    Args:
        reason: what is wrong, what is possible, how to fix it.
        node: name of the node that carries it, if it is known.
        tensor: name of the tensor.
        axis: of the tensor, if the error lies with one.

    Example:
        >>> import jax
        >>> from isoshard.onnx_bridge import to_sharding_spec
        >>> rows = jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
        >>> try:
        ...     to_sharding_spec(rows, "w", (3, 4))
        ... except AnnotationError as error:
        ...     print(f"{error.tensor}, axis {error.axis}: {error.reason}")
        w, axis 0: its size 3 is no multiple of its 2 shards. Pad it to 4, or split another axis.
    """

    def __init__(
        self,
        reason: str,
        *,
        node: str | None = None,
        tensor: str | None = None,
        axis: int | None = None,
    ) -> None:
        """Write the place before the reason."""
        self.reason, self.node, self.tensor, self.axis = reason, node, tensor, axis
        location = [
            f"node {node!r}" if node is not None else "",
            f"tensor {tensor!r}" if tensor is not None else "",
            f"axis {axis}" if axis is not None else "",
        ]
        where = ", ".join(item for item in location if item)
        super().__init__(f"{where}: {reason}" if where else reason)

    def at(self, node: str | None = None, tensor: str | None = None) -> AnnotationError:
        """The same error with the node, tensor or axis of the caller.

        Args:
            node: name of the node; kept as it is if the error has one.
            tensor: name of the tensor; likewise.

        Returns:
            A new error.
        """
        return AnnotationError(
            self.reason,
            node=node if self.node is None else self.node,
            tensor=tensor if self.tensor is None else self.tensor,
            axis=self.axis,
        )


class AnnotationWarning(CodedWarning, code="ISO008"):
    """Annotations of a model point at nothing, or other tools will not read them.

    Example:
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge import load
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> _ = model.graph.node[0].device_configurations.add(configuration_id="gone")
        >>> load(model)
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.AnnotationWarning: this model: annotations point at nothing: the Abs that makes 'y' is annotated for configuration 'gone', which the model does not have: it has none. A tool renamed or dropped what they name; annotate as the last step [ISO008]
    """  # noqa: E501


class ModelError(CodedError, ValueError, code="ISO009"):
    """A file, or a graph in it, cannot be read or run.

    Example:
        >>> from isoshard.onnx_bridge import load
        >>> load(b"")
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.ModelError: 0 bytes: not a model that can be read: it has no IR version; it has no graph
    """  # noqa: E501


def raise_annotations(errors: Sequence[AnnotationError]) -> None:
    """Raise what was collected over many tensors as one error.

    Example:
        >>> raise_annotations([AnnotationError("a", tensor="x"), AnnotationError("b", tensor="y")])
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.AnnotationError: 2 annotations do not fit:
          tensor 'x': a
          tensor 'y': b
    """
    if len(errors) == 1:
        raise errors[0] from None
    if errors:
        lines = "".join(f"\n  {error}" for error in errors)
        raise AnnotationError(f"{len(errors)} annotations do not fit:{lines}") from None
