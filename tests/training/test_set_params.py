"""Masters follow params that are set from outside: pretrained, clipped, averaged, restored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._training.master_storages import follow
from tests.support.bits import bits

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPE = (5, 3)
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Powers of two: products are exact, so that a fused multiply-add is no other number.
RATE, MOMENTUM = np.float32(0.25), np.float32(0.5)


def optimizer(policy: str, **options: Any) -> jaxmp.MixedPrecision:
    inner = optax.sgd(float(RATE), momentum=float(MOMENTUM))
    return jaxmp.mixed_precision(inner, policy, loss_scale=jaxmp.NoLossScale(), **options)


class Reference:
    """The rule in NumPy: where the rounded master is not the param, the param is the master."""

    def __init__(self, param: Any, master: Any, *, by_updates: bool) -> None:
        self.param, self.master = param, master
        self.trace = np.zeros(SHAPE, np.float32)
        self.by_updates = by_updates

    def step(self, grad: Any) -> None:
        if not np.all(np.isfinite(grad)):
            return
        wide = self.param.astype(np.float32)
        rounded = self.rounded(self.master).astype(np.float32)
        values = np.where(rounded == wide, self.master, wide)
        self.trace = grad + MOMENTUM * self.trace
        self.master = values - RATE * self.trace
        new = self.rounded(self.master)
        if self.by_updates:  # what optax.apply_updates adds, which no float32 can always hit
            new = (wide + (new.astype(np.float32) - wide)).astype(self.param.dtype)
        self.param = new

    def rounded(self, x: Any) -> Any:
        largest = np.float32(ml_dtypes.finfo(self.param.dtype).max)
        return np.clip(x, -largest, largest).astype(self.param.dtype)


class ByState:
    """`TrainState.replace` and `apply_gradients`."""

    by_updates = False

    def __init__(self, param: Any, policy: str, compile: Callable[..., Any]) -> None:
        self.state = jaxmp.TrainState.create(params={"w": param}, tx=optimizer(policy))
        self.apply = compile(lambda state, grads: state.apply_gradients(grads))

    def set(self, param: Any) -> None:
        self.state = self.state.replace(params={"w": jax.device_put(param)})

    def step(self, grad: Any) -> None:
        self.state = self.apply(self.state, {"w": grad})

    def now(self) -> tuple[Any, Any]:
        return self.state.params["w"], self.state.opt_state.master["w"]


class ByUpdates:
    """`tx.update` and `optax.apply_updates`."""

    by_updates = True

    def __init__(self, param: Any, policy: str, compile: Callable[..., Any]) -> None:
        tx = optimizer(policy)
        self.params, self.state = tx.init_params({"w": param})

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.apply = compile(step)

    def set(self, param: Any) -> None:
        self.params = {"w": jax.device_put(param)}

    def step(self, grad: Any) -> None:
        self.params, self.state = self.apply(self.params, self.state, {"w": grad})

    def now(self) -> tuple[Any, Any]:
        return self.params["w"], self.state.master["w"]


class ByModule:
    """A live nnx module whose variables are assigned."""

    by_updates = False

    def __init__(self, param: Any, policy: str, compile: Callable[..., Any]) -> None:
        linear = nnx.Linear(*SHAPE, use_bias=False, rngs=nnx.Rngs(0))
        self.model = jaxmp.nnx.apply_policy(linear, policy)
        self.model.kernel[...] = jnp.asarray(param, HALVES[policy])
        self.optimizer = jaxmp.nnx.Optimizer(self.model, optimizer(policy))

        def step(model: Any, optimizer: Any, grad: Any) -> None:
            optimizer.update(model, nnx.State({"kernel": nnx.Param(grad)}))

        self.apply = nnx.jit(step) if compile is jax.jit else step

    def set(self, param: Any) -> None:
        self.model.kernel[...] = jnp.asarray(param)

    def step(self, grad: Any) -> None:
        self.apply(self.model, self.optimizer, jnp.asarray(grad))

    def now(self) -> tuple[Any, Any]:
        return self.model.kernel[...], self.optimizer.opt_state.master["kernel"][...]


def changed(rng: np.random.Generator, param: Any) -> Any:
    """A param as people set it: other values, a clip, an average, zeros, or the same again."""
    new = rng.normal(size=SHAPE).astype(param.dtype)
    some = rng.random(SHAPE) < 0.4
    choices = [
        new,
        np.where(some, new, param),
        np.clip(param, -0.5, 0.5),
        (param.astype(np.float32) + new.astype(np.float32)) / 2,
        np.where(some, param.dtype.type(-0.0), param),
        np.where(some, 65504.0, param),  # where float16 saturates
        param,
    ]
    return choices[rng.integers(len(choices))].astype(param.dtype)


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize(
    ("route", "compile", "steps"),
    [
        (ByState, jax.jit, 2000),
        (ByUpdates, jax.jit, 2000),
        (ByModule, jax.jit, 2000),
        (ByState, lambda f: f, 100),
        (ByUpdates, lambda f: f, 100),
        (ByModule, lambda f: f, 100),
    ],
)
def test_steps_equal_a_model_in_numpy(route: Any, compile: Any, steps: int, policy: str) -> None:
    """Random gradients, overflows and sets: params and masters agree to the bit at every step."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=SHAPE).astype(np.float32)
    if route is ByModule:  # its masters begin with the params of the model
        first = first.astype(HALVES[policy]).astype(np.float32)
    ours = route(first, policy, compile)
    reference = Reference(first.astype(HALVES[policy]), first, by_updates=route.by_updates)
    followed = 0
    for _ in range(steps):
        if rng.random() < 0.3:
            reference.param = changed(rng, reference.param)
            ours.set(reference.param)
            followed += np.any(reference.rounded(reference.master) != reference.param)
        grad = rng.normal(size=SHAPE).astype(np.float32)
        if rng.random() < 0.1:
            grad[0, 0] = np.inf
        ours.step(grad)
        reference.step(grad)
        param, master = ours.now()
        np.testing.assert_array_equal(np.asarray(param), reference.param)
        np.testing.assert_array_equal(np.asarray(master), reference.master)
    assert followed > steps / 10  # positive control: params were really set


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_masters_of_all_params_are_kept(dtype: Any) -> None:
    """Whatever is within half a unit of a param is its master still, for every bit pattern."""
    kind = np.uint16 if jnp.dtype(dtype).itemsize == 2 else np.uint8
    patterns = np.arange(np.iinfo(kind).max + 1, dtype=kind).view(jnp.dtype(dtype))
    wide = patterns.astype(np.float32)
    finite = np.isfinite(wide) & (np.abs(wide) >= np.finfo(np.float32).tiny)
    params, wide = patterns[finite], wide[finite]
    masters = (wide.astype(np.float64) * (1 + 2.0**-20)).astype(np.float32)
    kept = jax.jit(follow)(masters, params)
    assert bits(kept) == bits(masters)
    moved = jax.jit(follow)(masters, np.roll(params, 1))
    np.testing.assert_array_equal(moved, np.roll(wide, 1))  # positive control


def test_lost_params_are_followed() -> None:
    """NaN is never the same as a master, and infinity no saturated one."""
    masters = jnp.array([1.0, jnp.nan, 1.0, 7e4], jnp.float32)
    params = jnp.array([jnp.nan, 1.0, jnp.inf, 65504.0], jnp.float16)
    np.testing.assert_array_equal(follow(masters, params), [np.nan, 1.0, np.inf, 7e4])


def test_a_format_without_negative_zero() -> None:
    """In fnuz formats the pattern of minus zero is NaN."""
    param = jnp.asarray(np.nan, jnp.float8_e4m3fnuz)
    assert np.isnan(follow(jnp.float32(0.0), param))
    assert follow(jnp.float32(1e-9), jnp.zeros((), jnp.float8_e4m3fnuz)) == jnp.float32(1e-9)
