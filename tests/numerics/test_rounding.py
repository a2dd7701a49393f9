"""Roundings: exact here; that GPUs keep them is tests/aot's business."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._numerics.rounding import widen_rounded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_is_kept(dtype: str) -> None:
    """All 65,536 patterns, subnormals among them (those of bfloat16 are flushed on CPU)."""
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.dtype(dtype))
    got = np.asarray(jax.jit(widen_rounded)(x))
    want = np.asarray(x).astype(np.float32)
    tiny = np.abs(want) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(got[~tiny], want[~tiny])
    assert np.all(np.abs(got[tiny]) <= np.abs(want[tiny]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_keeps_what_a_cast_pair_could_lose(dtype: str) -> None:
    """The program itself says so: a compiler may drop a pair of casts, but not these."""
    text = jax.jit(lambda y: widen_rounded(y.astype(dtype))).lower(jnp.ones(3)).as_text()
    assert "reduce_precision" in text or "optimization_barrier" in text
