"""What every test runs under: eight CPU devices, strict promotion, rank errors."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests in which flax or optax mix dtypes themselves."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
