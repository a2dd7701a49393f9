"""The device that a test runs on, and the one that it is compared with."""

from typing import Any

import jax
import pytest

from jaxmp._program.cpu_compiler import sums_wrongly


def needs_gpu(reason: str, capability: float = 0.0) -> None:
    """Skips the rest of a test where there is no GPU, or an older one than it needs."""
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU: {reason}")
    has = str(getattr(jax.devices()[0], "compute_capability", "0"))
    if float(has) < capability:
        pytest.skip(f"needs compute capability {capability}, this GPU has {has}: {reason}")


def needs_bfloat16() -> None:
    """Skips a test on CPUs whose compiler sums bfloat16 wrongly, as that of jaxlib 0.11.2 does."""
    if jax.default_backend() == "cpu" and sums_wrongly():
        pytest.skip("the CPU compiler of this jaxlib sums bfloat16 wrongly")


def on_cpu(tree: Any) -> Any:
    """The arrays on the first CPU; what `jax.jit` is given there, it compiles for it."""
    try:
        return jax.device_put(tree, jax.devices("cpu")[0])
    except RuntimeError:
        pytest.skip("JAX has no CPU backend here: set JAX_PLATFORMS=cuda,cpu")
