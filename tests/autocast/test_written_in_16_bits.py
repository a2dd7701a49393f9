"""Programs that are in 16 bits before autocast: norms add up in float32, draws are float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import error

pytestmark = pytest.mark.usefixtures("standard_promotion")
X = 300 + 300 * np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
W = np.eye(32, dtype=np.float32)


def rms(w: Any, x: Any) -> Any:
    h = x @ w
    return h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6)


def layer_norm(w: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)


def of_data(w: Any, x: Any) -> Any:
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w


def standard_deviation(w: Any, x: Any) -> Any:
    return (x @ w) / jnp.std(x @ w, axis=0)


def root_of_a_sum(w: Any, x: Any) -> Any:
    h = x @ w
    return h / jnp.sqrt(jnp.sum(h * h, -1, keepdims=True))


NORMS = [rms, layer_norm, of_data, standard_deviation, root_of_a_sum, jax.jit(rms)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_norms_of_float16(norm: Any, policy: str) -> None:
    """A mean square of 90,000 was infinite, and the norm zero, without a warning."""
    w = W.astype(np.float16 if policy == "float16" else np.float32)
    x = X.astype(np.float16)
    got = jax.jit(jaxmp.autocast(norm, policy))(w, x)
    assert error(got, norm(W, x.astype(np.float32))) < 0.01
    assert got.dtype == norm(jnp.asarray(w), jnp.asarray(x)).dtype
    if norm is not of_data and policy == "float16":  # positive control
        with np.errstate(all="ignore"):
            alone = np.asarray(norm(jnp.asarray(w), jnp.asarray(x)), np.float32)
        assert not error(alone, norm(W, x.astype(np.float32))) < 0.01


def test_a_cast_of_the_user_stays() -> None:
    """No sum of what was 16 bits, and no sum at all: such casts were asked for."""

    def f(x: Any) -> Any:
        total = jnp.sum(x.astype(jnp.float32) ** 2).astype(jnp.bfloat16)
        return total, x.astype(jnp.float32).astype(jnp.float16), jnp.exp(x).astype(jnp.float16)

    wide = jnp.float32
    large = jaxmp.autocast(lambda: jnp.full(4, 7e4).astype("float16").astype(wide), "mixed_float16")
    assert np.isinf(large()).all()
    x = jnp.asarray(X[:1] / 300)
    got = jaxmp.autocast(f, "mixed_float16", output="computed")(x)
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.float16, jnp.float16]


CLASSES = 2000
DRAWS: dict[str, Any] = {
    "categorical": jax.random.categorical,
    "gumbel": lambda key, z: jnp.argmax(z + jax.random.gumbel(key, z.shape, z.dtype), -1),
    "exponential": lambda key, z: jnp.argmin(jax.random.exponential(key, z.shape, z.dtype) - z, -1),
    "uniform": lambda key, z: jnp.argmax(z + jax.random.uniform(key, z.shape, z.dtype), -1),
    "normal": lambda key, z: jnp.argmax(z + jax.random.normal(key, z.shape, z.dtype), -1),
    "in a scan": lambda key, z: lax.map(lambda z: jax.random.categorical(key, z), z[None])[0],
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_draws_from_16_bit_logits(name: str, policy: str) -> None:
    """Of equal classes each is drawn; in 16 bits the first of those that tie, of 2**7 or 2**10."""

    def sample(w: Any, x: Any, key: Any) -> Any:
        return DRAWS[name](key, x @ w)

    w, x = jnp.zeros((16, CLASSES), policy), jnp.ones((400, 16), policy)
    key = jax.random.key(0)
    fast, alone = (jax.jit(f)(w, x, key) for f in (jaxmp.autocast(sample, policy), sample))
    assert len(np.unique(fast)) > 340 if name != "in a scan" else True
    assert np.mean(np.asarray(fast) > CLASSES // 2) > 0.4
    if policy == "bfloat16":  # positive control
        assert np.mean(np.asarray(alone) > CLASSES // 2) < 0.4


def test_rare_events_of_16_bits() -> None:
    rate = jnp.full((20_000,), 0.001, jnp.bfloat16)

    def rare(rate: Any, key: Any) -> Any:
        return jax.random.bernoulli(key, rate)

    key = jax.random.key(0)
    fast, alone = (f(rate, key).mean() for f in (jaxmp.autocast(rare, "bfloat16"), rare))
    assert abs(fast - 0.001) < 0.001
    assert alone > 0.005  # positive control
