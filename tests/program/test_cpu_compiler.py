"""A jaxlib whose CPU compiler computes bfloat16 wrongly is told of, once, when it is used."""

import socket
import subprocess
import sys
import warnings
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from jaxmp._numerics import user_warnings
from jaxmp._program import cpu_compiler

FEW: dict[str, Any] = {"kernel_init": nn.initializers.ones, "use_bias": False}  # operations
PARAMS = {"w": np.ones((4, 2), np.float32)}
TEXT = "the CPU compiler of jaxlib .* sums bfloat16 wrongly"
USES = {
    "optimizer": lambda policy: jaxmp.mixed_precision(optax.sgd(0.1), policy).init(PARAMS),
    "train state": lambda policy: jaxmp.TrainState.create(
        params=PARAMS, tx=jaxmp.mixed_precision(optax.sgd(0.1), policy)
    ),
    "autocast": lambda policy: jaxmp.autocast(lambda w: w @ w.T, policy)(PARAMS["w"]),
    "linen": lambda policy: jaxmp.linen.apply_policy(nn.Dense(2, **FEW), policy).init(
        jax.random.key(0), PARAMS["w"]
    ),
    "nnx": lambda policy: jaxmp.nnx.apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0), **FEW), policy),
}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jaxlib that has the fault, of which nothing was said yet."""
    monkeypatch.setattr(cpu_compiler, "may_sum_bfloat16_wrongly", lambda: True)
    monkeypatch.setattr(cpu_compiler, "sums_wrongly", lambda: True)
    monkeypatch.setattr(user_warnings, "_TEXTS", weakref.WeakKeyDictionary())


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("use", USES)
def test_the_first_use_of_bfloat16_says_so_once(use: str) -> None:
    with pytest.warns(UserWarning, match=TEXT) as caught:
        _ = [USES[use](policy) for policy in ("mixed_bfloat16", "bfloat16")]
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("faulty")
def test_autocast_alone_says_so_under_jit_where_there_are_cpus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = jaxmp.autocast(lambda w: w @ w.T, "mixed_bfloat16")

    def texts() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monkeypatch.setattr(user_warnings, "_TEXTS", weakref.WeakKeyDictionary())
            jax.make_jaxpr(fast)(PARAMS["w"])
            jax.make_jaxpr(fast)(PARAMS["w"])
        return [str(warning.message) for warning in caught]

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cpu_compiler, "_knows_cpus_alone", lambda: True)
    # To run a program would start a backend, which the user may want to set up first.
    monkeypatch.setattr(cpu_compiler, "sums_wrongly", mock.Mock(side_effect=AssertionError))
    assert texts() == [cpu_compiler.WRONG_SUMS]
    monkeypatch.setattr(cpu_compiler, "_knows_cpus_alone", lambda: False)
    assert texts() == []
    monkeypatch.setattr(cpu_compiler, "_knows_cpus_alone", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert texts() == []


@pytest.mark.parametrize(
    ("platforms", "plugins", "libtpu", "alone"),
    [
        ("cpu", ["a plugin"], True, True),
        ("cuda,cpu", [], False, False),
        (None, [], False, True),
        (None, ["a plugin"], False, False),
        (None, [], True, False),
    ],
)
def test_whether_jax_knows_cpus_alone(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None, plugins: Any, libtpu: bool, alone: bool
) -> None:
    monkeypatch.setattr(jax, "config", mock.Mock(jax_platforms=platforms))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: plugins)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: libtpu and name == "libtpu")
    assert cpu_compiler._knows_cpus_alone.__wrapped__() is alone


@pytest.mark.usefixtures("faulty")
def test_nothing_is_said_where_nothing_runs_in_bfloat16_on_a_cpu() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in USES.values():
            use("float32")
            use("mixed_float16")
        jax.eval_shape(tx.init, PARAMS)
        jaxmp.linen.apply_policy(nn.Dense(2), "mixed_bfloat16")


def test_the_probe_agrees_with_numpy() -> None:
    """Sums of small integers are exact; the same program at another size shows the fault too."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1, 2, (128, 128)) for _ in "ab")
    wanted = (np.maximum(a, 0) * np.maximum(b, 0)).sum(1)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (a, b)]
    program: Any = jax.jit(lambda a, b: (jax.nn.relu(a) * jax.nn.relu(b)).sum(1))
    wrong = not np.array_equal(np.asarray(program(*low), np.float64), wanted)
    on_cpu = jax.default_backend() == "cpu"
    assert not on_cpu or cpu_compiler._probe() is wrong
    # The versions that are named: a jaxlib with the fault is always asked.
    assert not wrong or cpu_compiler.may_sum_bfloat16_wrongly()


def test_the_probe_runs_within_traces_and_meshes() -> None:
    cpu_compiler.sums_wrongly.cache_clear()
    mesh = jax.make_mesh((1,), ("data",))
    with jax.set_mesh(mesh), jax.debug_nans(True), jax.transfer_guard("disallow"):
        found = jax.eval_shape(lambda: jnp.full((), cpu_compiler.sums_wrongly()))
    assert found.dtype == jnp.bool_
    cpu_compiler.sums_wrongly.cache_clear()


START = """
import socket, sys, jax, jax.numpy as jnp, numpy as np, optax, jaxmp, jaxmp.linen, warnings
from flax import linen as nn
policy = jaxmp.get_policy("mixed_bfloat16")
tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((2,), "float32")})
model = jaxmp.linen.apply_policy(nn.Dense(2), policy)
fast = jaxmp.autocast(lambda x: x @ x, policy)
step = jaxmp.make_train_step(lambda p, b: 0.0, policy)
"""
JOIN = "jax.distributed.initialize('localhost:' + sys.argv[1], num_processes=1, process_id=0)"


def run(code: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "always", "-c", START + code, port]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_no_backend_is_started_before_the_user_does() -> None:
    done = run(f"{JOIN}\ntx.init({{'w': np.ones(2, np.float32)}})\ntx.init({{'w': np.ones(2)}})")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sums bfloat16 wrongly") == int(cpu_compiler.sums_wrongly())
    started = run(f"jnp.zeros(2)\n{JOIN}")  # positive control
    assert "must be called before" in started.stderr
