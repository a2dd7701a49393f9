"""What every test runs under: eight CPU devices, strict promotion, rank errors."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes single examples slow; the same examples on every run make failures repeat.
hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxmp")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the runtime type checks off, to see what users without them see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests in which flax or optax mix dtypes themselves."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
