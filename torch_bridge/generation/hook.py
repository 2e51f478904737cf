"""`generate` of `transformers`, for a model on the `jax` device.

`GenerationMixin.generate` is wrapped when a program imports `transformers`; for models on other
devices the wrapper only calls it. On the device it keeps the prompt, the masks and the new tokens
on the CPU, where they may grow, takes a static cache unless another one is asked for, and runs
greedy decoding and sampling with a `Decoder`. `disable_compile=True` turns that off, as it turns
off `torch.compile` on other devices.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor

from . import decoding_loop  # which may import this module
from ._transformers_internals import CAN_COMPILE
from .cache_sharding import row_sharding
from .decoder import Decoder, length_bucket, row_bucket
from .full_cache import PLAIN, FullCache

KEPT = 4
"""Decoders that a model keeps, each with the memory of its cache."""
_LOGGER = logging.getLogger("isoshard")
_PASSED = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache"})
_PASSED |= {"logits_to_keep"}
"""Arguments of a model that a `Decoder` passes, in its own way."""
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_OF_A_LOOP = ("streamer", "assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus")
"""Arguments of `generate` that go to the loop of a generation mode."""


def _wrap(mixin: Any) -> None:
    """Wrap `generate` of a class."""
    original = mixin.generate
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(next(self.parameters(), None), LazyTensor):
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs).arguments
        options = call.pop("kwargs", {})
        del call["self"]
        return _generate(original, self, {**call, **options})

    mixin.generate = generate


def _generate(original: Callable[..., Any], model: Any, call: dict[str, Any]) -> Any:
    """Call `generate` with the token ids on the CPU, and return its result on their device.

    Args:
        original: `generate` of `transformers`.
        model: on the device.
        call: the other arguments, by name.
    """
    configs = [call.get("generation_config"), model.generation_config]
    option = functools.partial(_option, call, configs)
    if option("disable_compile") or call.get("custom_generate") is not None:
        return original(model, **call)
    ids = call.get("input_ids", call.get("inputs"))
    call = {name: _on_cpu(value) for name, value in call.items()}
    if _may_be_static(model, call, option):
        if configs[0] is None:
            call["cache_implementation"] = "static"
        else:
            call["generation_config"] = copy.copy(configs[0])
            call["generation_config"].cache_implementation = "static"
        _log_choice(type(model).__name__)
    if not model.config.is_encoder_decoder and option("cache_implementation") in (None, "static"):
        call["custom_generate"] = functools.partial(_decode, ids, call)
    with _inputs_of_encoder_on(model):
        result = original(model, **call)
    if isinstance(ids, LazyTensor):
        return pytree.tree_map(functools.partial(_moved, model.device), result)
    return result


def _option(call: dict[str, Any], configs: Sequence[Any], name: str) -> Any:
    """An option of the generation, looked for in the order of `generate`."""
    values = (call.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _may_be_static(model: Any, call: dict[str, Any], option: Callable[[str], Any]) -> bool:
    """Whether nobody has asked for another cache than a static one."""
    return (
        option("cache_implementation") in (None, "static")
        and option("use_cache") is not False
        and call.get("past_key_values") is None
        and not any(map(option, _ASSISTED))
        and bool(getattr(model, CAN_COMPILE.attribute, False))
    )


@functools.cache
def _log_choice(name: str) -> None:
    _LOGGER.info(
        "generate() of %s takes a static cache, and captures one program for prompts of a length "
        "and one for a token; disable_compile=True or cache_implementation='dynamic' turns it off",
        name,
    )


def _decode(
    ids: Any,
    call: dict[str, Any],
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """Run the loop of a generation mode, with a `Decoder` if it serves.

    Args:
        ids: the prompt as the caller passed it.
        call: the arguments of `generate`.
        model: the model.
        input_ids: the prompt on the CPU, a row for each result.
        logits_processor: as `generate` prepared it, like the others.
        stopping_criteria: likewise.
        generation_config: likewise.
        model_kwargs: likewise.
    """
    config = generation_config
    mode = config.get_generation_mode(call.get("assistant_model"))
    loop = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    others = {name: call[name] for name in _OF_A_LOOP if call.get(name) is not None}
    if mode is GenerationMode.ASSISTED_GENERATION:
        others["inputs_tensor"] = input_ids
    arguments = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": config,
        **others,
    }
    cache = model_kwargs.get("past_key_values")
    is_own = isinstance(cache, FullCache)
    is_plain = type(cache) is StaticCache and all(type(layer) in PLAIN for layer in cache.layers)
    is_users = call.get("past_key_values") is not None
    is_replaced = not is_users and (is_plain or mode is GenerationMode.ASSISTED_GENERATION)
    if not (is_own or is_replaced) or model_kwargs.get("inputs_embeds") is not None:
        return loop(model, input_ids, **arguments, **model_kwargs)
    is_single = (
        is_plain
        and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and config.prefill_chunk_size is None
        and not (config.output_attentions or config.output_hidden_states)
        and {name for name, value in model_kwargs.items() if value is not None} <= _PASSED
    )
    length = input_ids.shape[1]
    rows = row_bucket(len(input_ids)) if is_single else len(input_ids)
    size = length_bucket(max(stopping_criteria.max_length or 0, length) + 1)
    sizes = (cache.size, cache.size) if is_own else (size, 2 * size)
    split = row_sharding(model, rows, ids)
    key = (rows, split, model.dtype)
    kept = vars(model).setdefault("_isoshard_decoders", _Decoders())
    decoder = kept.take(key, *sizes) or Decoder(model, rows, sizes[0], split)
    callers = cache if is_own else None
    if not is_own:
        decoder.cache.reset()
        if config.return_dict_in_generate:
            callers = decoder.cache.like()
    with contextlib.nullcontext() if callers is None else decoder.holding(callers):
        if is_single:
            mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
            every = torch.arange(length).expand(input_ids.shape)
            result = decoding_loop.decode(
                decoder,
                input_ids,
                positions=every if positions is None else positions,
                mask=torch.ones_like(input_ids) if mask is None else mask,
                processors=logits_processor,
                criteria=stopping_criteria,
                config=config,
                streamer=call.get("streamer"),
            )
        else:
            model_kwargs["past_key_values"] = decoder.cache
            config.cache_implementation = None
            result = loop(_HostModel(model, decoder), input_ids, **arguments, **model_kwargs)
    if callers is not None and config.return_dict_in_generate:
        result.past_key_values = callers
    kept.put(key, decoder)
    return result


class _HostModel:
    """A model as a loop of `transformers` sees it: on the CPU, with the passes of a decoder.

    Its methods are those of the model, and get this object as `self`.
    """

    device = torch.device("cpu")

    def __init__(self, model: Any, decoder: Decoder):
        """See the class."""
        self.__dict__.update(_model=model, run_decoder=decoder.forward)

    @property
    def __class__(self) -> Any:
        """For `isinstance` and `super()` in the methods of the model."""
        return type(self._model)

    def __call__(self, **inputs: Any) -> Any:
        """The forward pass."""
        return self.run_decoder(**inputs)

    def __getattr__(self, name: str) -> Any:
        """What the model has."""
        value = inspect.getattr_static(type(self._model), name, None)
        if isinstance(value, types.FunctionType) and name not in vars(self._model):
            return types.MethodType(value, self)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model."""
        setattr(self._model, name, value)


