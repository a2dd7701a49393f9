"""Draws the picture of docs/autocast.md: lines of a model, their kinds and dtypes.

Each line is run under autocast, and the dtype in the picture is the one that came out:

    python docs/draw_autocast.py
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import jaxmp

COLORS = {"weak": "#9aa5b1", "low": "#2f80ed", "high": "#eb5757", "firm": "#8e44ad"}
# What is computed, by which name, its kind. What is lifted is low, in float32 for now.
LINES = [
    ("x", "p['table'][tokens] + p['position']", "weak"),
    ("n", "norm(x) * p['scale']", "weak"),
    ("q", "n @ p['q']", "low"),
    ("k", "n @ p['k']", "low"),
    ("s", "q @ k.mT / 4.0", "low"),
    ("a", "jax.nn.softmax(s)", "high"),
    ("x", "x + a @ (n @ p['v'])", "low"),
    ("n", "norm(x) * p['scale']", "low, lifted"),
    ("h", "jax.nn.gelu(n @ p['up'] + p['bias'])", "low"),
    ("x", "x + h @ p['down']", "low"),
    ("l", "jax.nn.log_softmax(x @ p['head'])", "high"),
    ("l", "-l[..., 0].mean()", "high"),
    ("g", "jax.grad(lambda w: jnp.sum((x @ w) ** 2))(p['head'])", "weak"),
    ("w", "p['head'] - 0.1 * g", "weak"),
    ("d", "data + jnp.tanh(data @ p['q'])", "firm"),
]


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        x.var(-1, keepdims=True) + 1e-6
    )


def dtype_of(count: int, args: tuple[Any, ...]) -> str:
    """The dtype of the last of so many lines, as autocast leaves it."""

    def fun(p: Any, tokens: Any, data: Any) -> Any:
        names = {
            "p": p,
            "tokens": tokens,
            "data": data,
            "jax": jax,
            "jnp": jnp,
            "norm": norm,
        }
        for name, code, _ in LINES[:count]:
            names[name] = eval(code, names)
        return names[LINES[count - 1][0]]

    computed = jaxmp.autocast(fun, "mixed_bfloat16", output="computed")
    return str(jax.eval_shape(computed, *args).dtype)


def arguments() -> tuple[Any, ...]:
    square = jnp.eye(16)
    p = dict.fromkeys(["table", "q", "k", "v", "up", "down", "head"], square)
    p |= {"position": jnp.ones((4, 16)), "scale": jnp.ones(16), "bias": jnp.ones(16)}
    return p, jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4, 16))


def draw() -> Any:
    args = arguments()
    figure, axes = plt.subplots(figsize=(9.5, 5.6))
    axes.axis("off")
    for i, (name, code, kind) in enumerate(LINES):
        dtype, color = dtype_of(i + 1, args), COLORS[kind.split(",")[0]]
        if (dtype == "bfloat16") != (kind == "low"):
            raise ValueError(f"{name} = {code} is {kind}, and came out as {dtype}")
        box = {"facecolor": color, "edgecolor": "none", "boxstyle": "round,pad=0.3"}
        mono: dict[str, Any] = {"family": "monospace", "fontsize": 10.5, "va": "center"}
        axes.text(0, -i, f"{name} = {code}", **mono)
        axes.text(10.6, -i, f"{kind:^11s}", color="white", bbox=box, **mono)
        axes.text(12.8, -i, dtype, color=color, **mono)
    axes.set(xlim=(-0.2, 15), ylim=(-len(LINES) + 0.4, 0.6))
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    draw().savefig(pathlib.Path(__file__).with_name("autocast.png"), dpi=130)
