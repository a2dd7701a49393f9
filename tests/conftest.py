"""What every test runs under: eight CPU devices, strict promotion, rank errors, quick compilers.

With JAX_PLATFORMS set to an accelerator, tests of the mark `device` run there, with the compilers
and the devices that users have.
"""

import os
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest
from jaxlib import version as jaxlib_version

# Hooks and fixtures of pytest, which finds them here.
from tests.support.compilations import compilations  # noqa: F401
from tests.support.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401


def _quick_compilation() -> str:
    """XLA flags that shorten the time to compile for CPUs, which is most of that of the tests.

    They concern how machine code is made, not which program it is made of.
    """
    flags = ["--xla_backend_optimization_level=0"]
    if jaxlib_version.__version_info__ < (0, 11):  # later ones have no such flag, and exit
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


# In the environment, for the programs that tests start too: where compilers for TPUs and GPUs are
# installed, JAX would look for devices of theirs.
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    # Those compilers read the same flags, and are to do all they can.
    if "JAXMP_AOT" not in os.environ:
        os.environ.setdefault("XLA_FLAGS", _quick_compilation())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes single examples slow; the same examples on every run make failures repeat.
hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxmp")


@pytest.fixture(autouse=True, scope="package")
def caches_of_a_folder() -> None:
    """Empties JAX's caches: when they have 8,192 functions, each call of a new one compiles it."""
    jax.clear_caches()


@pytest.fixture(autouse=True)
def annotations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runtime type checks, in tests of that mark and in doctests: a third of the time of others."""
    jaxtyping.config.update("jaxtyping_disable", not request.node.get_closest_marker("annotations"))
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked(annotations: None) -> None:
    """Switches the runtime type checks off, to see what users without them see."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For tests in which flax or optax mix dtypes themselves."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def blocks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets MXFP8 run on a CPU, where XLA decodes the blocks; users get an error there."""
    from jaxmp._primitives import block_product  # reads the settings above

    monkeypatch.setattr(block_product, "check_device", lambda ctx: None)
