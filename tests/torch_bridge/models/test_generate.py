"""`generate()` with a static cache: the tokens of the CPU, and no compilation per token."""

from __future__ import annotations

import torch

import isoshard as iso
import isoshard.torch_bridge
from isoshard import P, make_mesh
from isoshard.core.runtime import metrics
from tests.torch_bridge.models.families import FAMILIES, build, small, tokens

NEW = 3


def on_jax(name: str, where: str) -> torch.nn.Module:
    module = small(name).eval()
    if where == "one device":
        return module.to("jax")
    mesh = make_mesh((2, 4), ("data", "model"))
    return iso.shard(module, mesh, FAMILIES[name].plan(module))


def options(**changes) -> dict:
    return {"max_new_tokens": NEW, "cache_implementation": "static", "do_sample": False, **changes}


def prompt() -> dict[str, torch.Tensor]:
    """A prompt on the CPU, where found tokens are put together; one is padded on the left."""
    ids = tokens(0)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def test_greedy_tokens_are_those_of_the_cpu(counted):
    want = small("llama").eval().generate(**prompt(), **options())
    module = on_jax("llama", "mesh")
    assert torch.equal(module.generate(**prompt(), **options()), want)
    assert counted("compilations") <= 2, metrics.report()  # the prompt, and one token
    module.generate(**prompt(), **options())
    known = counted("compilations")
    assert known <= 3, metrics.report()  # the prompt again: the weights are on the devices now
    assert torch.equal(module.generate(**prompt(), **options()), want)
    assert counted("compilations") == known


def test_sampled_tokens_are_those_of_the_cpu(counted):
    def sample(module: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(3)
        return module.generate(**prompt(), **options(do_sample=True, temperature=0.8))

    want = sample(small("llama").eval())
    assert torch.equal(sample(on_jax("llama", "mesh")), want)
    assert counted("compilations") <= 2, metrics.report()
    greedy = small("llama").eval().generate(**prompt(), **options())
    assert not torch.equal(want, greedy)


def test_a_prompt_on_jax_gives_the_same_tokens():
    mesh = make_mesh((2, 4), ("data", "model"))
    want = small("llama").eval().generate(**prompt(), **options(max_new_tokens=2))
    module = small("llama").eval()
    module = iso.shard(module, mesh, FAMILIES["llama"].plan(module))
    there = {name: iso.shard(tensor, mesh, P("data")) for name, tensor in prompt().items()}
    got = module.generate(**there, **options(max_new_tokens=2))
    assert got.device.type == "jax"
    assert torch.equal(got.cpu(), want)


def test_an_encoder_runs_on_jax_and_its_decoder_from_the_cpu(counted):
    ids, layers = tokens(0), {"num_decoder_layers": 1}
    want = build("t5", **layers).eval().generate(ids, **options())
    module = build("t5", **layers).eval().to("jax")
    counts = []
    for _ in range(3):
        with torch.no_grad():
            states = module.get_encoder()(input_ids=ids.to("jax"))
        assert torch.equal(module.generate(ids, encoder_outputs=states, **options()), want)
        counts.append(counted("compilations"))
    assert counts[0] <= 4, metrics.report()  # encoder, first token, other tokens, and a mask
    assert counts[2] == counts[1]
