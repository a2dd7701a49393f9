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
from tests.support.compilations import budget, compilations  # noqa: F401
from tests.support.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401
from tests.support.users_programs import pytest_itemcollected  # noqa: F401


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


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs for the next run, and for the other process of this one.

    Compiling is half of the time of a first run. JAX's key of a program has all that changes it:
    versions, flags, devices. `pytest --cache-clear` empties the folder.
    """
    cache = getattr(config, "cache", None)
    if cache is not None and jax.config.jax_platforms == "cpu":
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def names_in_keys(request: pytest.FixtureRequest) -> None:
    """Keeps programs apart that differ in names and lines alone, where these are read."""
    reads_names = request.path.parent.name in ("inspect", "diagnostics", "planning", "command")
    jax.config.update("jax_compilation_cache_include_metadata_in_key", reads_names)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches type checks at run time off (`make annotations`), to see what users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
