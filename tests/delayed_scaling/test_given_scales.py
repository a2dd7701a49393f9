"""What delayed scaling is made of: probes, rounding by a known scale, and both in a product."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp._delayed_scaling.places import (
    PlaceValues,
    attach_probe,
    operations_not_entered,
    places_of,
    run_with_scales,
)
from jaxmp._program import compat
from tests.support.bits import tree_bits
from tests.support.float8_references import rounded, scale

pytestmark = pytest.mark.jax

E4, E5 = "float8_e4m3fn", "float8_e5m2"
ZERO = jnp.float32(0)
SLOPES = jnp.asarray([[1, -2, 0.5], [3, -5, 4], [0, 0, 0], [7, 1, 2]], jnp.float32)


def weighted(x: Any, slopes: Any, *probes: Any) -> Any:
    """A sum whose cotangent is `slopes`, at each of some probes."""
    return sum((jnp.sum(attach_probe(x, probe) * slopes) for probe in probes), jnp.float32(0))


def seen(fun: Any, *probes: Any) -> Any:
    return jax.jit(jax.grad(fun, argnums=tuple(range(len(probes)))))(*probes)


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_probe_measures_the_cotangent_and_changes_nothing(dtype: Any) -> None:
    x, slopes = np.ones((4, 3), dtype), jax.device_put(np.asarray(SLOPES).astype(dtype))
    plain = jax.jit(jax.value_and_grad(lambda x: jnp.sum(x * slopes)))(x)

    def fun(x: Any, probe: Any) -> Any:
        return jnp.sum(attach_probe(x, probe) * slopes)

    value, (gradient, largest) = jax.jit(jax.value_and_grad(fun, argnums=(0, 1)))(x, ZERO)
    assert tree_bits((value, gradient)) == tree_bits(plain)
    assert largest == 7
    assert largest.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_is_seen(bad: float) -> None:
    slopes = np.array(SLOPES)
    slopes[1, 1] = bad
    (largest,) = seen(functools.partial(weighted, jnp.ones((4, 3)), jax.device_put(slopes)), ZERO)
    assert not np.isfinite(largest)


def test_two_uses_have_two_magnitudes() -> None:
    """JAX adds what two uses of one zero get: 6 of 1 and 5, which the control shows."""

    def fun(first: Any, second: Any) -> Any:
        x = jnp.ones((2, 3))
        return weighted(x, jnp.ones((2, 3)), first) + weighted(x, jnp.full((2, 3), -5.0), second)

    assert seen(fun, ZERO, ZERO) == (1, 5)
    assert seen(lambda probe: fun(probe, probe), ZERO) == (6,)


def test_a_batch_has_one_magnitude() -> None:
    """The largest of the four rows, and not the sum of theirs, which a plain zero would get."""

    def mapped(touch: Any, probe: Any) -> Any:
        return jnp.sum(
            jax.vmap(lambda x, slopes: touch(x, slopes, probe))(jnp.ones((4, 3)), SLOPES)
        )

    def plain(x: Any, slopes: Any, probe: Any) -> Any:
        return jnp.max(jnp.abs(slopes)) * probe

    def nested(probe: Any) -> Any:
        fun = jax.vmap(jax.vmap(weighted, (0, 0, None)), (0, 0, None))
        return jnp.sum(fun(jnp.ones((2, 4, 3)), jnp.stack([SLOPES, -2 * SLOPES]), probe))

    assert seen(functools.partial(mapped, weighted), ZERO) == (7,)
    assert seen(functools.partial(mapped, plain), ZERO) == (14,)
    assert seen(nested, ZERO) == (14,)


def test_a_batch_of_probes_has_a_magnitude_each() -> None:
    def fun(probes: Any) -> Any:
        return jnp.sum(jax.vmap(weighted)(jnp.ones((4, 3)), SLOPES, probes))

    zeros = np.zeros(4, np.float32)
    np.testing.assert_array_equal(*seen(fun, zeros), [2, 5, 0, 7])

    def shared(probes: Any) -> Any:  # the batch is behind the axis of the probes
        both = jnp.stack([SLOPES, 2 * SLOPES])
        return jnp.sum(jax.vmap(weighted, (0, 0, None))(jnp.ones((2, 4, 3)), both, probes))

    np.testing.assert_array_equal(*seen(shared, zeros), [4, 10, 0, 14])


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.slow
def test_devices_have_one_magnitude(devices: int, inside: bool) -> None:
    """The largest over devices, and not the sum, whether the gradient is taken in or around.

    The control is a plain zero with the same cotangents, which gets the sum over devices.
    """
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    slopes = jnp.tile(SLOPES, (2, 1))

    def local(probe: Any, slopes: Any) -> Any:
        def fun(probe: Any) -> Any:
            return jax.lax.psum(weighted(jnp.ones_like(slopes), slopes, probe), "data")

        return jax.grad(fun)(probe) if inside else fun(probe)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    largest = (mapped if inside else jax.grad(mapped))(ZERO, slopes)
    assert largest == 7

    def summed(probe: Any, slopes: Any) -> Any:
        return jax.lax.psum(jnp.max(jnp.abs(slopes)) * probe, "data")

    control = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert jax.grad(control)(ZERO, slopes) > 7


def test_forward_mode_and_transposition_of_a_probe() -> None:
    x = np.ones((4, 3), np.float32)
    value, along = jax.jvp(lambda x: jnp.sum(attach_probe(x, ZERO) * SLOPES), (x,), (2 * x,))
    assert (value, along) == (np.sum(SLOPES), 2 * np.sum(SLOPES))
    (second,) = seen(
        lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(attach_probe(y, ZERO) ** 3))(x)), x
    )
    np.testing.assert_array_equal(second, 6 * x)


def test_a_probe_must_fit() -> None:
    with pytest.raises(TypeError, match=r"shape \(2,\) does not fit"):
        attach_probe(jnp.ones((4, 3)), jnp.zeros(2))


# --- products ------------------------------------------------------------------------------------

NUMBERS = (((1,), (0,)), ((), ()))
X = jnp.asarray(np.random.default_rng(1).normal(size=(32, 16)), jnp.bfloat16)
W = jnp.asarray(np.random.default_rng(2).normal(size=(16, 48)), jnp.float32)
CT = jnp.asarray(np.random.default_rng(3).normal(size=(32, 48)), jnp.bfloat16)


each_recipe = pytest.mark.parametrize(
    "recipe", ["tensorwise", "tensorwise:weight_gradient=bfloat16", "int8"]
)


def times(x: Any, w: Any, recipe: str = "tensorwise") -> Any:
    return jaxmp.float8.dot_general(x, w, NUMBERS, recipe=recipe)


def given_scales(fun: Any, *args: Any) -> Any:
    """A function of what is given and of the arguments of `fun`, which returns what was seen."""
    closed = jax.make_jaxpr(fun)(*args)

    def run(given: PlaceValues, *args: Any) -> Any:
        (out,), found = run_with_scales(closed, args, given)
        return out, found

    return run


def evaluated(
    given: PlaceValues, x: Any = X, w: Any = W, ct: Any = CT, recipe: str = "tensorwise"
) -> Any:
    """The product, what was seen, the two gradients, and the gradients of the probes."""
    run = given_scales(functools.partial(times, recipe=recipe), x, w)

    @jax.jit
    def call(x: Any, w: Any, ct: Any) -> Any:
        def fun(x: Any, w: Any, probes: Any) -> Any:
            return run(given._replace(probes=probes), x, w)

        out, backward, found = jax.vjp(fun, x, w, given.probes, has_aux=True)
        return out, found, backward(ct)

    return call(x, w, ct)


def largest_of(*arrays: Any) -> list[Any]:
    return [jax.device_put(np.abs(np.asarray(x, np.float32)).max()) for x in arrays]


@each_recipe
def test_the_magnitudes_that_are_there_give_the_bits_of_current_scaling(recipe: str) -> None:
    current = evaluated(PlaceValues([None, None], [None], [ZERO]), recipe=recipe)
    delayed = evaluated(PlaceValues(largest_of(X, W), largest_of(CT), [ZERO]), recipe=recipe)
    assert tree_bits(delayed) == tree_bits(current)
    _, found, (_, _, (of_ct,)) = delayed
    assert [*found, of_ct] == largest_of(X, W, CT)


@pytest.mark.parametrize(
    ("recipe", "forms"),
    [("tensorwise", (E4, E4, E5)), ("int8:weight_gradient=int8:power_of_two=true", ["int8"] * 3)],
)
def test_each_given_scale_is_used(recipe: str, forms: Sequence[str]) -> None:
    """A product with every scale too large, against NumPy: all three operands are clipped."""
    given = PlaceValues([jnp.float32(0.5), jnp.float32(0.25)], [jnp.float32(0.125)], [ZERO])
    out, _, (dx, dw, _) = evaluated(given, recipe=recipe)

    def clipped(x: Any, expected: float, form: str) -> np.ndarray:
        by = scale(np.float32(expected), form, True)
        return rounded(np.asarray(x, np.float64) * by, form) / by

    x, w, ct = map(clipped, (X, W, CT), (0.5, 0.25, 0.125), forms)
    assert np.abs(x).max() < 1 < np.abs(np.asarray(X, np.float64)).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), x @ w, rtol=0.01, atol=0.02)
    np.testing.assert_allclose(np.asarray(dx, np.float64), ct @ w.T, rtol=0.01, atol=0.02)
    np.testing.assert_allclose(np.asarray(dw, np.float64), x.T @ ct, rtol=1e-5, atol=1e-5)


@each_recipe
@pytest.mark.parametrize("which", ["x", "w", "ct"])
def test_an_overflow_reaches_the_gradients(which: str, recipe: str) -> None:
    arrays = {"x": X, "w": W, "ct": CT}
    changed = np.array(arrays[which])
    changed[3, 5] = np.inf
    broken = arrays | {which: jax.device_put(changed)}
    given = PlaceValues(largest_of(X, W), largest_of(CT), [ZERO])
    _, found, (dx, dw, (of_ct,)) = evaluated(given, **broken, recipe=recipe)
    # NaN in products of codes, and infinite in those of bfloat16.
    finite = [np.isfinite(np.asarray(x, np.float32)).all() for x in (dw, dx)]
    assert not all(finite)
    assert not np.isfinite([*found, of_ct]).all()


def test_derivatives_of_any_mode_and_order() -> None:
    """What no state knows, such as tangents, is scaled by the magnitudes that are there."""
    given = PlaceValues(largest_of(X, W), largest_of(CT), [ZERO])
    run = given_scales(times, X, W)

    def delayed(x: Any, w: Any) -> Any:
        return run(given, x, w)[0]

    def current(x: Any, w: Any) -> Any:
        return times(x, w, "tensorwise")

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(fun: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum((fun(x, w) * CT).astype(jnp.float32))

        def slope(x: Any, w: Any) -> Any:
            return jnp.sum(jax.grad(loss, argnums=1)(x, w) * W)

        forward = jax.jvp(fun, (X, W), (X, W))[1]
        over = jax.jvp(lambda w: jax.grad(loss)(X, w), (W,), (W,))[1]
        return forward, over, jax.grad(slope)(X, W)

    assert tree_bits(derivatives(delayed)) == tree_bits(derivatives(current))


def test_vmap_is_a_loop() -> None:
    """Each element is scaled by what is given, and has its own magnitudes."""
    run = given_scales(times, X, W)
    given = PlaceValues(largest_of(X, W), largest_of(CT), [ZERO])
    x, ct = np.asarray(X), np.asarray(CT)
    xs, cts = np.stack([x, x / 4, x / 2]), np.stack([ct / 8, ct, ct / 2])

    def gradients(x: Any, ct: Any) -> Any:
        def fun(x: Any, w: Any, probes: Any) -> Any:
            return run(given._replace(probes=probes), x, w)

        out, backward, found = jax.vjp(fun, x, W, [ZERO], has_aux=True)
        return out, found, backward(ct)

    out, found, (dx, dw, _) = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradients))(xs, cts))
    assert [x.shape for x in found] == [(3,), (3,)]
    for i in range(3):
        one, seen, (one_dx, one_dw, _) = jax.jit(gradients)(xs[i], cts[i])
        assert [x[i] for x in found] == seen
        assert tree_bits((out[i], dx[i], dw[i])) == tree_bits((one, one_dx, one_dw))


# --- places in a program -------------------------------------------------------------------------


def test_places_are_found_in_jit_checkpoint_and_scan_and_named_elsewhere() -> None:
    square = jnp.eye(16)

    def deep(x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (times(x, w), None), x, jnp.ones((3, 16, 16)))[0]

    def fun(x: Any) -> Any:
        x = jax.jit(times)(x, square)
        x = jax.checkpoint(times)(x, square)
        x = jax.lax.scan(lambda x, _: (deep(x), None), x, None, length=2)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: times(x, square), lambda x: x, x)

    equations = compat.open_jaxpr(jax.make_jaxpr(fun)(X)).eqns
    places = places_of(equations)
    assert places.backward == [(), (), (2, 3)]
    assert places.forward == [(), (), (), (), (2, 3), (2, 3)]
    assert set(operations_not_entered(equations)) == {"cond"}


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_hp", "int8:granularity=row"])
def test_other_recipes_have_no_places(recipe: str) -> None:
    closed = jax.make_jaxpr(functools.partial(times, recipe=recipe))(X, W)
    assert not any(places_of(closed.jaxpr.eqns))


@pytest.mark.parametrize("first", ["tensorwise", "tensorwise:weight_gradient=bfloat16", "int8"])
def test_an_array_of_two_recipes_has_places_for_one(first: str) -> None:
    """One product keeps it wide, or as codes; that by rows goes by current magnitudes."""

    def both(x: Any, w: Any) -> Any:
        return times(x, w, first) + times(x, w, "rowwise") + times(x, w, "int8:granularity=row")

    places = places_of(jax.make_jaxpr(both)(X, W).jaxpr.eqns)
    assert (places.forward, places.backward) == ([(), ()], [()])
