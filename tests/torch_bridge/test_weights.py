"""Random models of `transformers`: their files into torch on `jax` and into Flax, and both run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import torch
import transformers
from flax import linen, nnx

import isoshard as iso
from isoshard import P, Plan, weights
from isoshard.torch_bridge.weights import load_weights, on_arrays

VOCAB, WIDTH, HEADS, LAYERS = 128, 16, 4, 2


pytestmark = pytest.mark.filterwarnings("ignore::isoshard.errors.UnusedRuleWarning")
"""One plan is for several models, and for both frameworks."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def causal(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


class LlamaBlock(nnx.Module):
    def __init__(self, rngs):
        linear = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1 = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = linear(WIDTH, 64), linear(WIDTH, 64), linear(64, WIDTH)

    def __call__(self, x):
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(shape), 2, 0)
        x = x + self.out(causal(rotated(q), rotated(k), v).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """The Flax twin of LlamaForCausalLM, q, k and v as one."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotated(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = (jnp.tile(f(angles), 2)[:, None, :] for f in (jnp.cos, jnp.sin))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


LLAMA = weights.flax_names(
    {
        "model.layers.{i}.input_layernorm": "blocks.{i}.norm1",
        "model.layers.{i}.post_attention_layernorm": "blocks.{i}.norm2",
        "model.layers.{i}.self_attn.o_proj": "blocks.{i}.out",
        "model.layers.{i}.mlp.{name}_proj": "blocks.{i}.{name}",
        "model.embed_tokens": "tokens",
        "model.norm": "norm",
        "lm_head": "head",
    },
    first=[
        weights.Rule(
            [f"model.layers.{{i}}.self_attn.{n}_proj.weight" for n in "qkv"],
            "blocks.{i}.qkv.kernel",
            weights.Kernel(),
            weights.Concat(1),
        )
    ],
)
LLAMA_PLAN = Plan({"*_proj.weight": ("y",), "*.kernel": (None, "y")}, default=P())


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def ids():
    return np.random.default_rng(0).integers(3, VOCAB, (2, 8)).astype(np.int64)


def randomised(model):
    """Norms and biases that are not ones and zeros, so that a mix-up is seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A model, and a folder that transformers saved."""
    torch.manual_seed(0)
    model, folder = randomised(llama()), tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="15KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


def test_into_torch_on_jax(case, mesh):
    model, folder = case
    loaded = iso.load_safetensors(folder, mesh, LLAMA_PLAN)
    other = llama()
    load_weights(other, loaded)
    for name, parameter in model.named_parameters():
        theirs = dict(other.named_parameters())[name]
        assert theirs.device.type == "jax"
        assert iso.to_jax(theirs) is loaded[name]
        np.testing.assert_array_equal(parameter.detach().numpy(), np.asarray(loaded[name]))
    run = on_arrays(other, use_cache=False)
    assert weights.verify(on_arrays(model), run, ids(), atol=1e-4).largest > 0  # two ways


def test_into_the_flax_twin(case, mesh):
    model, folder = case
    flax = nnx.eval_shape(lambda: Llama(nnx.Rngs(0)))
    graph, shapes = nnx.split(flax)
    state = iso.load_safetensors(folder, mesh, LLAMA_PLAN, weights=LLAMA, like=shapes)
    flax = nnx.merge(graph, state)
    assert flax.blocks[0].up.kernel.sharding.spec == P(None, "y")
    run = nnx.jit(lambda flax, x: flax(x))
    weights.verify(on_arrays(model), lambda x: run(flax, jnp.asarray(x)), ids(), atol=1e-4)


def test_from_module_to_module_to_a_file_and_back(case, tmp_path):
    model, _ = case
    state = LLAMA.apply(model, like=nnx.eval_shape(lambda: nnx.state(Llama(nnx.Rngs(0)))))
    back = LLAMA.inverse(state, like=model)
    own = dict(model.named_parameters())
    assert sorted(back) == sorted(own)
    for name, parameter in own.items():
        np.testing.assert_array_equal(parameter.detach().numpy(), np.asarray(back[name]))
    iso.save_safetensors(tmp_path / "out", back, max_shard_size=30_000)
    (tmp_path / "out" / "config.json").write_text(model.config.to_json_string())
    other = type(model).from_pretrained(tmp_path / "out").eval()
    weights.verify(on_arrays(model), on_arrays(other), ids(), rtol=0, atol=0)


def test_sharded_torch_into_flax(mesh):
    model = llama()
    plan = Plan({"*_proj.weight": (None, "y"), "*embed*": ("y",)}, default=P())
    iso.shard(model, mesh, plan)
    state = LLAMA.apply(model, like=nnx.eval_shape(lambda: nnx.state(Llama(nnx.Rngs(0)))))
    qkv = state["blocks"][0]["qkv"]["kernel"][...]
    assert qkv.sharding.spec == P("y")


class Conv(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, (3, 5), stride=2, padding=(1, 2), groups=1)
        self.bn = torch.nn.BatchNorm2d(8)
        self.fc = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


class LinenConv(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (3, 5), strides=2, padding=((1, 1), (2, 2)), name="conv")(x)
        x = linen.BatchNorm(use_running_average=True, epsilon=1e-5, name="bn")(x)
        return linen.Dense(4, name="fc")(jax.nn.relu(x).mean((1, 2)))


def test_a_convolution_with_linen():
    model = randomised(Conv())
    model(torch.randn(4, 3, 9, 9))  # statistics
    model.eval()
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 9)).astype(np.float32)
    flax = LinenConv()
    like = jax.eval_shape(flax.init, jax.random.key(0), jnp.zeros((2, 9, 9, 3)))
    variables = weights.linen_names().apply(model, like=like)
    weights.verify(on_arrays(model), lambda x: flax.apply(variables, x.transpose(0, 2, 3, 1)), x)
    back = weights.linen_names().inverse(variables, like=model)
    assert sorted(back) == sorted(model.state_dict())


def test_a_wrong_rule_is_found_by_running_both():
    """GPT-2's square weights fit either way round; only the results tell."""
    model, flax = randomised(torch.nn.Linear(4, 4)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    wrong = weights.WeightMap([weights.Rule("weight", "kernel"), weights.Rule("bias", "bias")])
    nnx.update(flax, wrong.apply(model, like=nnx.state(flax)))
    with pytest.raises(weights.WeightError, match="elements differ by more than"):
        weights.verify(on_arrays(model), flax, np.eye(2, 4, dtype=np.float32))


def test_into_a_module_on_meta():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    load_weights(model, {"1.weight": jnp.ones((8, 4))})
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type == "jax"
    assert isinstance(model[0].weight, torch.nn.Parameter)


def test_what_does_not_fit_a_module_is_listed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    before = model[0].weight
    given = {name: iso.to_jax(t.detach()) for name, t in model.state_dict().items()}
    given["0.weight"] = jnp.ones((4, 8))
    given["0.bias"] = jnp.ones(8, jnp.bfloat16)
    given["2.weight"] = jnp.ones(3)
    del given["1.running_mean"]
    with pytest.raises(weights.WeightError) as caught:
        load_weights(model, given)
    text = str(caught.value)
    for line in (
        "(4 errors)",
        "2.weight (3,): Sequential has no such weight",
        "0.weight: shape (4, 8), wanted (8, 4)",
        "0.bias: dtype bfloat16, wanted float32",
        "1.running_mean (8,): is missing",
    ):
        assert line in text
    assert model[0].weight is before
    assert before.device.type == "cpu"


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 8)
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x):
        return self.fc(x) * self.scale


