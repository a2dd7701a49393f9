"""A Llama on one device: trains a small one, or plans the 8 billion params of Llama 3.

    python examples/llama.py
    python examples/llama.py --plan h100
    python examples/llama.py --plan h100 --master remainder

Params are stored in bfloat16, moments in 8 bits, and no gradients are kept: each layer is updated
where its gradient is computed. With `--plan` the whole step is compiled for devices that need not
be here (`pip install 'jaxmp[aot]'`), and the peak is what the compiler says.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import jaxmp
from jaxmp.diagnostics import memory_plan

Params = dict[str, Any]
CHUNK = 256  # rows of attention, and tokens of the loss, that are computed at one time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shapes of a Llama; the defaults are those of Llama 3 8B."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8  # of keys and values
    head: int = 128
    vocabulary: int = 128256
    theta: float = 500000.0


SMALL = Config(layers=4, width=128, hidden=256, heads=4, groups=2, head=32, vocabulary=256)


def init(key: Array, config: Config) -> Params:
    """Params in bfloat16; those of the layers are stacks along the first axis."""
    c = config
    shapes = {
        "q": (c.layers, c.width, c.heads * c.head),
        "k": (c.layers, c.width, c.groups * c.head),
        "v": (c.layers, c.width, c.groups * c.head),
        "o": (c.layers, c.heads * c.head, c.width),
        "gate": (c.layers, c.width, c.hidden),
        "up": (c.layers, c.width, c.hidden),
        "down": (c.layers, c.hidden, c.width),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))

    def normal(*shape: int) -> Array:
        return (jax.random.normal(next(keys), shape) / shape[-2] ** 0.5).astype(jnp.bfloat16)

    layers = {name: normal(*shape) for name, shape in shapes.items()}
    scales = {name: jnp.ones((c.layers, c.width), jnp.bfloat16) for name in ("norm1", "norm2")}
    return {
        "embedding": normal(c.vocabulary, c.width),
        "layers": layers | scales,
        "norm": jnp.ones(c.width, jnp.bfloat16),
        "head": normal(c.vocabulary, c.width) / 10,
    }


def normalized(x: Array, scale: Array) -> Array:
    """The root mean square norm."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def rotated(x: Array, theta: float) -> Array:
    """The rotary embedding of positions: (T, heads, head) -> (T, heads, head)."""
    frequencies = theta ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of grouped heads, by chunks of rows, which the backward pass recomputes."""
    length, heads, head = q.shape
    rows = min(CHUNK, length)

    @jax.checkpoint
    def chunk(number: Array, q: Array) -> Array:
        scores = jnp.einsum("rgnh,tgh->gnrt", q, k, preferred_element_type=jnp.float32)
        positions = number * rows + jnp.arange(rows)
        past = positions[:, None] >= jnp.arange(length)
        weights = jax.nn.softmax(jnp.where(past, scores * head**-0.5, -1e30)).astype(q.dtype)
        return jnp.einsum("gnrt,tgh->rgnh", weights, v)

    chunks = q.reshape(length // rows, rows, k.shape[1], heads // k.shape[1], head)
    mixed = lax.map(lambda x: chunk(*x), (jnp.arange(len(chunks)), chunks))
    return mixed.reshape(length, heads * head)


def block(x: Array, p: Params, config: Config) -> Array:
    """One layer: (T, width) -> (T, width)."""
    length, head = x.shape[0], config.head
    h = normalized(x, p["norm1"])
    q = rotated((h @ p["q"]).reshape(length, config.heads, head), config.theta)
    k = rotated((h @ p["k"]).reshape(length, config.groups, head), config.theta)
    v = (h @ p["v"]).reshape(length, config.groups, head)
    x = x + attention(q, k, v) @ p["o"]
    h = normalized(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss_of(params: Params, tokens: Array, config: Config) -> Array:
    """The mean cross entropy of each next token, float32."""
    x = params["embedding"][tokens[:-1]]
    layer = jax.checkpoint(lambda x, p: (block(x, p, config), None))
    x, _ = lax.scan(layer, x, params["layers"])
    x = normalized(x, params["norm"])

    @jax.checkpoint
    def chunk(x: Array, labels: Array) -> Array:
        logits = (x @ params["head"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    rows = min(CHUNK, len(x))
    chunks = x.reshape(-1, rows, config.width), tokens[1:].reshape(-1, rows)
    return lax.map(lambda x: chunk(*x), chunks).sum() / len(x)


def optimizer(args: argparse.Namespace, rate: float) -> jaxmp.MixedPrecision:
    """AdamW, or Lion with one moment, on params of bfloat16."""
    update = optax.lion(rate / 3) if args.optimizer == "lion" else optax.adamw(rate, b2=0.95)
    return jaxmp.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), update),
        "params=bfloat16,compute=bfloat16,output=float32",
        master=args.master,
        moments=args.moments,
    )


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains a small Llama, or prints a plan of a large one; returns the losses."""
    parser = argparse.ArgumentParser(description="A Llama on one device.")
    add = parser.add_argument
    add("--plan", nargs="+", metavar="DEVICE", default=[], help="plan 8B for these devices")
    add("--master", choices=["remainder", "stochastic"], default="stochastic")
    add("--moments", choices=["float32", "bfloat16", "int8"], default="int8")
    add("--optimizer", choices=["adamw", "lion"], default="adamw")
    add("--gradients", choices=["buffered", "released"], default="released")
    add("--tokens", type=int, default=2048, help="tokens of one step of the plan")
    add("--steps", type=int, default=60, help="steps of training")
    args = parser.parse_args(argv)
    for device in args.plan:
        shapes = jax.eval_shape(lambda key: init(key, Config()), jax.random.key(0))
        plan = memory_plan(
            shapes,
            optimizer(args, 3e-4),
            lambda params, tokens: loss_of(params, tokens, Config()),
            jax.ShapeDtypeStruct((args.tokens + 1,), jnp.int32),
            device=device,
            recompute="never",  # the model has its own checkpoints
            gradients=args.gradients,
        )
        print(plan)
    return [] if args.plan else train(args)


def train(args: argparse.Namespace) -> list[float]:
    """Trains on the text of this file."""
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    tx = optimizer(args, 3e-3)
    state = jaxmp.TrainState.create(params=init(jax.random.key(0), SMALL), tx=tx)
    step = jaxmp.make_train_step(
        lambda params, tokens: loss_of(params, tokens, SMALL),
        recompute="never",
        gradients=args.gradients,
    )
    starts = np.random.default_rng(0).integers(0, len(text) - 513, args.steps)
    losses = []
    for start in starts:
        state, metrics = step(state, text[start : start + 513])
        losses.append(float(metrics["loss"]))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {args.steps} steps")
    return losses


if __name__ == "__main__":
    main()
