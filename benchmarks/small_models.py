"""Small losses of many kinds: what they compute differs more than what they predict.

Each is `loss(params, batch)` of plain JAX, in float32, and is here for an operation that the larger
models lack: a determinant of the shape of errors, as running sums, exponentials of large numbers,
divisions by norms, or derivatives inside of the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_WIDTH, _BATCH = 32, 64


class SmallModel(NamedTuple):
    """A loss with its params and its batch.

    Attributes:
      loss: `loss(params, batch)`.
      params: float32 params.
      batch: float32 inputs and targets.
    """

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any


def _weights(count: int, *, scale: float = 1.0, width: int = _WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(2), count)
    return [scale * jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def _batch(length: int | None = None) -> Any:
    x, y = jax.random.split(jax.random.key(1))
    shape = (_BATCH, _WIDTH) if length is None else (_BATCH // 4, length, _WIDTH)
    return {"x": jax.random.normal(x, shape), "y": jax.random.normal(y, shape)}


def _squares(prediction: Any, batch: Any) -> Any:
    return jnp.mean((prediction - batch["y"]) ** 2)


def _classes(batch: Any) -> Any:
    return jnp.argsort(batch["y"][..., 0]).argsort() % _WIDTH


def _feed_forward(activation: Callable[[Any], Any]) -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for w in params[:-1]:
            h = activation(h @ w)
        return _squares(h @ params[-1], batch)

    return SmallModel(loss, _weights(4), _batch())


def _residual() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for w in params:
            mean, variance = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
            h = h + jax.nn.gelu((h - mean) * jax.lax.rsqrt(variance + 1e-5) @ w)
        return _squares(h, batch)

    return SmallModel(loss, _weights(6), _batch())


def _scanned() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + 0.3 * jnp.tanh(h @ w), None

        return _squares(jax.lax.scan(layer, batch["x"], params)[0], batch)

    return SmallModel(loss, jnp.stack(_weights(8)), _batch())


def _recurrent() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            z, r = jax.nn.sigmoid(x @ params[0] + h @ params[1]), jax.nn.sigmoid(x @ params[2])
            h = (1 - z) * h + z * jnp.tanh(x @ params[3] + (r * h) @ params[4])
            return h, h

        x = jnp.swapaxes(batch["x"], 0, 1)
        states = jax.lax.scan(turn, jnp.zeros_like(x[0]), x)[1]
        return _squares(jnp.swapaxes(states, 0, 1), batch)

    return SmallModel(loss, _weights(5), _batch(12))


def _linear_recurrence() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        decay = jax.nn.sigmoid(batch["x"] @ params[0])
        inputs = (1 - decay) * (batch["x"] @ params[1])

        def both(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        states = jax.lax.associative_scan(both, (decay, inputs), axis=1)[1]
        return _squares(states @ params[2], batch)

    return SmallModel(loss, _weights(3), _batch(12))


def _autoencoder() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        code = jnp.tanh(batch["x"] @ params[0])[:, :16]
        return jnp.mean((jnp.tanh(code @ params[1][:16]) @ params[2] - batch["x"]) ** 2)

    return SmallModel(loss, _weights(3), _batch())


def _variational() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        mean, log_variance = batch["x"] @ params[0], batch["x"] @ params[1]
        code = mean + jnp.exp(0.5 * log_variance) * batch["y"]
        divergence = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - log_variance - 1)
        return jnp.mean((code @ params[2] - batch["x"]) ** 2) + 0.1 * divergence

    return SmallModel(loss, _weights(3), _batch())


def _convolutional() -> SmallModel:
    def convolution(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"][:, :8, None, :] * batch["x"][:, None, :8, :]
        for w in params[:2]:
            h = convolution(h, jnp.stack([w, w.T, -w]).reshape(3, 1, _WIDTH, _WIDTH))
            h = (h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-5)
            h = jax.nn.relu(h)
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.mean((1, 2)) @ params[2]
        labels = _classes({"y": batch["y"][:, 0]})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return SmallModel(loss, _weights(3), _batch(12))


def _classifier(scale: float) -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        logits = jax.nn.relu(batch["x"] @ params[0]) @ params[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, _classes(batch)).mean()

    return SmallModel(loss, _weights(2, scale=scale), _batch())


def _attention() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        q, k, v = (batch["x"] @ w for w in params[:3])
        scores = jnp.einsum("btd,bsd->bts", q, k) / _WIDTH**0.5
        return _squares(jax.nn.softmax(4 * scores) @ v @ params[3], batch)

    return SmallModel(loss, _weights(4), _batch(12))


def _mixer() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for tokens, channels in zip(params[:2], params[2:], strict=True):
            h = h + jnp.einsum("btd,ts->bsd", h, tokens[:12, :12])
            h = h + jax.nn.silu(h @ channels)
        return _squares(h, batch)

    return SmallModel(loss, _weights(4), _batch(12))


def _contrastive() -> SmallModel:
    def unit(x: Any) -> Any:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Any, batch: Any) -> Any:
        one, two = unit(batch["x"] @ params[0]), unit(jnp.tanh(batch["x"] @ params[1]))
        return optax.softmax_cross_entropy_with_integer_labels(
            one @ two.T / 0.1, jnp.arange(len(one))
        ).mean()

    return SmallModel(loss, _weights(2), _batch())


def _periodic() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h = jnp.sin(3 * batch["x"] @ params[0])
        return _squares(jnp.sin(3 * h @ params[1]) @ params[2], batch)

    return SmallModel(loss, _weights(3), _batch())


def _differential() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        def field(x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2]

        value, slope = jax.jvp(field, (batch["x"],), (jnp.ones_like(batch["x"]),))
        return jnp.mean((slope + 0.5 * value - batch["y"]) ** 2)

    return SmallModel(loss, _weights(3), _batch())


def _graph() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h, sources = batch["x"], (7 * jnp.arange(4 * _BATCH)) % _BATCH
        targets = (jnp.arange(4 * _BATCH) * 13 + 5) % _BATCH
        for w in params:
            messages = jax.ops.segment_sum((h @ w)[sources], targets, _BATCH)
            h = jax.nn.relu(h + messages / 2)
        return _squares(h, batch)

    return SmallModel(loss, _weights(3), _batch())


def _factors() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((params[0] @ params[1].T - batch["x"][:_WIDTH]) ** 2)

    return SmallModel(loss, _weights(2), _batch())


def _mixture() -> SmallModel:
    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params[0])
        weights, means = jax.nn.log_softmax(h @ params[1]), h @ params[2]
        distances = -0.5 * (batch["y"][:, :1] - means) ** 2
        return -jnp.mean(jax.nn.logsumexp(weights + distances, axis=-1))

    return SmallModel(loss, _weights(3), _batch())


SMALL_MODELS: dict[str, Callable[[], SmallModel]] = {
    "tanh": lambda: _feed_forward(jnp.tanh),
    "relu": lambda: _feed_forward(jax.nn.relu),
    "residual": _residual,
    "scanned": _scanned,
    "GRU": _recurrent,
    "linear recurrence": _linear_recurrence,
    "autoencoder": _autoencoder,
    "variational": _variational,
    "convolutional": _convolutional,
    "classifier": lambda: _classifier(1.0),
    "attention": _attention,
    "mixer": _mixer,
    "contrastive": _contrastive,
    "periodic": _periodic,
    "differential": _differential,
    "graph": _graph,
    "factors": _factors,
    "mixture": _mixture,
}