def test_buffers_that_are_no_weights(mesh):
    model, other = Scaled(), Scaled()
    given = {name: iso.to_jax(t.detach()) for name, t in model.state_dict().items()}
    load_weights(other, iso.shard(given, mesh, {"fc.weight": P("y"), "fc.bias": P("y")}))
    assert other.scale.device.type == "jax"
    weights.verify(on_arrays(model), on_arrays(other), np.ones((2, 4), np.float32))
    with torch.device("meta"):
        empty = Scaled()
    with pytest.raises(weights.WeightError, match=r"scale \(8,\): is on meta and in no state dict"):
        load_weights(empty, given)


def test_a_module_on_meta_says_what_is_wanted():
    with torch.device("meta"):
        model = torch.nn.Linear(4, 8)
    flax = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    back = weights.flax_names().inverse(nnx.state(flax), like=model)
    load_weights(model, back)
    weights.verify(on_arrays(model), flax, np.ones((2, 4), np.float32))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_results_keep_64_bits(device):
    model = torch.nn.Linear(4, 3).double()
    x = np.full((2, 4), 0.1)
    want = model(torch.from_numpy(x)).detach().numpy()
    got = on_arrays(model.to(device))(x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)
    assert on_arrays(lambda x: x.long())(x).dtype == np.int64


