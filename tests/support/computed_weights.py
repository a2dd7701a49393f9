"""Losses whose weights are computed from params, by kind.

The gradient of such a weight is a sum over the batch that meets the next product, and not the
optimizer. So a cast reads it, or an operand of a product.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, RANK, ROWS, TURNS = 128, 16, 512, 400
D, R = WIDTH, RANK
Low = Callable[[Any], Any]
Weight = Callable[[Any, Low], Any]


class Kind(NamedTuple):
    """A loss.

    Attributes:
      shapes: those of its params.
      loss: `(params, batch, low)`, with `low` a cast of what is multiplied; a batch of rows and of
        integers.
    """

    shapes: dict[str, tuple[int, ...]]
    loss: Callable[[Any, Any, Low], Any]

    def params(self) -> dict[str, np.ndarray]:
        """Random params, about as large as makes results of size 1."""
        draws = np.random.default_rng(0)
        return {
            name: (draws.normal(size=shape) / max(shape) ** 0.5).astype(np.float32)
            for name, shape in self.shapes.items()
        }


def batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Random rows, and an integer below WIDTH for each."""
    draws = np.random.default_rng(1)
    x = draws.normal(size=(rows, D)).astype(np.float32)
    return {"x": x, "ids": draws.integers(0, D, rows).astype(np.int32)}


def _total(y: Any) -> Any:
    return jnp.sum(jnp.sin(y).astype(jnp.float32))


def _norm(w: Any) -> Any:
    return jnp.sqrt(jnp.sum(jnp.square(w), 0, keepdims=True) + 1e-6)


_AB = {"a": (D, R), "b": (R, D)}
_GRID = np.linspace(-1, 1, 4 * D, dtype=np.float32).reshape(D, 4)
_MASK = np.tri(D, dtype=bool)
_ORDER = np.random.default_rng(2).permutation(D)
_EYE = np.eye(D, dtype=np.float32)


def _orthogonalized(w: Any, low: Low) -> Any:
    def turn(_: Any, w: Any) -> Any:
        return 1.5 * w - 0.5 * (w @ (w.T @ w))

    return lax.fori_loop(0, 3, turn, low(w / 4))


def _spectral(w: Any) -> Any:
    v = w.T @ (np.ones(D, np.float32) @ w.T)
    return w / (jnp.sqrt(jnp.sum(jnp.square(w @ v)) / jnp.sum(jnp.square(v))) + 1e-3)


@jax.custom_jvp
def _scaled(x: Any) -> Any:
    return x * 2


@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    return _scaled(*primals), tangents[0] * 2


@jax.custom_jvp
def _multiplied(a: Any, b: Any) -> Any:
    return a @ b


@_multiplied.defjvp
def _multiplied_jvp(primals: Any, tangents: Any) -> Any:
    return _multiplied(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]


@jax.custom_vjp
def _in_16_bits(a: Any, b: Any) -> Any:
    return _low_product(a, b)


def _low_product(a: Any, b: Any) -> Any:
    return (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32)


_in_16_bits.defvjp(
    lambda a, b: (_in_16_bits(a, b), (a, b)),
    lambda kept, g: (_low_product(g, kept[1].T), _low_product(kept[0].T, g)),
)


def _merged(p: Any, low: Low) -> Any:
    # If the weight were trained too, its gradient would be read twice: the sum would be float32.
    return low(lax.stop_gradient(p["w"])) + low(p["a"]) @ low(p["b"])


