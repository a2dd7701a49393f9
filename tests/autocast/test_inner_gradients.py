"""A gradient inside of a float16 loss: the scale of the outer loss does not reach it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.support.dots import count_dots

NORMAL = functools.partial(np.random.default_rng(3).standard_normal, dtype=np.float32)
PARAMS = {"a": 0.8 * NORMAL((3, 64)), "c": NORMAL((64, 1)) / 8}
X = NORMAL((256, 3))
SMALL = 1e-5
WARNING = "a gradient inside of this function is computed in float16 without a loss scale"


def inner_loss(params: Any, x: Any) -> Any:
    y = (jnp.tanh(x @ params["a"]) @ params["c"])[..., 0]
    return SMALL * jax.nn.softplus(y).mean()


def penalty(gradient: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda params, x: jnp.sum((gradient(params, x) / SMALL * 256) ** 2) / 256


PLAIN = penalty(jax.grad(inner_loss, 1))
SCALED = penalty(jaxmp.grad(inner_loss, 1, loss_scale=2.0**14))


def error(loss: Callable[..., Any], policy: str = "mixed_float16") -> float:
    gradient = jaxmp.grad(jaxmp.autocast(loss, policy), loss_scale=2.0**4)
    got, want = jax.jit(lambda *args: (gradient(*args), jax.grad(PLAIN)(*args)))(PARAMS, X)
    differences = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got, want)
    return float(max(jax.tree.leaves(differences)))


def test_a_scale_of_its_own_is_right() -> None:
    """And no warning, also where the scale is a state, or the function is jitted."""
    assert error(SCALED) < 2e-3
    state = jaxmp.StaticLossScale(2.0**14).init()
    assert error(jax.jit(penalty(jaxmp.grad(inner_loss, 1, loss_scale=state)))) < 2e-3


def each_row(params: Any, x: Any) -> Any:
    return jax.vmap(jax.grad(inner_loss, 1), (None, 0))(params, x[:, None])[:, 0] / 256


def steps(params: Any, x: Any) -> Any:
    turn = lambda x, _: (x + jax.grad(inner_loss, 1)(params, x), None)  # noqa: E731
    return jax.lax.scan(turn, x, None, 2)[0]


@pytest.mark.parametrize(
    "gradient",
    [jax.grad(inner_loss, 1), jax.jit(jax.grad(jax.checkpoint(inner_loss), 1)), each_row, steps],
    ids=["plain", "jit and checkpoint", "vmap", "scan"],
)
def test_without_one_it_warns(gradient: Any) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        jax.make_jaxpr(jaxmp.autocast(penalty(gradient), "mixed_float16"))(PARAMS, X)


def test_the_fault() -> None:
    """Control: what the warning is about."""
    with pytest.warns(UserWarning, match=WARNING):
        assert error(PLAIN) == 1.0


def test_other_gradients_do_not_warn() -> None:
    low = jaxmp.autocast(PLAIN, "mixed_bfloat16")
    assert set(count_dots(low, PARAMS, X)) == {"bfloat16"}
    exact = jaxmp.full_precision(jax.grad(inner_loss, 1))
    unscaled = jaxmp.grad(inner_loss, 1, loss_scale=1.0)  # as the warning says
    tangents = lambda p, x: jax.jvp(lambda x: inner_loss(p, x), (x,), (x,))[1]  # noqa: E731
    for loss in (penalty(exact), penalty(unscaled), tangents):
        assert count_dots(jaxmp.autocast(loss, "mixed_float16"), PARAMS, X)
    # The gradient of the loss itself is not inside.
    assert count_dots(jax.grad(jaxmp.autocast(inner_loss, "mixed_float16")), PARAMS, X)


def test_rules_find_modules_inside_of_a_scaled_gradient() -> None:
    """The mark of the scale is no scope of the model."""

    def named(params: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            h = x @ params["a"]
        with jax.named_scope("second"):
            return jnp.mean(h @ params["c"])

    rules = jaxmp.PolicyRules([("first", "float32")], default="mixed_float16")
    fast = jaxmp.autocast(lambda p, x: jnp.sum(jaxmp.grad(named, 1, loss_scale=8.0)(p, x)), rules)
    assert count_dots(fast, PARAMS, X)["float32"] > 0
