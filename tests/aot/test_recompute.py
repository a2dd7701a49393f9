"""What compilers for GPUs and TPUs make of `recompute`: less memory, the same products and sums."""

import collections
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded
from tests.aot.conftest import Compiler
from tests.aot.test_autocast import PARAMS, X, by_hand, loss, products, program
from tests.support.sharded_models import abstract
from tests.support.traffic import traffic

pytestmark = pytest.mark.usefixtures("standard_promotion")

LOW = jaxmp.autocast(loss, "mixed_bfloat16")


def temporaries(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize("author", [by_hand, LOW], ids=["by hand", "autocast"])
def test_layers_in_a_scan(compiler: Compiler, author: Any) -> None:
    """The promise of "auto": less memory, and as many products."""
    plain, lean, whole = (
        program(compiler, fun) for fun in (author, jaxmp.recompute(author), jax.checkpoint(author))
    )
    assert temporaries(lean) < 0.7 * temporaries(plain)
    assert len(products(lean)) == len(products(plain)) == 11
    assert len(products(whole)) > 11  # positive control


def one_by_one(params: Any, x: Any) -> Any:
    """Softmax over rows of 1,024, twice, without a loop."""
    for i in range(2):
        scores = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        x = x + jnp.tanh(weights @ params["head"].astype(x.dtype).T)
        x = x + jax.nn.gelu(x @ params["up"][i].astype(x.dtype)) @ params["down"][i].astype(x.dtype)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def test_layers_one_by_one(compiler: Compiler) -> None:
    """Without a loop "auto" changes nothing for the worse, and "always" saves memory."""

    def fun(params: Any, x: Any) -> Any:
        return one_by_one(params, x.astype(jnp.bfloat16))

    plain, auto, always = (
        program(compiler, jaxmp.recompute(fun, mode))  # type: ignore[arg-type]
        for mode in ("never", "auto", "always")
    )
    assert temporaries(auto) <= 1.01 * temporaries(plain)
    assert temporaries(always) <= 0.9 * temporaries(plain)
    assert len(products(plain)) == len(products(auto)) == len(products(always))


@pytest.mark.parametrize("head", ["optax", "indexed"])
def test_a_loss_by_label_takes_two_bytes_a_logit(compiler: Compiler, head: str) -> None:
    """The default of a train step writes the bfloat16 logits and their gradients, one in place of
    the other; plain JAX writes float32 gradients too."""

    def loss(params: Any, batch: Any) -> Any:
        x, labels = batch
        logits = jnp.einsum("nd,dv->nv", x, params)
        if head == "optax":
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()

    low = jaxmp.autocast(loss, "mixed_bfloat16")
    tokens, width, classes = 1024, 128, 50304
    shapes = (tokens, width), (tokens,)
    batch = tuple(map(jax.ShapeDtypeStruct, shapes, (jnp.float32, jnp.int32)))
    params = jax.ShapeDtypeStruct((width, classes), jnp.float32)
    plain, lean = (
        temporaries(compiler(jax.grad(f), params, batch))
        for f in (low, jaxmp.recompute(low, "loops"))
    )
    assert lean <= 0.45 * plain
    assert lean <= 2.1 * tokens * classes


def test_a_loop_makes_its_mask(compiler: Compiler) -> None:
    """JAX by itself writes the mask before the loop and reads it in each turn, and so does
    `jax.checkpoint`. The bytes are those of kernels, in all turns."""
    heads, length, width = 8, 512, 64
    params = jax.ShapeDtypeStruct((4, width, 3 * width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((heads, length, width), jnp.bfloat16)

    def fun(params: Any, x: Any, *, masked: bool) -> Any:
        def attend(x: Any, w: Any) -> Any:
            q, k, v = jnp.split(x @ w, 3, -1)
            scores = jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32)
            if masked:
                scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
            return x + jax.nn.softmax(scores).astype(x.dtype) @ v, None

        return jnp.mean(jnp.square(jax.lax.scan(attend, x, params)[0].astype(jnp.float32)))

    def moved(wrap: Any, masked: bool) -> float:
        gradient = jax.grad(wrap(functools.partial(fun, masked=masked)))
        return traffic(str(compiler(gradient, params, x).as_text()))

    lean = [moved(lambda f: jaxmp.recompute(f, "loops"), masked) for masked in (True, False)]
    plain = [moved(jax.checkpoint, masked) for masked in (True, False)]
    assert lean[0] <= 1.03 * lean[1]
    if compiler.platform == "gpu":
        assert plain[0] > 1.03 * plain[1]  # positive control


def test_fully_sharded_layers(compiler: Compiler) -> None:
    """Over eight devices: the same collectives, with less memory."""
    mesh = compiler.mesh((8,), ("data",))
    split = fully_sharded(PARAMS, mesh, "data", min_size=2**16)
    rows = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((64, *X.shape[1:]), X.dtype)

    def found(recompute: Any) -> tuple[Mapping[Any, int], int]:
        gradient = jaxmp.value_and_grad(
            LOW,
            reduce_dtype="float32",
            fsdp=FSDP(shardings=split, axis="data"),
            recompute=recompute,
        )
        compiled = compiler.lower(
            gradient, abstract(PARAMS, split), abstract(batch, rows)
        ).compile()
        totals: collections.Counter[Any] = collections.Counter()
        for row in jaxmp.sharding.collectives(compiled).rows:
            totals[row.kind, row.dtype] += row.bytes * row.runs
        return totals, temporaries(compiled)

    (plain, most), (lean, used) = found("never"), found("auto")
    assert lean == plain
    assert any(kind == "all-gather" for kind, _ in plain)
    assert used < 0.85 * most
