"""What torch's kernels of neural networks and linear algebra refuse of shapes and mixed dtypes.

Its shape functions let this pass. The dtypes that a kernel does not know stand in `dtype_checks`.

>>> x, places = torch.zeros(1, 1, 2, 2, device="meta"), torch.zeros(1, 1, 1, 2, device="meta")
>>> one_dtype("grid_sampler_2d", {"input": x, "grid": places.long()})
Traceback (most recent call last):
...
RuntimeError: grid_sampler_2d: expected all tensors to have the same dtype, but got torch.float32 and torch.int64
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import current_node

from .kernel_checks import is_whole, spelled, tensors_of

Arguments = dict[str, Any]


def one_dtype(name: str, named: Arguments) -> None:
    """Refuse tensors of more than one dtype."""
    dtypes = {tensor.dtype for tensor in tensors_of(named)}
    # torch.func's autocast reaches only the operators themselves, so their gradients mix dtypes.
    in_backward = current_node() is not None
    if len(dtypes) > 1 and not in_backward:
        raise RuntimeError(
            f"{name}: expected all tensors to have the same dtype, but got "
            f"{' and '.join(sorted(map(str, dtypes)))}"
        )


def parameters_like_input(name: str, named: Arguments) -> None:
    """Refuse weights and statistics that have neither the dtype of the input nor float32."""
    dtype = named["input"].dtype
    if "batch" in name and not named["input"].numel():
        return
    allowed = {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}
    for argument, given in named.items():
        if isinstance(given, torch.Tensor) and given.dtype not in allowed:
            raise RuntimeError(
                f"{name}: mixed dtype: expect {argument} to have scalar type {spelled(dtype)} as "
                f"the input has, but found {spelled(given.dtype)}"
            )


def targets_like_scores(name: str, named: Arguments) -> None:
    """Refuse targets of another dtype than the scores."""
    scores, target = named["self"].dtype, named["target"].dtype
    if scores != target:
        raise RuntimeError(f"{name}: Found dtype {spelled(target)} but expected {spelled(scores)}")


def real_differences(name: str, named: Arguments) -> None:
    """Refuse a loss that would be complex, or whole."""
    dtype = torch.result_type(named["self"], named["target"])
    if not dtype.is_floating_point:
        raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def real_targets(name: str, named: Arguments) -> None:
    """Refuse complex targets and weights of real scores."""
    scores = named["self"].dtype
    for given in tensors_of(named):
        if given.is_complex() and not scores.is_complex:
            raise RuntimeError(
                f"{name}: result type {spelled(given.dtype)} can't be cast to the desired output "
                f"type {spelled(scores)}"
            )


def weights_like_scores(name: str, named: Arguments) -> None:
    """Refuse weights of classes of another dtype than the scores, also of no scores."""
    scores, weight = named["self"], named["weight"]
    if weight is not None and weight.dtype != scores.dtype:
        raise RuntimeError(
            f"expected scalar type {spelled(scores.dtype)} but found {spelled(weight.dtype)}"
        )


def weights_like_rows(name: str, named: Arguments) -> None:
    """Refuse weights of samples of another dtype than the rows they are of."""
    rows, weights = named["weight"], named.get("per_sample_weights")
    if weights is not None and weights.dtype != rows.dtype:
        raise RuntimeError(
            f"{name}: expected 'weight' to have the same type as 'per_sample_weights', but got "
            f"{spelled(rows.dtype)} and {spelled(weights.dtype)}"
        )


def float_kernels(name: str, named: Arguments) -> None:
    """Refuse what is solved in float32 and float64 only."""
    dtype = named["self"].dtype
    if is_whole(dtype) or dtype.itemsize == 2:
        raise RuntimeError(
            f"{name}: This function doesn't handle types other than float and double, got {dtype}"
        )


def symmetric_floats(name: str, named: Arguments) -> None:
    """Refuse eigenvalues of whole numbers and of half precision."""
    tensor = named["A"]
    if tensor.numel():
        float_kernels(name, {"self": tensor})


def floats_of_whole_numbers(name: str, named: Arguments) -> None:
    """Refuse whole numbers where the result is complex."""
    dtype = named["self"].dtype
    if is_whole(dtype):
        raise RuntimeError(f"{name}: {spelled(dtype)} has no complex dtype; give floats")


def margins(name: str, named: Arguments) -> None:
    """Refuse whole numbers in a loss that is a float, and targets that broadcast the scores."""
    scores, target = named["self"], named["target"]
    if is_whole(scores.dtype):
        raise RuntimeError(
            f"{name}: result type Float can't be cast to the desired output type "
            f"{spelled(scores.dtype)}"
        )
    shape = torch.broadcast_shapes(scores.shape, target.shape)
    if shape != scores.shape:
        raise RuntimeError(
            f"{name}: output with shape {list(scores.shape)} doesn't match the broadcast shape "
            f"{list(shape)} of scores and targets"
        )


def images_expected(name: str, named: Arguments) -> None:
    """Refuse what is no image to pool, before an axis that is not there is asked for."""
    shape = list(named["self"].shape)
    if len(shape) not in (3, 4):
        raise RuntimeError(
            f"{name}(): non-empty 3D or 4D (batch mode) tensor expected for input, but got {shape}"
        )


def pixels_expected(name: str, named: Arguments) -> None:
    """Refuse images with an axis to average over that has no place."""
    shape, volume = list(named["self"].shape), name.endswith("3d")
    axes = range(1, len(shape)) if volume else range(len(shape) - 2, len(shape))
    for axis in axes if len(shape) >= 3 else ():
        if not shape[axis]:
            raise RuntimeError(
                f"{name}(): Expected input to have non-zero size for non-batch dimensions, but "
                f"input has sizes {shape} with dimension {axis} being empty"
            )


def channels_in_groups(name: str, named: Arguments) -> None:
    """Refuse channels to shuffle that no groups of one size hold."""
    shape, groups = list(named["self"].shape), named["groups"]
    if len(shape) > 2 and groups > 0 and shape[1] % groups:
        raise RuntimeError(
            f"{name}: Number of channels must be divisible by groups. Got {shape[1]} channels and "
            f"{groups} groups."
        )


def channels_expected(name: str, named: Arguments) -> None:
    """Refuse images to resize that have no channels or no pixels."""
    shape = list(named["self"].shape)
    if len(shape) == 4 and 0 in shape[1:]:
        raise RuntimeError(f"{name}: Non-empty 4D data tensor expected but got sizes {shape}")


def samples_of_images(name: str, named: Arguments) -> None:
    """Refuse random numbers of windows that are not three for each channel of each image."""
    shape, image = list(named["random_samples"].shape), named["self"]
    if len(shape) != 3:
        raise RuntimeError(f"Expect _random_samples to have 3 dimensions, got {len(shape)}")
    images = 1 if image.dim() == 4 else image.shape[0]
    if shape[0] < images or shape[1:] != [image.shape[-4], 3]:
        raise RuntimeError(
            f"{name}: Expect _random_samples of shape {[images, image.shape[-4], 3]}, got {shape}"
        )


def slope_of_celu(name: str, named: Arguments) -> None:
    """Refuse to divide by an alpha of zero."""
    if named.get("alpha", 1.0) == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")


def windows_fit(name: str, named: Arguments) -> None:
    """Refuse weights, strides and a bias that do not go with an image."""
    stride, image, weight = named["stride"], named["input"], named["weight"]
    if any(step <= 0 for step in stride):
        raise RuntimeError(f"{name}: non-positive stride is not supported, got {list(stride)}")
    rank, groups = weight.dim(), named["groups"]
    if image.dim() != rank:
        raise RuntimeError(
            f"Expected {rank}-dimensional input for {rank}-dimensional weight "
            f"{list(weight.shape)}, but got {image.dim()}-dimensional input of size "
            f"{list(image.shape)} instead"
        )
    for argument in ("stride", "padding", "dilation", "output_padding"):
        if argument in named and len(named[argument]) not in (1, rank - 2):
            raise RuntimeError(
                f"expected {argument} to be a single integer value or a list of {rank - 2} values "
                f"to match the convolution dimensions, but got {argument}={list(named[argument])}"
            )
    if weight.shape[0] < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but "
            f"got weight of size {list(weight.shape)} instead"
        )
    _bias_fits(named)
    if not named["transposed"]:
        return
    if image.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input"
            f"{list(image.shape)} to have {weight.shape[0]} channels, but got {image.shape[1]} "
            "channels instead"
        )
    padding, dilation = named["output_padding"], named["dilation"]
    if any(p >= max(s, d) for p, s, d in zip(padding, stride, dilation, strict=False)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got output padding "
            f"{list(padding)}, stride {list(stride)}, dilation {list(dilation)}"
        )


def _bias_fits(named: Arguments) -> None:
    weight, bias = named["weight"], named["bias"]
    turned = named["transposed"]
    want = weight.shape[1] * named["groups"] if turned else weight.shape[0]
    if bias is not None and list(bias.shape) != [want]:
        raise RuntimeError(
            f"Given transposed={int(turned)}, weight of size {list(weight.shape)}, expected bias "
            f"to be 1-dimensional with {want} elements, but got bias of size {list(bias.shape)} "
            "instead"
        )


def windows_of_one_dtype(name: str, named: Arguments) -> None:
    """Refuse images, weights and a bias of dtypes that are not computed together."""
    image, weight, bias = named["input"], named["weight"], named["bias"]
    one_dtype(name, {"input": image, "weight": weight})
    if named["transposed"] and weight.dim() == 5:
        one_dtype(name, named)
    if bias is not None and named["transposed"] and not torch.can_cast(bias.dtype, image.dtype):
        raise RuntimeError(
            f"{name}: result type {spelled(bias.dtype)} can't be cast to the desired output type "
            f"{spelled(image.dtype)}"
        )


def targets_in_batch(name: str, named: Arguments) -> None:
    """Refuse targets that are not as many, or not as long, as their lengths say."""
    shape, lengths = list(named["targets"].shape), named["target_lengths"]
    if len(shape) not in (1, 2):
        raise RuntimeError(
            f"{name}: Expected 1 to 2 dimensions, but got {len(shape)}-dimensional tensor for "
            "argument #2 'targets'"
        )
    known = isinstance(lengths, list | tuple)
    for argument in ("input_lengths", "target_lengths"):
        given = named[argument]
        if isinstance(given, torch.Tensor) and not is_whole(given.dtype):
            raise RuntimeError(f"{name}: {argument} must be integral, but got {given.dtype}")
        least = min(given, default=0) if isinstance(given, list | tuple) else 0
        if least < 0:
            raise RuntimeError(
                f"{name}: Expected {argument} to have value at least 0, but got value {least}"
            )
    if len(shape) == 1 and known and shape[0] != sum(lengths):
        raise RuntimeError(
            f"{name}: Expected tensor to have size {sum(lengths)} at dimension 0, but got size "
            f"{shape[0]} for argument #2 'targets'"
        )
    count = len(lengths) if known else lengths.numel()
    if len(shape) == 2 and shape[0] != count:
        raise RuntimeError(
            f"{name}: Expected tensor to have size {count} at dimension 0, but got size "
            f"{shape[0]} for argument #2 'targets'"
        )
    if len(shape) == 2 and known and shape[1] < max(lengths, default=0):
        raise RuntimeError(
            f"{name}: Expected tensor to have size at least {max(lengths)} at dimension 1, but got "
            f"size {shape[1]} for argument #2 'targets'"
        )


def gradient_fits(name: str, named: Arguments) -> None:
    """Refuse the gradient of a result of another shape."""
    have, want = list(named["grad_output"].shape), list(named["output"].shape)
    if have != want:
        raise RuntimeError(
            f"{name}: Expected tensor for argument #1 'grad' to have same size as tensor for "
            f"argument #2 'output'; but {have} does not equal {want}"
        )


def vector_added(name: str, named: Arguments) -> None:
    """Refuse to add what is no vector as long as the matrix has rows, nor a number."""
    tensor, matrix = named["self"], named["mat"]
    if tensor.dim() > 1 or (matrix.dim() and tensor.numel() not in (1, matrix.shape[0])):
        raise RuntimeError(
            f"{name}: size mismatch, got input {list(tensor.shape)}, mat {list(matrix.shape)}, vec "
            f"{list(named['vec'].shape)}; give a vector of {matrix.shape[:1].numel()} elements"
        )


def vector_held(name: str, named: Arguments) -> None:
    """Refuse to add to a vector in place that does not hold the result."""
    vector_added(name, named)
    have, want = list(named["self"].shape), list(named["mat"].shape[:1])
    if have != want:
        raise RuntimeError(
            f"Bad in-place call: input tensor size {have} and output tensor size {want} should "
            "match"
        )


def reflections_fit(name: str, named: Arguments) -> None:
    """Refuse another number of reflections than a matrix product with them has."""
    matrix, factors, other = named["self"], named["input2"], named["input3"]
    if min(matrix.dim(), factors.dim() + 1, other.dim()) < 2:
        return
    want = min(other.shape[-2 if named["left"] else -1], matrix.shape[-1])
    if factors.shape[-1] != want:
        raise RuntimeError(
            f"torch.ormqr: tau.shape[-1] must be equal to {want}, but got {list(factors.shape)}"
        )


def positive_delta(name: str, named: Arguments) -> None:
    """Refuse a loss that turns from squares to lines at no distance."""
    if named.get("delta", 1.0) <= 0:
        raise RuntimeError(f"{name} does not support non-positive values for delta.")


def divisible_pixels(name: str, named: Arguments) -> None:
    """Refuse images that are not made of whole blocks."""
    shape, factor = list(named["self"].shape), named["downscale_factor"]
    if len(shape) > 2 and factor > 0 and any(extent % factor for extent in shape[-2:]):
        raise RuntimeError(
            f"{name} expects height and width to be divisible by downscale_factor, but got sizes "
            f"{shape} and {factor}"
        )


_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "native_group_norm")
_NORMS += ("native_layer_norm", "_batch_norm_with_update", "_native_batch_norm_legit_no_training")
_RULES: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (weights_like_scores,)),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), (weights_like_rows,)),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), (pixels_expected,)),
    **dict.fromkeys(("linalg_eig", "linalg_eigvals"), (floats_of_whole_numbers,)),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), (channels_in_groups,)),
    **dict.fromkeys(_NORMS, (parameters_like_input,)),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), (real_differences,)),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d", "linalg_cross"), (one_dtype,)),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), (one_dtype,)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), (one_dtype,)),
    "addmv": (vector_added, one_dtype),
    "addmv_": (vector_held, one_dtype),
    "celu": (slope_of_celu,),
    "fractional_max_pool3d": (samples_of_images,),
    "convolution": (windows_fit, windows_of_one_dtype),
    "upsample_bicubic2d": (channels_expected,),
    "linalg_lstsq": (float_kernels,),
    "_linalg_eigh": (symmetric_floats,),
    "max_pool2d_with_indices": (images_expected,),
    "soft_margin_loss": (margins, real_targets),
    "huber_loss": (positive_delta, real_targets),
    "binary_cross_entropy": (targets_like_scores, real_targets),
    "_ctc_loss": (targets_in_batch,),
    "_softmax_backward_data": (gradient_fits, one_dtype),
    "_log_softmax_backward_data": (one_dtype,),
    "ormqr": (reflections_fit,),
    "pixel_unshuffle": (divisible_pixels,),
}


def rules_of(name: str) -> tuple[Callable[[str, Arguments], None], ...]:
    """The rules of shapes and mixed dtypes for an operator; most have none.

    Args:
        name: the operator's, without namespace.
    """
    return _RULES.get(name) or _RULES.get(name.removesuffix("_"), ())