def channels_last(flax):
    return lambda x: jnp.moveaxis(flax(jnp.moveaxis(jnp.asarray(x), 1, -1)), -1, 1)


@pytest.mark.parametrize("outs", [3, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_a_transposed_convolution_needs_a_rule_of_its_own(outs, turned):
    """With as many channels in as out it fitted as a Conv, and its numbers were wrong."""
    model = randomised(torch.nn.ConvTranspose2d(3, outs, (2, 3), stride=(2, 1)))
    flax = nnx.ConvTranspose(
        3, outs, (2, 3), (2, 1), padding="VALID", transpose_kernel=turned, rngs=nnx.Rngs(0)
    )
    like = nnx.state(flax)
    how = r"weight: the weight of a ConvTranspose2d is \(in, out, .*first=\[Rule\('weight', .*Tran"
    for preset in (weights.flax_names(), weights.linen_names()):
        with pytest.raises(weights.WeightError, match=how):
            preset.apply(model, like=like if preset == weights.flax_names() else {"params": like})
    with pytest.raises(weights.WeightError, match=how):
        weights.flax_names().inverse(like, like=model)
    op = weights.Kernel() if turned else weights.TransposedKernel()
    names = weights.flax_names(first=[weights.Rule("weight", "kernel", op)])
    nnx.update(flax, names.apply(model, like=like))
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    weights.verify(on_arrays(model), channels_last(flax), x)
    back = names.inverse(nnx.state(flax), like=model)
    np.testing.assert_array_equal(back["weight"], model.weight.detach().numpy())


def test_a_transposed_convolution_of_linen_is_known_by_its_name():
    """Also where the source is no module, but a dictionary of tensors."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.ConvTranspose(3, (2, 2))(x)

    like = jax.eval_shape(Net().init, jax.random.key(0), jnp.zeros((1, 4, 4, 3)))
    state = {f"up.{name}": x for name, x in torch.nn.ConvTranspose2d(3, 3, 2).state_dict().items()}
    names = weights.linen_names({"up": "ConvTranspose_0"})
    how = r"the weight of a ConvTranspose is .*'params.ConvTranspose_0.kernel', TransposedKernel"
    with pytest.raises(weights.WeightError, match=how):
        names.apply(state, like=like)
    with pytest.raises(weights.WeightError, match=how):
        names.inverse(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like), like=state)
    rule = weights.Rule("up.weight", "params.ConvTranspose_0.kernel", weights.TransposedKernel())
    names = weights.linen_names({"up": "ConvTranspose_0"}, first=[rule])
    assert names.apply(state, like=like)["params"]["ConvTranspose_0"]["kernel"].shape == (
        2,
        2,
        3,
        3,
    )


def test_a_transposed_convolution_from_a_file(tmp_path, mesh):
    model = randomised(torch.nn.ConvTranspose1d(4, 4, 3))
    iso.save_safetensors(tmp_path, model)
    rule = weights.Rule("weight", "kernel", weights.TransposedKernel())
    names = weights.flax_names(first=[rule])
    like = {"kernel": jax.ShapeDtypeStruct((3, 4, 4), "float32"), "bias": jnp.zeros(4)}
    state = iso.load_safetensors(
        tmp_path, mesh, {"kernel": (None, "y"), "bias": ()}, weights=names, like=like
    )
    want = names.apply(model, like=like)["kernel"]
    np.testing.assert_array_equal(state["kernel"], want)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (torch.nn.Embedding(4, 4), r"an Embedding is \(rows, features\)"),
        (torch.nn.EmbeddingBag(4, 4), r"an EmbeddingBag is \(rows, features\)"),
        (transformers.pytorch_utils.Conv1D(4, 4), r"a Conv1D of transformers is \(in, out\)"),
        (torch.nn.Bilinear(4, 4, 4), r"a Bilinear is \(out, in1, in2\)"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_square_weights_of_other_layers_are_no_kernels(layer, why):
    shape = (4,) * layer.weight.dim()
    like = {name: jax.ShapeDtypeStruct((4,), "float32") for name in dict(layer.named_parameters())}
    like = {**like, "kernel": jax.ShapeDtypeStruct(shape, "float32")}
    del like["weight"]
    with pytest.raises(weights.WeightError, match=why):
        weights.flax_names().apply(layer, like=like)


@pytest.mark.parametrize(
    ("layer", "flax", "shape"),
    [
        (lambda: torch.nn.Conv1d(4, 8, 3, groups=2), {"groups": 2, "window": (3,)}, (2, 4, 7)),
        (lambda: torch.nn.Conv2d(4, 8, 3, groups=4), {"groups": 4, "window": (3, 3)}, (2, 4, 6, 5)),
    ],
    ids=["groups", "depthwise"],
)
def test_grouped_convolutions(layer, flax, shape):
    model = randomised(layer())
    other = nnx.Conv(
        4, 8, flax["window"], padding="VALID", feature_group_count=flax["groups"], rngs=nnx.Rngs(0)
    )
    nnx.update(other, weights.flax_names().apply(model, like=nnx.state(other)))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weights.verify(on_arrays(model), channels_last(other), x)


def test_gates_of_recurrent_layers_have_no_standard_name():
    flax = nnx.OptimizedLSTMCell(4, 4, rngs=nnx.Rngs(0))
    like = nnx.state(flax, nnx.Param)
    with pytest.raises(weights.WeightError, match=r"weight_ih.*like has no weight_ih"):
        weights.flax_names().apply(torch.nn.LSTMCell(4, 4), like=like)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_files_keep_64_bits(device, tmp_path):
    """Also where JAX computes with 32: a file holds the bytes."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.BatchNorm1d(2))
    model[1].num_batches_tracked += 2**40
    state = {"third": torch.tensor([1 / 3], dtype=torch.float64), "many": torch.tensor(2**40 + 1)}
    want = {**model.state_dict(), **state}
    model.to(device)
    for name, tree in [
        ("module", model),
        ("tree", {name: tensor.to(device) for name, tensor in state.items()}),
    ]:
        [file] = iso.save_safetensors(tmp_path / f"{name}.safetensors", tree)
        for key, tensor in safetensors.torch.load_file(file).items():
            assert tensor.dtype == want[key].dtype
            assert torch.equal(tensor, want[key].cpu()), key


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_the_state_of_adam_goes_to_optax(device):
    model = randomised(torch.nn.Linear(3, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.01)
    names, x = weights.flax_names(), np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    def loss(output):
        return (output**2).sum() + output.sum()

    def train():
        optimizer.zero_grad()
        loss(model(torch.from_numpy(x).to(device))).backward()
        optimizer.step()

    train()
    flax = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    params = names.apply(model, like=nnx.state(flax))
    tx = optax.adamw(0.1, weight_decay=0.01)
    state = tx.init(params)
    with pytest.raises(weights.WeightError, match=r"AdamW is no weights.*'exp_avg'.*\[0\]\.mu"):
        names.apply(optimizer, like=state)
    with pytest.raises(weights.WeightError, match=r"AdamW is no weights.*iso\.save"):
        iso.save_safetensors("never", optimizer)
    moments = [
        names.apply(
            {name: optimizer.state[p][slot] for name, p in model.named_parameters()},
            like=getattr(state[0], kept),
        )
        for slot, kept in (("exp_avg", "mu"), ("exp_avg_sq", "nu"))
    ]
    count = jnp.asarray(int(optimizer.state[model.weight]["step"]), jnp.int32)
    state = (state[0]._replace(count=count, mu=moments[0], nu=moments[1]), *state[1:])
    for _ in range(3):
        grads = jax.grad(lambda params: loss(x @ params["kernel"][...] + params["bias"][...]))(
            params
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    back = names.inverse(jax.block_until_ready(params), like=model)
    for _ in range(3):  # torch writes to memory that JAX has read by now
        train()
    for name, parameter in model.named_parameters():  # updates are 0.1; optax corrects in float32
        np.testing.assert_allclose(back[name], parameter.detach().cpu(), rtol=0, atol=1e-5)


HF = {
    "llama": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 4}),  # buffers for each kind of layer
    "bert": ("Bert", {}),  # position_ids, token_type_ids
}


@pytest.mark.parametrize("family", HF)
def test_buffers_that_no_file_has(tmp_path, mesh, family):
    name, options = HF[family]
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "vocab_size": VOCAB}
    kind = "TextConfig" if family == "gemma3" else "Config"
    config = getattr(transformers, f"{name}{kind}")(**sizes, **heads, **options)
    cls = getattr(transformers, f"{name}ForMaskedLM" if family == "bert" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    expected = cls(config).eval()
    iso.save_safetensors(tmp_path / "out", expected, config=config, max_shard_size="20KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    x = torch.from_numpy(ids())
    with torch.device("meta"):
        model = cls(config).eval()
    state = torch.random.get_rng_state()
    load_weights(model, iso.load_safetensors(tmp_path / "out", mesh, Plan({}, default=P())))
    assert torch.equal(torch.random.get_rng_state(), state)
    buffers = dict(expected.named_buffers())
    for path, buffer in model.named_buffers():
        assert torch.equal(buffer.cpu(), buffers[path]), path
    again = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert type(again).__name__.startswith(name)
    plain = cls.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = expected(input_ids=x).logits
        assert torch.equal(plain(input_ids=x).logits, logits)
        found = model(input_ids=x.to("jax")).logits
    torch.testing.assert_close(found.cpu(), logits, atol=1e-4, rtol=0)


class Masked(torch.nn.Module):
    """Its buffer is computed by its constructor alone."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)


class Planned(Masked):
    """As in torchtitan: one function of the model sets all buffers."""

    def init_weights(self):
        torch.nn.init.normal_(self.fc.weight)
        self.mask = torch.ones(4, 4, dtype=torch.float64).triu()


def test_a_buffer_without_an_initializer():
    weight = jnp.ones((4, 4))
    with torch.device("meta"):
        model, other = torch.nn.Sequential(Masked()), Planned()
    with pytest.raises(weights.WeightError, match=r"0\.mask \(4, 4\): is on meta and in no state"):
        load_weights(model, {"0.fc.weight": weight})
    assert model[0].fc.weight.device.type == "meta"  # nothing is half done
    load_weights(model, {"0.fc.weight": weight, "0.mask": jnp.tril(weight)})
    assert model[0].mask.sum().item() == 10
    load_weights(other, {"fc.weight": weight})
    assert other.mask.dtype == torch.float32
    assert torch.equal(other.mask.cpu(), torch.ones(4, 4).triu())
    assert other.fc.weight.sum().item() == 16
