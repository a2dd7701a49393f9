"""Thirty mistakes that a new user makes, and what each is told. Silent and wrong is no row."""

import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._tools.command.main import main

pytestmark = [
    pytest.mark.jax,
    # These cases hand over wrong types on purpose.
    pytest.mark.usefixtures("unchecked", "standard_promotion"),
]

MIXED = "mixed_bfloat16"
X = np.random.default_rng(0).standard_normal((8, 16), np.float32)
PARAMS = {"w": X.T.copy()}


class Net(nnx.Module):
    """Its key is no param."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x))


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"]) ** 2)


def live_loss(model: Net, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def wrapped(policy: Any = MIXED) -> jaxmp.MixedPrecision:
    return jaxmp.mixed_precision(optax.sgd(0.1), policy)


def state(**collections: Any) -> jaxmp.TrainState:
    return jaxmp.TrainState.create(params=PARAMS, tx=wrapped(), **collections)


def optimizer(model: Net, policy: Any = MIXED) -> jaxmp.nnx.Optimizer:
    return jaxmp.nnx.Optimizer(model, wrapped(policy))


def live_step(*args: Any, fun: Any = live_loss, policy: Any = None) -> Any:
    model = Net()
    return jaxmp.nnx.make_train_step(fun, policy)(model, optimizer(model), X, *args)


def with_autocast() -> None:
    with jaxmp.autocast(MIXED):  # type: ignore[attr-defined]
        loss(PARAMS, X)


def own_loop(policy: str, model_policy: str | None = None) -> None:
    """A loop of a live model, which forgets a policy or takes another."""
    model = Net()
    if model_policy is not None:
        jaxmp.nnx.apply_policy(model, model_policy)

    def step(model: Net, optimizer: jaxmp.nnx.Optimizer) -> None:
        grads = jaxmp.nnx.grad(live_loss, loss_scale=optimizer.loss_scale)(model, X)
        optimizer.update(model, grads)

    nnx.eval_shape(step, model, optimizer(model, policy))


def after_a_clone() -> None:
    """An average of the params that shares its arrays with the model."""
    model = Net()
    wrapper = optimizer(model)
    step = jaxmp.nnx.make_train_step(live_loss)
    step(model, wrapper, X)
    average = nnx.clone(model)
    step(model, wrapper, X)
    step(average, wrapper, X)


def a_new_layer() -> None:
    model = Net()
    wrapper = optimizer(model)
    model.more = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    jaxmp.nnx.make_train_step(live_loss)(model, wrapper, X)


def the_old_state() -> None:
    first = state()
    step = jaxmp.make_train_step(loss)
    step(first, X)
    step(first, X)


def evaluating(model: Net, x: Any) -> Any:
    model.eval()
    return live_loss(model, x)


# What was done; what the user is told: an error, or a warning where the program runs.
MISTAKES: list[tuple[str, Callable[[], Any], type[BaseException], str]] = [
    ("'bf16' as a policy", lambda: wrapped("bf16"), ValueError,
     "'bf16' may mean one of two policies: 'mixed_bfloat16' keeps float32 params, as torch.amp "
     "does, and 'bfloat16' stores them in bfloat16"),
    ("'half' on a model", lambda: jaxmp.nnx.apply_policy(Net(), "half"), ValueError,
     "'half' may mean one of two policies: 'mixed_float16'"),
    ("Lightning's name", lambda: wrapped("bf16-mixed"), ValueError,
     "unknown policy 'bf16-mixed'. Did you mean 'mixed_bfloat16'?"),
    ("Lightning's other name", lambda: wrapped("16-true"), ValueError,
     "unknown policy '16-true'. Did you mean 'float16'?"),
    ("turned around", lambda: wrapped("float16_mixed"), ValueError, "mean 'mixed_float16'?"),
    ("capitals", lambda: wrapped("Mixed_BFloat16"), ValueError, "mean 'mixed_bfloat16'?"),
    ("'fp8'", lambda: wrapped("fp8"), ValueError, "Did you mean 'mixed_float8'?"),
    ("a dtype as a policy", lambda: wrapped(jnp.bfloat16), TypeError,
     "got the dtype bfloat16, which does not say what has it"),
    ("a dtype on a model", lambda: jaxmp.nnx.apply_policy(Net(), jnp.float16), TypeError,
     "Write 'mixed_float16' (float32 params, the usual choice) or 'float16'"),
    ("no policy", lambda: wrapped(None), TypeError, "'none' is for make_train_step alone"),
    ("the word for steps", lambda: wrapped("none"), ValueError, "for make_train_step alone"),
    ("as a context", with_autocast, TypeError,
     "autocast rewrites functions, and is no context manager"),
    ("without a policy", lambda: jaxmp.autocast(loss), TypeError,
     "autocast takes a function and then a policy"),
    ("the policy first", lambda: jaxmp.autocast(MIXED, loss), TypeError, "got str and function"),
    ("a live model as params", lambda: jaxmp.value_and_grad(live_loss)(Net(), X), TypeError,
     "For a live nnx module take jaxmp.nnx.make_train_step, or jaxmp.nnx.value_and_grad"),
    ("a state of a live model",
     lambda: jaxmp.TrainState.create(params=Net(), tx=wrapped()), TypeError,
     "Or split it: graphdef, params, rest = nnx.split(model, nnx.Param, ...)"),
    ("the step of params", lambda: jaxmp.make_train_step(live_loss)(Net(), X), TypeError,
     "got a live nnx module: make the step with jaxmp.nnx.make_train_step(loss_fn)"),
    ("a batch in two arguments", lambda: jaxmp.make_train_step(loss)(state(), X, X), TypeError,
     "a step takes one batch, a tree of arrays, and got 2 arguments in its place"),
    ("the same, live", lambda: live_step(X), TypeError, "call step(model, optimizer, (x, y))"),
    ("a loss of two arrays", lambda: jaxmp.make_train_step(lambda p, x, y: x)(state(), (X, X)),
     TypeError, "calls its loss function as loss_fn(params, batch), which this one does not take"),
    ("a collection that the loss does not take",
     lambda: jaxmp.make_train_step(loss)(state(batch_stats=jnp.ones(2)), X), TypeError,
     "as loss_fn(params, batch, batch_stats=...), which this one does not take"),
    ("Flax's own optimizer",
     lambda: jaxmp.nnx.make_train_step(live_loss)(
         Net(), nnx.Optimizer(Net(), optax.sgd(0.1), wrt=nnx.Param), X),
     TypeError, "takes jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optimizer, policy))"),
    ("Flax's own state",
     lambda: jaxmp.make_train_step(loss)(
         flax.training.train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=wrapped()),
         X),
     TypeError, "with a jaxmp.TrainState, got flax.TrainState"),
    ("an optimizer that is not wrapped", lambda: jaxmp.nnx.Optimizer(Net(), optax.sgd(0.1)),
     TypeError, "tx must be jaxmp.mixed_precision(optimizer, policy)"),
    ("eval() in the loss", lambda: live_step(fun=evaluating), ValueError,
     "as train() and eval() do, and a step keeps the structure of the model"),
    ("a layer after the optimizer", a_new_layer, ValueError,
     "the optimizer state was made for other params: only one of the two has 'more/"),
    ("an average that shares arrays", after_a_clone, ValueError,
     "nnx.clone(model) and nnx.state(model) do. Copy those"),
    ("the old state", the_old_state, ValueError, "this state was donated to an earlier step"),
    ("nobody casts", lambda: own_loop(MIXED), UserWarning,
     "wrapped for bfloat16, and all products behind its gradients are float32"),
    ("two policies", lambda: own_loop("mixed_float16", MIXED), UserWarning,
     "wrapped for float16, and all products behind its gradients are bfloat16"),
    ("nobody casts in a step", lambda: live_step(policy="none"), UserWarning,
     "wrapped for bfloat16, and all products behind its gradients are float32"),
    ("wrapped twice", lambda: jaxmp.mixed_precision(wrapped(), MIXED), TypeError,
     "the optimizer is wrapped in mixed_precision already; wrap it once"),
]  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "kind", "text"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_told(call: Callable[[], Any], kind: Any, text: str) -> None:
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=re.escape(text)):
            call()
        return
    with warnings.catch_warnings(), pytest.raises(kind, match=re.escape(text)):
        call()


def test_the_decorator_is_autocast() -> None:
    @jaxmp.autocast(MIXED)
    def decorated(params: Any, x: Any) -> Any:
        return loss(params, x)

    assert decorated(PARAMS, X) == jaxmp.autocast(loss, MIXED)(PARAMS, X)
    assert decorated.__name__ == "decorated"
    live = jaxmp.nnx.autocast(MIXED, recompute="auto")(live_loss)
    assert np.isfinite(live(Net(), X))


PROGRAM = """
import jax.numpy as jnp
def loss(params, x): return jnp.mean((x @ params["w"]) ** 2)
def program(): return loss, ({"w": jnp.ones((8, 8))}, jnp.ones((2, 8)))
"""


def test_commands(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function in place of a factory is told what to write."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    assert main(["plan", f"{file}:loss"]) == 2
    assert "def program(): return loss, (params, x)" in capsys.readouterr().err
