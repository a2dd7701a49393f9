"""References in plain Python and NumPy float64, written without looking at the library."""

from collections.abc import Iterable, Iterator

import numpy as np


def dynamic_scale_trace(
    overflows: Iterable[bool],
    *,
    scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    consecutive_hysteresis: bool,
) -> Iterator[tuple[float, int, int]]:
    """(scale, growth count, hysteresis left) after each step of a dynamic loss scale."""
    count, left = 0, hysteresis
    for overflow in overflows:
        if overflow:
            count = 0
            left -= 1
            if left <= 0:
                scale = max(float(np.float32(scale * backoff_factor)), min_scale)
        else:
            count += 1
            if consecutive_hysteresis:
                left = hysteresis
            if count == growth_interval:
                count = 0
                left = hysteresis
                with np.errstate(over="ignore"):
                    grown = float(np.float32(scale * growth_factor))
                if np.isfinite(grown):
                    scale = min(grown, max_scale)
        yield scale, count, left


def adamw(
    params: np.ndarray,
    grads: Iterable[np.ndarray],
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> np.ndarray:
    """AdamW in float64 (Loshchilov and Hutter, 2019)."""
    params = params.astype(np.float64)
    m, v = np.zeros_like(params), np.zeros_like(params)
    for t, grad in enumerate(grads, start=1):
        grad = grad.astype(np.float64)
        m = b1 * m + (1 - b1) * grad
        v = b2 * v + (1 - b2) * grad**2
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        params = params - learning_rate * (step + weight_decay * params)
    return params


def mlp_loss_and_grads(
    params: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean squared error of a tanh MLP, and its gradients by hand, in float64."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    error = hidden @ p["w2"] + p["b2"] - y
    d_out = 2 * error / error.size
    d_hidden = (d_out @ p["w2"].T) * (1 - hidden**2)
    grads = {
        "w1": x.T @ d_hidden,
        "b1": d_hidden.sum(0),
        "w2": hidden.T @ d_out,
        "b2": d_out.sum(0),
    }
    return float(np.mean(error**2)), grads
