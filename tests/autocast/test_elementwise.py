"""Autocast and functions of one number: jax.nn, jax.numpy, jax.scipy.special."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.support.autocast_checks import BOTH, LOW, UNIT, compiled, error

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

both = pytest.mark.parametrize("policy", BOTH)
special = jax.scipy.special

# Functions of one number, and the range over which they are tried.
UNARY: dict[str, tuple[Any, float, float]] = {
    "celu": (jax.nn.celu, -20, 20),
    "elu": (jax.nn.elu, -20, 20),
    "gelu": (jax.nn.gelu, -8, 8),
    "gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), -8, 8),
    "glu": (lambda x: jax.nn.glu(x.reshape(-1, 2), -1), -8, 8),
    "hard_sigmoid": (jax.nn.hard_sigmoid, -8, 8),
    "hard_swish": (jax.nn.hard_swish, -8, 8),
    "hard_tanh": (jax.nn.hard_tanh, -2, 2),
    "log_sigmoid": (jax.nn.log_sigmoid, -80, 80),
    "mish": (jax.nn.mish, -20, 20),
    "relu6": (jax.nn.relu6, -8, 8),
    "selu": (jax.nn.selu, -20, 20),
    "sigmoid": (jax.nn.sigmoid, -20, 20),
    "silu": (jax.nn.silu, -20, 20),
    "soft_sign": (jax.nn.soft_sign, -20, 20),
    "softplus": (jax.nn.softplus, -80, 80),
    "sparse_plus": (jax.nn.sparse_plus, -2, 2),
    "squareplus": (jax.nn.squareplus, -20, 20),
    "standardize": (lambda x: jax.nn.standardize(x), -8, 8),
    "logsumexp": (lambda x: jax.nn.logsumexp(x), -8, 8),
    "exp": (jnp.exp, -8, 8),
    "expm1": (jnp.expm1, -1, 1),
    "log": (lambda x: jnp.log(x), 0.01, 100),
    "log1p": (jnp.log1p, -0.9, 2),
    "sinh": (jnp.sinh, -8, 8),
    "arcsinh": (jnp.arcsinh, -100, 100),
    "arccosh": (jnp.arccosh, 1.1, 100),
    "arctanh": (jnp.arctanh, -0.96, 0.96),
    "arcsin": (jnp.arcsin, -0.96, 0.96),
    "arccos": (jnp.arccos, -0.96, 0.96),
    "arctan": (jnp.arctan, -8, 8),
    "sin": (jnp.sin, -8, 8),
    "sinc": (jnp.sinc, -4, 4),
    "tan": (jnp.tan, -1.5, 1.5),
    "cbrt": (jnp.cbrt, 0.1, 100),
    "sqrt": (jnp.sqrt, 0.1, 100),
    "reciprocal": (jnp.reciprocal, 0.1, 100),
    "power": (lambda x: x**2.5, 0.1, 20),
    "cube": (lambda x: x**3, -30, 30),
    "float_power 2**x": (jnp.exp2, -8, 8),
    "i0": (jnp.i0, -8, 8),
    "deg2rad": (lambda x: jnp.sin(jnp.deg2rad(x)), -90, 90),
    "hypot": (lambda x: jnp.hypot(x, x), -40000, 40000),
    "logaddexp": (lambda x: jnp.logaddexp(x, -x), -30, 30),
    "fmod": (lambda x: jnp.fmod(x, 3.0), -30, 30),
    "polyval": (lambda x: jnp.polyval(jnp.array([1.0, -2.0, 0.5]), x), -8, 8),
    "interp": (lambda x: jnp.interp(x, jnp.array([-9.0, 0.0, 9.0]), jnp.array([0.0, 1, 4])), -8, 8),
    "erf": (special.erf, -4, 4),
    "erfc": (special.erfc, -4, 4),
    "erfinv": (special.erfinv, -0.96, 0.96),
    "gammaln": (special.gammaln, 0.1, 30),
    "digamma": (special.digamma, 0.1, 30),
    "zeta": (lambda x: special.zeta(x, 1.0), 1.5, 8),
    "entr": (special.entr, 0.01, 0.99),
    "logit": (special.logit, 0.02, 0.98),
    "xlogy": (lambda x: special.xlogy(x, x), 0.01, 8),
    "ndtr": (special.ndtr, -4, 4),
    "log_ndtr": (special.log_ndtr, -12, 4),
    "ndtri": (special.ndtri, 0.01, 0.99),
    "i1e": (special.i1e, -8, 8),
    "betainc": (lambda x: special.betainc(2.0, 3.0, x), 0.05, 0.95),
    "gammainc": (lambda x: special.gammainc(2.0, x), 0.1, 8),
    "expi": (special.expi, 0.1, 4),
}
# Smaller at 0 than any rounding of what they are computed from.
_LOOSE = {"sinc", "expi"}


@both
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, policy: str) -> None:
    """The product is exact, so that all that is left is the error of the function."""
    fun, least, most = UNARY[name]
    z = jnp.linspace(least, most, 64).reshape(4, 16).astype(LOW[policy]).astype(jnp.float32)

    def with_grad(fun: Any, z: Any, of: Any) -> Any:
        out, pull = jax.vjp(fun, z)
        return out, pull(of)[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ones = jnp.ones_like(jax.eval_shape(fun, z))
        fast = jaxmp.autocast(lambda z: fun(z @ jnp.eye(16)), policy)
        got, grads = compiled(functools.partial(with_grad, fast))(z, ones)
        want, want_grads = compiled(functools.partial(with_grad, fun))(z, ones)
    allowed = UNIT[policy] * (16 if name in _LOOSE else 4)
    size = np.maximum(np.abs(want), max(1.0, float(np.abs(want).max()) * 0.1))
    assert np.all(np.abs(got - want) <= allowed * size)
    assert error(grads, want_grads) <= 2 * allowed
