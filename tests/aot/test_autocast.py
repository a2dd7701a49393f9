"""Autocast in compiled TPU and GPU programs: what multiplies float32 there, and what is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from tests.aot.conftest import Compiler
from tests.support import rule_models
from tests.support.compiled import products_in

pytestmark = pytest.mark.exhaustive
WIDTH, HIDDEN, BATCH, TOKENS, LAYERS = 512, 2048, 8, 256, 4


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "scale": abstract(LAYERS, WIDTH),
    "up": abstract(LAYERS, WIDTH, HIDDEN),
    "bias": abstract(LAYERS, HIDDEN),
    "down": abstract(LAYERS, HIDDEN, WIDTH),
    "head": abstract(WIDTH, 1024),
}
X = abstract(BATCH, TOKENS, WIDTH)


def layer(x: Any, layer: Any, dtype: Any) -> tuple[Any, None]:
    """A pre-norm block: by hand in `dtype`, or plain where it is float32."""
    wide = x.astype(jnp.float32)
    norm = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    h = (norm * layer["scale"]).astype(dtype)
    h = jax.nn.gelu(h @ layer["up"].astype(dtype) + layer["bias"].astype(dtype))
    return x + h @ layer["down"].astype(dtype), None


def loss(params: Any, x: Any, dtype: Any = jnp.float32) -> Any:
    layers = {name: value for name, value in params.items() if name != "head"}
    # The first layer makes the stream an activation, as an embedding would.
    x = jnp.tanh(x.astype(dtype) @ params["up"][0, :, :WIDTH].astype(dtype))
    x, _ = jax.lax.scan(lambda x, w: layer(x, w, dtype), x, layers)
    logits = (x @ params["head"].astype(dtype)).astype(jnp.float32)
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def by_hand(params: Any, x: Any) -> Any:
    return loss(params, x, jnp.bfloat16)


def program(compiler: Compiler, fun: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return compiler(jax.value_and_grad(fun), PARAMS, X, quickly=True)


def products(program: Any) -> list[tuple[set[str], str]]:
    """The dtypes of operands and result of each product of a compiled program."""
    return [(operands, result) for operands, result, _ in products_in(program.as_text())]


def test_products_and_memory(compiler: Compiler) -> None:
    ours, want, plain = (
        program(compiler, fun) for fun in (jaxmp.autocast(loss, "mixed_bfloat16"), by_hand, loss)
    )
    for each in (ours, want):
        assert [operands for operands, _ in products(each)] == [{"bf16"}] * 11
    assert all("f32" in {*operands, result} for operands, result in products(plain))  # control
    # Gradients of params: two in the scan over layers, the head, and the slice before it. On GPUs
    # the compiler makes one operation of a product and a cast behind it, also by hand.
    wide = [[result for _, result in products(each)].count("f32") for each in (ours, want)]
    assert wide == [4, 0] if compiler.platform == "tpu" else wide[0] >= 4
    used, by_hand_used, plain_used = (
        each.memory_analysis().temp_size_in_bytes for each in (ours, want, plain)
    )
    assert used <= 1.01 * by_hand_used
    assert plain_used > 1.5 * by_hand_used  # positive control


@pytest.mark.parametrize(
    ("platform", "flax", "stack"),
    [
        ("gpu", "linen", "loop"),
        ("gpu", "linen", "scan"),
        ("gpu", "nnx", "remat"),
        ("tpu", "nnx", "remat"),  # the others take longer
    ],
)
def test_memory_of_transformers(
    platform: str,
    flax: Any,
    stack: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores of 1,024 x 1,024 dominate, as they do without a fused attention."""
    for size, value in {"WIDTH": 256, "HEADS": 4, "VOCAB": 512, "CONTEXT": 1024}.items():
        monkeypatch.setattr(rule_models, size, value)
    tokens = [x.astype("int32") for x in rule_models.batch("gpt")]
    used, compiler = {}, request.getfixturevalue(platform)
    for author in ("by hand, head too", "autocast", *(["plain"] if stack == "scan" else [])):
        jax.clear_caches()  # JAX hands a module the trace of an equal one
        written: Any = "plain" if author == "autocast" else author
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            made = rule_models.make(flax, "gpt", written, layers=2, stack=stack)
            f = rule_models.functions(made, "gpt")
            loss = jaxmp.autocast(f.loss, "mixed_bfloat16") if author == "autocast" else f.loss
            program = compiler(jax.value_and_grad(loss), f.params, tokens, quickly=True)
        used[author] = program.memory_analysis().temp_size_in_bytes
    # One by one, the first layer finds the sum of two embeddings in float32.
    embedded = 0 if stack == "scan" else 2 * tokens[0].size * rule_models.WIDTH
    assert used["autocast"] <= 1.01 * used["by hand, head too"] + embedded
    if "plain" in used:
        assert used["plain"] > 1.5 * used["by hand, head too"]  # positive control


def test_memory_of_a_graphs_hub(gpu: Compiler) -> None:
    """Gradients of gathered rows are added in float32: one array of nodes more, none of edges."""
    nodes, edges, width = 4096, 131072, 256

    def loss(w: Any, x: Any, senders: Any, dtype: Any = jnp.float32) -> Any:
        messages = jnp.tanh(x.astype(dtype) @ w.astype(dtype))[senders] @ w.T.astype(dtype)
        scores = jnp.tanh(messages) @ w[:, :1].astype(dtype)
        return jnp.mean(scores.astype(jnp.float32) ** 2)

    def used(fun: Any) -> int:
        senders = jax.ShapeDtypeStruct((edges,), jnp.int32)
        args = abstract(width, width), abstract(nodes, width), senders
        program = gpu(jax.value_and_grad(fun), *args)
        return int(program.memory_analysis().temp_size_in_bytes)

    by_hand = used(lambda w, x, senders: loss(w, x, senders, jnp.bfloat16))
    assert used(jaxmp.autocast(loss, "mixed_bfloat16")) <= by_hand + 4 * nodes * width
    assert used(loss) > 1.5 * by_hand  # positive control
