"""Whole training runs against PyTorch: losses, scales, skips, norms, params and moments."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

PARITY = pathlib.Path(__file__).parents[1] / "parity"
TRACES = json.loads((PARITY / "train_traces.json").read_text())["traces"]
ACTIVATIONS = {"relu": lambda x: jnp.maximum(x, jnp.zeros_like(x)), "tanh": jnp.tanh}


def loss_of(trace: dict[str, Any]) -> Any:
    """The recorded model: two linear layers in the compute dtype, loss in float32."""
    compute = jnp.dtype(trace["compute_dtype"])
    activation = ACTIVATIONS[trace["act"]]

    def linear(x: Any, w: Any, b: Any) -> Any:
        wide = jnp.dot(x, w.astype(compute), preferred_element_type=jnp.float32)
        return (wide + b.astype(compute).astype(jnp.float32)[None]).astype(compute)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"].astype(compute)
        hidden = activation(linear(x, params["w1"], params["b1"]))
        out = linear(hidden, params["w2"], params["b2"])
        loss = jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)
        # torch injects into the scaled loss; the recorded loss does not show it.
        return loss * batch["inject"][0], loss

    return loss_fn


def optimizer_of(trace: dict[str, Any]) -> optax.GradientTransformation:
    if trace["optimizer"] == "adamw":
        inner = torch_adamw(trace)
    else:
        inner = optax.sgd(trace["lr"], momentum=trace["momentum"])
    return optax.chain(torch_clip(trace["clip_max_norm"]), inner)


def torch_adamw(trace: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW with exact bias corrections. optax computes 1 - 0.999**t in float32, which is 3e-5
    off at first and moves the params by 1e-6 in 16 steps: the whole tolerance of the exact run."""
    (b1, b2), eps, lr, decay = (trace[k] for k in ("betas", "eps", "lr", "weight_decay"))

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.int32(0), zeros, zeros)

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any) -> Any:
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        c1, c2 = (-jnp.expm1(count * np.float32(np.log(b))) for b in (b1, b2))

        def leaf(m: Any, v: Any, p: Any) -> Any:
            return -lr * (decay * p + m / c1 / (jnp.sqrt(v) / jnp.sqrt(c2) + eps))

        return jax.tree.map(leaf, mu, nu, params), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def torch_clip(max_norm: float) -> optax.GradientTransformation:
    """clip_grad_norm_: optax's clip has no 1e-6 beside the norm, which shows after ten steps."""

    def clip(grads: Any, params: Any) -> Any:
        del params
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
        return optax.tree.scale(scale, grads)

    return optax.stateless(clip)


def batches_of(trace: dict[str, Any], data: Any) -> Any:
    """One batch per step. Microbatch i is rows i, i + n, ..., so torch's parts are interleaved."""
    n = trace["accum"]
    for row in trace["rows"]:
        part = slice(row["t"] * n, (row["t"] + 1) * n)
        inject = np.ones((trace["batch"], n), np.float32)
        inject[:, -1] = float(row["inject"])
        yield {
            "x": np.swapaxes(data["x"][part], 0, 1).reshape(-1, trace["dims"][0]),
            "y": np.swapaxes(data["y"][part], 0, 1).reshape(-1, trace["dims"][2]),
            "inject": inject.reshape(-1),
        }


@pytest.mark.usefixtures("standard_promotion")  # optax mixes dtypes itself
@pytest.mark.parametrize("trace", TRACES, ids=lambda t: t["name"])
def test_run(trace: dict[str, Any]) -> None:
    data = np.load(PARITY / "train" / f"{trace['name']}.npz")
    config = (
        jaxmp.DynamicLossScale(
            init_scale=trace["init_scale"],
            growth_factor=trace["growth_factor"],
            backoff_factor=trace["backoff_factor"],
            growth_interval=trace["growth_interval"],
        )
        if trace["scaler"]
        else jaxmp.NoLossScale()
    )
    tx = jaxmp.mixed_precision(optimizer_of(trace), "float32", loss_scale=config)
    names = list(trace["shapes"])
    state = jaxmp.TrainState.create(params={k: data[f"init_{k}"] for k in names}, tx=tx)
    step = jaxmp.make_train_step(loss_of(trace), "none", has_aux=True, microbatches=trace["accum"])

    drift = trace["alt_numerics"]["max_abs_param_diff_per_step"]
    exact = trace["compute_dtype"] == "float32"
    taken = 0
    for t, (row, batch) in enumerate(zip(trace["rows"], batches_of(trace, data), strict=True)):
        state, metrics = step(state, batch)
        taken += not row["skipped"]
        assert float(metrics["loss_scale"]) == row["scale"], t
        assert bool(metrics["grads_finite"]) is not row["skipped"], t
        assert float(state.loss_scale.scale) == row["scale_after"], t
        assert int(state.loss_scale.growth_count) == row["growth_tracker"], t
        assert int(state.step) == taken, t
        atol = 1e-6 if exact else 4 * max(drift[: t + 1]) + 1e-4
        params = np.concatenate([np.ravel(state.params[k]) for k in names])
        np.testing.assert_allclose(params, data["params"][t], rtol=0, atol=atol, err_msg=str(t))
        loss = np.mean(np.asarray(metrics["aux"]))
        np.testing.assert_allclose(loss, row["loss"], rtol=1e-5 if exact else 2e-2)
        if not row["skipped"]:
            rtol = 1e-5 if exact else 3e-2
            np.testing.assert_allclose(float(metrics["grad_norm"]), row["grad_norm"], rtol=rtol)
        if trace["optimizer"] == "adamw":
            adam = optax.tree.get(state.opt_state, "ScaleByAdamState")
            assert int(adam.count) == taken, t
            assert row["opt_step"] in (taken, None), t
            for ours, theirs in ((adam.mu, "w1_exp_avg"), (adam.nu, "w1_exp_avg_sq")):
                np.testing.assert_allclose(
                    np.ravel(ours["w1"]), data[theirs][t], rtol=0, atol=1e-6 if exact else 2e-3
                )
