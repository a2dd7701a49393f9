"""Operations whose operands do not have the shape of their result: nothing is broadcast there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.ways import both_ways

W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
E = np.eye(4, dtype=np.float32)
B = np.arange(1, 5, dtype=np.float32)

CASES: dict[str, Callable[..., Any]] = {
    "dynamic_update_slice": lambda x, w, b: lax.dynamic_update_slice(x @ E, b[None], (1, 0)),
    "outer product": lambda x, w, b: jnp.einsum("i,j->ij", (x @ E)[1], b),
    "batched outer product": lambda x, w, b: jnp.einsum("bi,bj->bij", w, x @ E),
    "concatenate": lambda x, w, b: jnp.concatenate([x @ E, w]),
    "a token in front": lambda x, w, b: jnp.concatenate([jnp.broadcast_to(b, (1, 4)), x @ E]),
    "stack": lambda x, w, b: jnp.stack([x @ E, w]),
    "pad with a number": lambda x, w, b: lax.pad(w, (x @ E)[0, 0], [(1, 1, 0), (0, 0, 0)]),
    "pad an activation": lambda x, w, b: jnp.pad(x @ E, ((1, 1), (0, 0)), constant_values=2.0),
    "set": lambda x, w, b: (x @ E).at[:2].set(jnp.broadcast_to(b, (2, 4))),
    "set rows": lambda x, w, b: (x @ E).at[jnp.array([0, 2])].set(jnp.broadcast_to(b, (2, 4))),
    "max rows": lambda x, w, b: (x @ E).at[jnp.array([0, 2])].max(jnp.broadcast_to(b, (2, 4))),
    "min rows": lambda x, w, b: (x @ E).at[jnp.array([0, 0])].min(jnp.broadcast_to(b, (2, 4))),
    "subtract rows": lambda x, w, b: (x @ E).at[jnp.array([0, 0])].subtract((x @ E)[1:3]),
    "multiply rows": lambda x, w, b: (x @ E).at[jnp.array([0, 0])].multiply((x @ E)[1:3]),
    "scatter into params": lambda x, w, b: w.at[jnp.array([0, 2])].set((x @ E)[:2]),
    "a row of a bias": lambda x, w, b: (x @ E) + b[None],
    "a column": lambda x, w, b: (x @ E) * b[:, None],
    "a number": lambda x, w, b: (x @ E) * b[2],
    "clamp": lambda x, w, b: lax.clamp(jnp.float32(-0.5), x @ E, jnp.float32(0.75)),
    "select by a number": lambda x, w, b: lax.select_n(b[0] > 0, w, x @ E),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_shapes_and_values(name: str, dtype: str) -> None:
    fun = CASES[name]
    args = (W, W[::-1].copy(), B)
    got, want = both_ways(fun, *args, policy=dtype)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=0.01, atol=0.02)

    def loss(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jnp.sum(
            np.sin(np.arange(want.size, dtype=want.dtype)).reshape(want.shape) * fun(*args)
        )

    if name in ("max rows", "min rows", "multiply rows"):  # JAX has no gradient of it
        return
    grads = both_ways(fun, *args, policy=dtype, of=lambda f: jax.grad(loss(f), (0, 1, 2)))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.05)