class _Decoders:
    """The decoders of one model that are not in use; a copy of the model has none."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Decoder]] = []

    def take(self, key: Any, least: int, most: int) -> Decoder | None:
        """The one with the smallest cache of a size in a range, which is the caller's then."""
        fitting = [entry for entry in self._kept if entry[0] == key]
        fitting = [entry for entry in fitting if least <= entry[1].cache.size <= most]
        if not fitting:
            return None
        entry = min(fitting, key=lambda entry: entry[1].cache.size)
        self._kept.remove(entry)
        return entry[1]

    def put(self, key: Any, decoder: Decoder) -> None:
        """Keep one; the one that was used longest ago goes."""
        self._kept.append((key, decoder))
        del self._kept[:-KEPT]

    def __deepcopy__(self, memo: Any) -> _Decoders:
        return _Decoders()

    def __reduce__(self) -> Any:
        return _Decoders, ()


@contextlib.contextmanager
def _inputs_of_encoder_on(model: Any) -> Iterator[None]:
    """Context in which an encoder's inputs are moved to the device."""
    if not model.config.is_encoder_decoder:
        yield
        return
    move = functools.partial(_moved, model.device)
    hook = model.get_encoder().register_forward_pre_hook(
        lambda _, args, kwargs: pytree.tree_map(move, (args, kwargs)), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def _on_cpu(value: Any) -> Any:
    """Token ids and masks on the CPU; anything else as it is."""
    is_integer = isinstance(value, LazyTensor) and not value.is_floating_point()
    return value.cpu() if is_integer else value


def _moved(device: torch.device, value: Any) -> Any:
    """A CPU tensor on a device; anything else as it is."""
    return value.to(device) if type(value) is torch.Tensor else value


_wrap(GenerationMixin)