# Weights of WIDTH x WIDTH, with the shapes of their params.
_WEIGHTS: dict[str, tuple[dict[str, tuple[int, ...]], Weight]] = {
    "lora": (_AB | {"w": (D, D)}, _merged),
    "lora, merged in float32": (
        _AB | {"w": (D, D)},
        lambda p, low: low(lax.stop_gradient(p["w"]) + p["a"] @ p["b"]),
    ),
    "factors": (_AB, lambda p, low: low(p["a"]) @ low(p["b"])),
    "factors, in float32": (_AB, lambda p, low: low(p["a"] @ p["b"])),
    "three factors": (
        _AB | {"c": (R, R)},
        lambda p, low: low(p["a"]) @ low(p["c"]) @ low(p["b"]),
    ),
    "singular values": (_AB | {"s": (R,)}, lambda p, low: low(p["a"]) * low(p["s"]) @ low(p["b"])),
    "dora": (
        _AB | {"w": (D, D), "m": (D,)},
        lambda p, low: low(p["m"]) * (v := _merged(p, low)) / _norm(v),
    ),
    "weight norm": (
        {"v": (D, D), "g": (D,)},
        lambda p, low: low(p["g"]) * low(p["v"]) / _norm(low(p["v"])),
    ),
    "spectral norm": ({"w": (D, D)}, lambda p, low: _spectral(low(p["w"]))),
    "spectral norm, in float32": ({"w": (D, D)}, lambda p, low: low(_spectral(p["w"]))),
    "orthogonalized": ({"w": (D, D)}, lambda p, low: _orthogonalized(p["w"], low)),
    "orthogonalized, in float32": (
        {"w": (D, D)},
        lambda p, low: low(_orthogonalized(p["w"], lambda w: w)),
    ),
    "hypernetwork": (
        {"z": (D, R), "h": (R, R), "o": (R, D)},
        lambda p, low: jnp.tanh(low(p["z"]) @ low(p["h"])) @ low(p["o"]),
    ),
    "flat hypernetwork": (
        {"z": (1, R), "o": (R, D * D)},
        lambda p, low: (low(p["z"]) @ low(p["o"])).reshape(D, D),
    ),
    "generated from coordinates": (
        {"h": (4, R), "o": (R, D)},
        lambda p, low: jnp.sin(low(jnp.asarray(_GRID)) @ low(p["h"])) @ low(p["o"]),
    ),
    "kronecker": (
        {"a": (8, 8), "b": (D // 8, D // 8), "c": (D, D)},
        lambda p, low: jnp.kron(low(p["a"]), low(p["b"])) @ low(p["c"]),
    ),
    "tensor train": (
        {"a": (8, R, R), "b": (R, D // 8, D)},
        lambda p, low: jnp.einsum("irs,sjd->rijd", low(p["a"]), low(p["b"])).sum(0).reshape(D, D),
    ),
    "symmetric": (_AB, lambda p, low: low(p["a"]) @ low(p["a"]).T),
    "transposed": (_AB, lambda p, low: (low(p["a"]) @ low(p["b"])).T),
    "masked": (_AB, lambda p, low: jnp.where(_MASK, low(p["a"]) @ low(p["b"]), 0)),
    "clipped": (_AB, lambda p, low: jnp.clip(low(p["a"]) @ low(p["b"]), -1, 1)),
    "sorted": ({"w": (D, D)}, lambda p, low: jnp.sort(low(p["w"]), 0)),
    "permuted": (_AB, lambda p, low: (low(p["a"]) @ low(p["b"]))[_ORDER]),
    "adapters": (
        {"a": (4, D, R), "b": (4, R, D)},
        lambda p, low: jnp.einsum("kir,kro->io", low(p["a"]), low(p["b"])),
    ),
    "concatenated": (
        {"a": (D, R), "b": (R, D // 2), "c": (R, D // 2)},
        lambda p, low: jnp.concatenate([low(p["a"]) @ low(p["b"]), low(p["a"]) @ low(p["c"])], 1),
    ),
    "in a jit": (_AB, lambda p, low: jax.jit(lambda a, b: a @ b)(low(p["a"]), low(p["b"]))),
    "in a checkpoint": (
        _AB,
        lambda p, low: jax.checkpoint(lambda a, b: low(a) @ low(b))(p["a"], p["b"]),
    ),
    "in a branch": (
        _AB | {"w": (D, D)},
        lambda p, low: lax.cond(
            p["w"][0, 0] > 0, lambda: low(p["a"]) @ low(p["b"]), lambda: low(p["w"])
        ),
    ),
    "with its own derivative": (_AB, lambda p, low: _scaled(low(p["a"]) @ low(p["b"]))),
    "product with its own tangent": (_AB, lambda p, low: low(_multiplied(p["a"], p["b"]))),
    "product with its own backward pass": (_AB, lambda p, low: low(_in_16_bits(p["a"], p["b"]))),
    "cayley": (
        {"a": (D, D), "w": (D, D)},
        lambda p, low: (
            low(jnp.linalg.solve(_EYE + (s := p["a"] - p["a"].T), _EYE - s)) @ low(p["w"])
        ),
    ),
}


def _dense(weight: Weight) -> Callable[[Any, Any, Low], Any]:
    return lambda p, b, low: _total(low(b["x"]) @ weight(p, low))


def _layers(p: Any, b: Any, low: Low) -> Any:
    def layer(x: Any, each: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ _merged(each, low)), None

    return _total(lax.scan(layer, low(b["x"]), p)[0])


def _turns(p: Any, b: Any, low: Low) -> Any:
    w = _merged(p, low)

    def turn(_: Any, scale: Any) -> tuple[None, Any]:
        return None, _total(low(b["x"] * scale) @ w)

    return lax.scan(turn, None, np.linspace(0.5, 1, TURNS, dtype=np.float32))[1].sum()


def _images(x: Any) -> Any:
    return x.reshape(-1, 4, 4, D // 16)


def _convolved(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        _images(x), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _tied(p: Any, b: Any, low: Low) -> Any:
    table = low(p["a"]) @ low(p["b"])
    return _total(jnp.tanh(table[b["ids"]]) @ table.T)


def _routed(p: Any, b: Any, low: Low) -> Any:
    x, experts = low(b["x"]), jnp.einsum("kir,kro->kio", low(p["a"]), low(p["b"]))
    shares = jax.nn.softmax((x @ (low(p["r"]) @ low(p["s"]))).astype(jnp.float32))
    return _total(jnp.einsum("nk,kio,ni->no", low(shares), experts, x))


def _attended(p: Any, b: Any, low: Low) -> Any:
    q, k, v = jnp.split(low(b["x"]) @ _merged(p, low), 3, -1)
    scores = jax.nn.softmax((q[:, None] * k[:, :8, None]).astype(jnp.float32))
    return _total(low(scores).sum(1)) + _total(v)


_LOSSES: dict[str, Kind] = {
    "layers": Kind({"w": (3, D, D), "a": (3, D, R), "b": (3, R, D)}, _layers),
    "one weight in all turns": Kind(_AB | {"w": (D, D)}, _turns),
    "convolution of factors": Kind(
        {"a": (3, 3, D // 16, R), "b": (R, D // 16)},
        lambda p, b, low: _total(
            _convolved(low(b["x"]), jnp.einsum("hwir,ro->hwio", low(p["a"]), low(p["b"])))
        ),
    ),
    "convolution of factors, in float32": Kind(
        {"a": (3, 3, D // 16, R), "b": (R, D // 16)},
        lambda p, b, low: _total(
            _convolved(low(b["x"]), low(jnp.einsum("hwir,ro->hwio", p["a"], p["b"])))
        ),
    ),
    "table of factors": Kind(
        _AB, lambda p, b, low: _total((low(p["a"]) @ low(p["b"]))[b["ids"]] * low(b["x"]))
    ),
    "rows of a factor": Kind(
        _AB, lambda p, b, low: _total(low(p["a"])[b["ids"]] @ low(p["b"]) * low(b["x"]))
    ),
    "tied": Kind(_AB, _tied),
    "bias of factors": Kind(
        {"w": (D, D), "a": (1, R), "b": (R, D)},
        lambda p, b, low: _total(low(b["x"]) @ low(p["w"]) + low(p["a"]) @ low(p["b"])),
    ),
    "scale of factors": Kind(
        {"w": (D, D), "a": (1, R), "b": (R, D)},
        lambda p, b, low: _total(low(b["x"]) @ low(p["w"]) * (low(p["a"]) @ low(p["b"]))),
    ),
    "experts": Kind({"a": (4, D, R), "b": (4, R, D), "r": (D, R), "s": (R, 4)}, _routed),
    "qkv": Kind({"w": (D, 3 * D), "a": (D, R), "b": (R, 3 * D)}, _attended),
    "all in float32": Kind(_AB, lambda p, b, low: jnp.sum(jnp.sin(b["x"] @ (p["a"] @ p["b"])))),
    "sum before a product": Kind(
        {"w": (D, D)},
        lambda p, b, low: _total(
            low(jnp.sum(jnp.tanh(low(b["x"])).astype(jnp.float32), 0))[None] @ low(p["w"])
        ),
    ),
    "sum that is cast in a jit": Kind(
        {"w": (D, D)},
        lambda p, b, low: _total(
            jax.jit(lambda x: low(jnp.sum(jnp.tanh(x), 0)))(b["x"])[None] @ low(p["w"])
        ),
    ),
    "sum behind a barrier": Kind(
        {"w": (D, D)},
        lambda p, b, low: _total(
            low(lax.optimization_barrier(jnp.sum(jnp.tanh(b["x"]), 0)))[None] @ low(p["w"])
        ),
    ),
    "sum that a loop carries": Kind(
        {"w": (D, D)},
        lambda p, b, low: _total(
            lax.scan(
                lambda s, _: (s, low(s)[None] @ low(p["w"])),
                jnp.sum(jnp.tanh(b["x"]), 0),
                None,
                length=2,
            )[1]
        ),
    ),
    "sum beside a weight": Kind(
        {"w": (D, D), "v": (D,)},
        lambda p, b, low: _total(
            low(jnp.where(_MASK[3], p["v"], jnp.sum(jnp.tanh(b["x"]), 0)))[None] @ low(p["w"])
        ),
    ),
    "relu of a sum before a product": Kind(
        {"w": (D, D)},
        lambda p, b, low: _total(
            low(jax.nn.relu(jnp.sum(jnp.tanh(low(b["x"])).astype(jnp.float32), 0)))[None]
            @ low(p["w"])
        ),
    ),
}
KINDS: dict[str, Kind] = {
    name: Kind(shapes, _dense(weight)) for name, (shapes, weight) in _WEIGHTS.items()
} | _LOSSES


def by_hand(kind: str) -> Callable[[Any, Any], Any]:
    """A loss that casts to bfloat16 what it multiplies."""
    return functools.partial(KINDS[kind].loss, low=lambda x: x.astype(jnp.bfloat16))


def in_float32(kind: str) -> Callable[[Any, Any], Any]:
    """A loss without casts."""
    return functools.partial(KINDS[kind].loss, low=lambda x: x)
