"""Autocast over several devices: shard_map, collectives, shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, LOW, UNIT, W, X, both, check, error
from tests.support.dots import count_dots, equations
from tests.support.ways import both_ways

pytestmark = pytest.mark.jax

MESH = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def over(fun: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    return jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


ROWS, WHOLE = jax.P("d"), jax.P()
COLLECTIVES: dict[str, tuple[Any, Any]] = {
    "psum": (lambda h: lax.psum(h, "d"), WHOLE),
    "pmean": (lambda h: lax.pmean(h, "d"), WHOLE),
    "pmax": (lambda h: lax.pmax(h, "d"), WHOLE),
    "all_gather": (lambda h: lax.all_gather(h, "d", tiled=True), ROWS),
    "ppermute": (lambda h: lax.ppermute(h, "d", [(i, (i + 1) % 4) for i in range(4)]), ROWS),
    "psum_scatter": (
        lambda h: lax.psum_scatter(h, "d", scatter_dimension=1, tiled=True),
        jax.P(None, "d"),
    ),
    "all_to_all": (lambda h: lax.all_to_all(h, "d", 1, 0, tiled=True), jax.P(None, "d")),
    "axis_index": (lambda h: h * (lax.axis_index("d").astype(jnp.float32) + 1), ROWS),
    "none": (lambda h: h, ROWS),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str, check_vma: bool) -> None:
    collective, out = COLLECTIVES[name]
    f = over(lambda x, w: collective(jnp.tanh(x @ w)), (ROWS, WHOLE), out, check_vma=check_vma)
    argnums = () if name == "pmax" else None  # pmax has no derivative
    check(f, X, W, dots={"low": 1}, argnums=argnums)


@both
def test_sums_over_devices_are_float32(policy: str) -> None:
    f = over(lambda x, w: lax.psum(jnp.tanh(x @ w), "d"), (ROWS, WHOLE), WHOLE)
    fast = jaxmp.autocast(f, policy)
    grad = jax.grad(lambda w: fast(X, w).sum())
    for jaxpr in (jax.make_jaxpr(fast)(X, W), jax.make_jaxpr(grad)(W)):
        sums = [e for e in equations(jaxpr) if e.primitive.name.startswith(("psum", "reduce_sc"))]
        assert sums
        assert {str(v.aval.dtype) for e in sums for v in e.invars} == {"float32"}


def test_autocast_inside_of_shard_map() -> None:
    fast = jaxmp.autocast(lambda x, w: lax.psum(jnp.tanh(x @ w).sum(0), "d"), BF16)
    f = over(fast, (ROWS, WHOLE), WHOLE)
    plain = lambda x, w: jnp.tanh(x @ w).sum(0)  # noqa: E731
    assert error(jax.jit(f)(X, W), jax.jit(plain)(X, W)) < 8 * UNIT[BF16]
    grads, want = (
        jax.jit(jax.grad(lambda x, w, f=f: f(x, w).sum(), (0, 1)))(X, W) for f in (f, plain)
    )
    assert error(grads, want) < 16 * UNIT[BF16]


def test_gradients_inside_of_shard_map() -> None:
    def step(w: Any, x: Any) -> Any:
        local = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(lax.pcast(w, "d", to="varying"))
        return w - 0.1 * lax.pmean(local, "d")

    f = over(step, (WHOLE, ROWS), WHOLE)
    got, want = both_ways(lambda w, x: f(w, x) - w, W, X)
    assert error(got, want) < 16 * UNIT[BF16]
    assert set(count_dots(jaxmp.autocast(f, BF16), W, X)) == {"bfloat16"}


def test_loops_and_checkpoints_inside_of_shard_map() -> None:
    def f(x: Any, ws: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w) + 0.5, lax.psum(c.sum(), "d")))
        return lax.scan(body, x, ws)

    mapped = over(f, (ROWS, WHOLE), (ROWS, WHOLE))
    check(mapped, X, jnp.stack([W] * 2), dots={"low": 1}, roundings=16)


def test_shard_map_over_one_of_two_axes() -> None:
    f = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "d"),
        mesh=GRID,
        in_specs=(jax.P(None, "d"), jax.P("d")),
        out_specs=jax.P(),
        axis_names={"d"},
    )
    check(jax.jit(f), X, W, dots={"low": 1})


def test_shard_map_with_the_mesh_of_a_context() -> None:
    with jax.set_mesh(MESH):
        f = jax.shard_map(
            lambda x, w: lax.psum(jnp.tanh(x @ w).sum(), "d"),
            in_specs=(ROWS, WHOLE),
            out_specs=WHOLE,
        )
        check(f, X, W, dots={"low": 1})


@both
def test_sharded_arguments(policy: str) -> None:
    by_row, whole = (jax.NamedSharding(MESH, spec) for spec in (ROWS, WHOLE))
    x, w = jax.device_put(X, by_row), jax.device_put(W, whole)

    def f(x: Any, w: Any) -> Any:
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), by_row)
        return h @ w

    fast = jax.jit(jaxmp.autocast(f, policy), in_shardings=(by_row, whole), out_shardings=by_row)
    out = fast(x, w)
    assert out.sharding.is_equivalent_to(by_row, 2)
    assert error(out, jax.jit(f)(X, W)) < 8 * UNIT[policy]
    eager = jaxmp.autocast(f, policy)(x, w)
    assert eager.sharding.is_equivalent_to(by_row, 2)
    grad = jax.jit(jax.grad(lambda w, x: jnp.sum(fast(x, w) ** 2)), out_shardings=whole)
    want = jax.jit(jax.grad(lambda w: jnp.sum(f(X, w) ** 2)))(W)
    assert error(grad(w, x), want) < 24 * UNIT[policy]
    constraints = [
        e.outvars[0].aval.dtype
        for e in equations(jax.make_jaxpr(jaxmp.autocast(f, policy))(x, w))
        if e.primitive.name == "sharding_constraint"
    ]
    assert [str(d) for d in constraints] == [LOW[policy]]


def test_gradients_are_reduced_over_devices_in_float32() -> None:
    by_row, whole = (jax.NamedSharding(MESH, spec) for spec in (ROWS, WHOLE))
    loss = jaxmp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), BF16)
    compiled = (
        jax.jit(jax.grad(loss), in_shardings=(whole, by_row), out_shardings=whole)
        .lower(W, X)
        .compile()
        .as_text()
    )
    sums = [line for line in compiled.splitlines() if " all-reduce(" in line]
    assert sums
    assert not any("bf16[" in line for line in sums)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_explicit_sharding(reduce: str) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    policy = f"params=float32,compute=bfloat16,output=float32,reduce={reduce}"
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, ROWS))
        w = jax.device_put(W, jax.NamedSharding(mesh, WHOLE))
        fast = jaxmp.autocast(lambda x, w: jnp.tanh(x @ w), policy)
        got = fast(x, w)
        assert got.sharding.is_equivalent_to(x.sharding, 2)
        grad = jax.jit(jax.grad(lambda w: fast(x, w).sum()))(w)
    want, pull = jax.vjp(jax.jit(lambda w: jnp.tanh(X @ w)), W)
    assert error(got, want) < 8 * UNIT[BF16]
    assert error(grad, pull(np.ones((4, 16), np.float32))[0]) < 8 * UNIT[BF16]


def test_vmap_with_an_axis_name() -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return h - lax.pmean(h, "batch")

    by_row = lambda f: jax.vmap(f, (0, None), axis_name="batch")  # noqa: E731
    assert error(*both_ways(f, X, W, of=by_row)) < 8 * UNIT[BF16]
    check(by_row(f), X, W, dots={"low": 1})
