"""Of what a backward pass keeps, copies of params are told from activations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._tools.inspect.api import AuditError, audit

BF16, F32 = jnp.bfloat16, jnp.float32
PARAMS = {
    "embedding": jnp.ones((100, 32)),
    "up": jnp.ones((32, 64)),
    "bias": jnp.ones((1, 64)),
    "down": jnp.ones((64, 32)),
    "layers": jnp.ones((5, 32, 32)),
}
TOKENS = jnp.zeros(8, jnp.int32)
# What products with weights need in their backward pass, in two bytes each.
WEIGHTS = 2 * sum(int(np.prod(PARAMS[name].shape)) for name in ("up", "down", "layers"))


def cast(params: Any, tokens: Any) -> Any:
    """Each weight is cast where it is used."""
    return model(jax.tree.map(lambda p: p.astype(BF16), params), tokens)


def model(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens]
    x = jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.sum(x.astype(F32))


def in_the_scan(params: Any, tokens: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(BF16)), None

    low = {name: p.astype(BF16) for name, p in params.items() if name != "layers"}
    x = jnp.tanh(low["embedding"][tokens] @ low["up"] + low["bias"]) @ low["down"]
    return jnp.sum(lax.scan(layer, x, params["layers"])[0].astype(F32))


def moved(params: Any, tokens: Any) -> Any:
    turned = {**params, "up": params["up"].T.astype(BF16).T, "down": params["down"].reshape(8, -1)}
    return cast({**turned, "down": turned["down"].astype(BF16).reshape(64, 32)}, tokens)


def in_a_branch(params: Any, tokens: Any) -> Any:
    other = lambda params, tokens: jnp.sum(params["bias"])  # noqa: E731
    return lax.cond(tokens[0] > 0, cast, other, params, tokens)


LOSSES = [
    *(cast, jax.jit(cast), in_the_scan, moved, in_a_branch),
    jaxmp.autocast(model, "mixed_bfloat16"),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_casts_of_weights_are_shown_apart(loss: Any) -> None:
    report = audit(loss, PARAMS, TOKENS)
    assert report.param_copy_bytes == WEIGHTS
    assert report.residual_bytes > WEIGHTS
    more = audit(loss, PARAMS, jnp.zeros(80, jnp.int32))
    assert more.param_copy_bytes == WEIGHTS  # the same for each batch size
    kept = more.residual_bytes - WEIGHTS, report.residual_bytes - WEIGHTS
    assert kept[0] == pytest.approx(10 * kept[1], rel=0.01)


def test_params_that_are_used_as_they_are_have_no_copies() -> None:
    assert audit(model, PARAMS, TOKENS).param_copy_bytes == 0
    assert audit(jax.checkpoint(cast), PARAMS, TOKENS).param_copy_bytes == 0


def test_casts_of_inputs_and_what_is_laid_out_are_activations() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = x.astype(BF16) @ w["kernel"].astype(BF16)
        laid_out = jnp.broadcast_to(w["scale"], (64, 8)).astype(BF16)
        return jnp.sum((jnp.sin(h) * laid_out).astype(F32))

    params = {"kernel": jnp.ones((16, 8)), "scale": jnp.ones(8)}
    report = audit(loss, params, jnp.ones((64, 16)))
    # A weight that meets data is needed in a backward pass for the gradient of the data only.
    assert report.param_copy_bytes == 0
    assert {row.kind for row in report.residuals or ()} == {"activations"}


def test_the_check_and_the_table_say_how_much_it_is() -> None:
    report = audit(cast, PARAMS, TOKENS)
    assert f"of which {WEIGHTS / 1024:.1f} KiB copies of" in str(report)
    with pytest.raises(AuditError, match=rf"pass, {WEIGHTS:,} of them copies of params") as caught:
        report.check(residual_bytes=WEIGHTS)
    assert f"{WEIGHTS:,} bytes  bfloat16 params  at " in str(caught.value)
    assert report.check(residual_bytes=report.residual_bytes) is report
    with pytest.raises(ValueError, match="no residuals"):
        _ = audit(jnp.sin, jnp.ones(3)).param_copy_bytes
