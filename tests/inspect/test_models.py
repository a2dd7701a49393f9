"""Audits of models: Flax's two APIs, plain code, train steps, and how long it takes."""

import cProfile
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.extend import source_info_util

import jaxmp
import jaxmp.linen
from jaxmp._tools.inspect.api import AuditReport, audit
from jaxmp._tools.inspect.equations import walk
from jaxmp._tools.inspect.summarize import Tally
from tests.support import rule_models
from tests.support.audit_lines import line_of

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, WIDTH, LAYERS = 16, 32, 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
X = jax.ShapeDtypeStruct((ROWS, WIDTH), BF16)


class Linen(nn.Module):
    """Dense layers in bfloat16, with a cast before the one called `planted`."""

    planted: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            h = nn.relu(x)
            if i == self.planted:
                h = h.astype(F32)  # planted in linen
            h = nn.Dense(WIDTH, use_bias=False, param_dtype=BF16, name=f"dense_{i}")(h)
            x = x + h.astype(BF16)
        return x


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, planted: int | None, rngs: nnx.Rngs) -> None:
        self.planted = planted
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, use_bias=False, param_dtype=BF16)
        self.layers = nnx.List([linear(rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(self.layers):
            h = nnx.relu(x)
            if i == self.planted:
                h = h.astype(F32)  # planted in nnx
            x = x + layer(h).astype(BF16)
        return x


def square(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(F32) ** 2)  # the loss


def of_linen(planted: int | None, *, jit: bool = False) -> AuditReport:
    model = Linen(planted)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    step = jax.value_and_grad(lambda v, x: square(model.apply(v, x)))
    return audit(jax.jit(step) if jit else step, variables, X)


def of_nnx(planted: int | None, *, jit: bool = False) -> AuditReport:
    model = nnx.eval_shape(lambda: Nnx(planted, nnx.Rngs(0)))
    step = nnx.value_and_grad(lambda model, x: square(model(x)))
    return audit(nnx.jit(step) if jit else step, model, X)


PLANTED: list[tuple[Callable[..., AuditReport], str, str, str]] = [
    (of_linen, "planted in linen", "Linen.__call__", "Linen"),
    (of_nnx, "planted in nnx", "Nnx.__call__", ""),
]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("make", "comment", "function", "path"), PLANTED)
def test_a_planted_upcast_comes_first(
    make: Callable[..., AuditReport], comment: str, function: str, path: str, jit: bool
) -> None:
    report = make(2, jit=jit)
    first = report.upcasts[0]
    assert (first.line, first.path) == (line_of(comment, function), path)
    assert (first.direction, first.source, first.target) == ("forward", "bfloat16", "float32")
    # It feeds the forward product and the gradient of the weight. That of the input is float32
    # too, but because of the weight, which was widened to meet what was planted.
    assert first.flops == 2 * PRODUCT
    assert first.share == pytest.approx(2 / (3 * LAYERS - 1))
    assert report.share("bfloat16") == pytest.approx(1 - 3 / (3 * LAYERS - 1))
    clean = make(None)
    assert clean.share("bfloat16") == 1.0
    assert [(row.line, row.flops) for row in clean.upcasts] == [(line_of("the loss", "square"), 0)]


def test_paths_and_passes_of_linen() -> None:
    report = of_linen(None)
    paths = {(row.path, row.direction): (row.count, row.flops) for row in report.product_lines}
    expected = {
        (f"Linen/dense_{i}", direction): (n, n * PRODUCT)
        for i in range(LAYERS)
        for direction, n in (("forward", 1), ("backward", 1 if i == 0 else 2))
    }
    assert paths == expected  # the input of the first needs no gradient


def test_a_train_step_is_audited_whole() -> None:
    model = jaxmp.linen.apply_policy(nn.Dense(4), "mixed_bfloat16")
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    step = jaxmp.make_train_step(loss, "none", microbatches=4)
    report = audit(step, state, jax.ShapeDtypeStruct((16, 8), F32))
    assert report.flops == 2 * (2 * 16 * 8 * 4)  # forward, and backward for the kernel
    # The gradient of the kernel leaves its product in float32, to be summed so over devices.
    assert sorted((*row.operands, row.result, row.count, row.runs) for row in report.products) == [
        ("bfloat16", "bfloat16", "bfloat16", 1, 4),
        ("bfloat16", "bfloat16", "float32", 1, 4),
    ]
    assert report.residuals is None
    assert not any(row.flops for row in report.upcasts)


def test_a_live_nnx_model_and_its_optimizer_are_arguments() -> None:
    model = Nnx(None, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = [x.copy() for x in jax.tree.leaves(nnx.state(model))]

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: square(model(x)))(model)
        optimizer.update(model, grads)
        return loss

    report = audit(step, model, optimizer, X)
    assert report.share("bfloat16") == 1.0
    assert report.flops == (3 * LAYERS - 1) * PRODUCT
    after = jax.tree.leaves(nnx.state(model))
    assert all((a == b).all() for a, b in zip(after, before, strict=True))


def test_where_there_is_no_users_line_it_is_that_of_the_library() -> None:
    params = {"w": jnp.ones((8, 8), BF16)}
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bfloat16")
    report = audit(tx.apply_gradients, params, tx.init(params), params)
    files = {row.line.partition(":")[0] for row in report.upcasts}
    # Versions of JAX differ in which of our lines they name for what is jitted within.
    ours = {"optimizer_step.py", "tree.py", "masters.py", "frozen.py"}
    assert files
    assert files <= ours


def test_other_peoples_tracebacks_stay_as_they_were() -> None:
    def summary() -> str:
        dense = nn.Dense(2, use_bias=False)
        jaxpr = jax.make_jaxpr(lambda x: dense.apply({"params": {"kernel": x}}, x))(
            jnp.ones((2, 2))
        )
        return source_info_util.summarize(jaxpr.eqns[-1].source_info)

    before = summary()
    of_linen(None)
    assert summary() == before
    assert "linear.py" in before  # a line of Flax, which an audit would not show


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_work_of_an_audit_grows_with_the_program_alone() -> None:
    """Counted in calls: times would say more of the machine."""

    def calls_and_sites(layers: int) -> tuple[int, int]:
        made = rule_models.make("linen", "gpt", "by hand", layers=layers)
        f = rule_models.functions(made, "gpt")
        jaxpr = jax.make_jaxpr(f.value_and_grad)(f.params, rule_models.batch("gpt"))
        profile, tallies = cProfile.Profile(), []

        def tallied() -> None:
            body = walk(jaxpr)
            tally = Tally(body)
            assert tally.products()
            assert tally.product_lines()
            assert tally.upcasts()
            assert tally.converts()
            tallies.append(tally)

        profile.runcall(tallied)
        return sum(entry.callcount for entry in profile.getstats()), len(tallies[0].sites)

    (few, few_sites), (many, sites) = calls_and_sites(8), calls_and_sites(32)
    assert sites > 3.5 * few_sites > 3_500
    assert many / sites < 1.1 * few / few_sites
