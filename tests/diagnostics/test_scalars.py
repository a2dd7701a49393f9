"""Metrics come to a logger as Python numbers, and no step waits for them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp.diagnostics import histograms, scalar_log, scalars

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
POLICY = "mixed_float16"


def step_and_state(**options: Any) -> Any:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    state = jaxmp.TrainState.create(params={"layer": {"w": jnp.ones(4)}}, tx=tx)

    def loss_fn(p: Any, x: Any) -> Any:
        return jnp.mean((x @ p["layer"]["w"]) ** 2)

    return jaxmp.make_train_step(loss_fn, POLICY, **options), state


@pytest.mark.jax
def test_metrics_of_a_step() -> None:
    step, state = step_and_state(count_overflows=True, histograms_every=2)
    state, first = step(state, jnp.eye(4))
    found = scalars(first, prefix="train/")
    assert found["train/loss"] == 1.0
    assert found["train/grads_finite"] == 1
    assert found["train/loss_scale"] == 65536.0
    assert found["train/nonfinite/layer/w"] == 0
    assert found["train/histograms/layer/w/zeros"] == 0
    assert found["train/histograms/layer/w/log2_largest"] == -1  # each gradient is 0.5
    assert all(type(value) in (int, float) for value in found.values())
    _, second = step(state, jnp.eye(4))
    assert not [name for name in scalars(second) if "histograms" in name]


def test_the_median_is_that_of_the_numbers_that_are_not_zero() -> None:
    x = np.random.default_rng(0).lognormal(-5, 2, 20_000)
    x[:5000] = 0
    found = scalars({"h": histograms({"x": jnp.asarray(x, jnp.float32)})})
    assert found["h/x/log2_median"] == pytest.approx(np.log2(np.median(x[x > 0])), abs=0.02)
    assert found["h/x/zeros"] == pytest.approx(0.25)


def test_what_is_a_number_and_what_is_not() -> None:
    tree = {
        "array": jnp.ones(2),
        "bf16": jnp.bfloat16(0.5),
        "bool": True,
        "complex": jnp.complex64(1j),
        "empty": jnp.zeros(0),
        "float": 0.5,
        "key": jax.random.key(0),
        "list": [jnp.float32(jnp.inf), (2,)],
        "none": None,
        "numpy": np.float64(0.25),
        "one": jnp.ones((1, 1)),
        "text": "a",
    }
    expected = {
        **{"bf16": 0.5, "bool": 1, "float": 0.5, "list/0": math.inf, "list/1/0": 2},
        **{"numpy": 0.25, "one": 1.0},
    }
    assert scalars(tree) == expected
    assert scalars({}) == {}


class Slow:
    """An array that arrives when it is told to."""

    dtype, size, shape = jnp.dtype("float32"), 1, ()

    def __init__(self) -> None:
        self.ready = self.fetched = False

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None:
        self.fetched = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.float32(0.5)


def test_a_log_writes_in_order_what_has_arrived() -> None:
    written: list[int] = []
    first, second = Slow(), Slow()
    second.ready = True
    with scalar_log(lambda step, values: written.append(step)) as log:
        log(0, {"x": first})
        log(1, {"x": second})
        assert (written, first.fetched) == ([], True)
        first.ready = True
        log(2, {"x": Slow()})
        assert written == [0, 1]
    assert written == [0, 1, 2]


def test_a_run_that_fails_is_written_to_its_end() -> None:
    written: list[int] = []

    def run() -> None:
        with scalar_log(lambda step, values: written.append(step)) as log:
            log(0, {"x": Slow()})
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        run()
    assert written == [0]


def test_a_log_keeps_so_many_steps() -> None:
    written: list[int] = []
    with scalar_log(lambda step, values: written.append(step), most=2) as log:
        for step in range(5):
            log(step, {"x": Slow()})
        assert written == [0, 1, 2]
    assert written == [0, 1, 2, 3, 4]
    with (
        pytest.raises(ValueError, match="most must be at least 1 step, got 0"),
        scalar_log(print, most=0),
    ):
        pass


def test_a_log_of_a_run() -> None:
    """The zeros of the calls that count nothing are not written."""
    step, state = step_and_state(histograms_every=3)
    written: dict[int, Any] = {}
    with scalar_log(written.__setitem__, prefix="train/") as log:
        for i in range(4):
            state, metrics = step(state, jnp.eye(4))
            log(i, metrics)
    assert list(written) == [0, 1, 2, 3]
    counted = [any("histograms" in name for name in values) for values in written.values()]
    assert counted == [True, False, False, True]
    assert written[0]["train/loss"] == 1.0
    assert written[3]["train/loss"] < written[0]["train/loss"]
