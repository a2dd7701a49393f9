"""Losses that say how arrays lie on explicit mesh axes, in every construct that JAX has for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
ROWS = P("data", None)
WIDTH, EXAMPLES = 32, 64

Body = Callable[[Any, Any, Any, Any], Any]


def placed(x: Any, spec: P = ROWS) -> Any:
    return jax.reshard(x, spec)


def dot(x: Any, w: Any) -> Any:
    return jnp.dot(x, w, out_sharding=ROWS)


def layer(h: Any, w: Any) -> Any:
    return placed(jnp.tanh(dot(h, w)))


@jax.custom_vjp
def own_gradient(x: Any, w: Any) -> Any:
    return dot(x, w)


def _forward(x: Any, w: Any) -> Any:
    return own_gradient(x, w), (x, w)


def _backward(kept: Any, g: Any) -> Any:
    x, w = kept
    return dot(g, w.T), jnp.einsum("bi,bj->ij", x, g, out_sharding=P(None, None))


own_gradient.defvjp(_forward, _backward)


@jax.custom_jvp
def own_tangent(x: Any) -> Any:
    return placed(jnp.sin(x))


@own_tangent.defjvp
def _tangent(primals: Any, tangents: Any) -> Any:
    return own_tangent(*primals), placed(jnp.cos(*primals)) * tangents[0]


def _turns(body: Callable[[Any, Any], Any], h: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (body(h, w), None), h, None, length=3)[0]


def _mapped(mesh: Mesh | None) -> Body:
    def body(w: Any, v: Any, b: Any, x: Any) -> Any:
        specs = (P("data"), P())
        made = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=specs, out_specs=P("data"))(x, w)
        return placed(jnp.tanh(made)) @ v

    return body


def _parts(w: Any, v: Any, b: Any, x: Any) -> Any:
    heads = lax.reshape(layer(x, w), (EXAMPLES, 4, 8), out_sharding=P("data", None, None))
    return heads.reshape(EXAMPLES, WIDTH) @ v


# Each is given two weights, a bias and the batch, in bfloat16.
BODIES: dict[str, Body] = {
    "products": lambda w, v, b, x: placed(jnp.tanh(dot(x, w) + b)) @ v,
    "scan": lambda w, v, b, x: _turns(layer, x, w) @ v,
    "checkpoint": lambda w, v, b, x: jax.checkpoint(layer)(x, w) @ v,
    "scan of checkpoints": lambda w, v, b, x: _turns(jax.checkpoint(layer), x, w) @ v,
    "cond": lambda w, v, b, x: lax.cond(x.sum() > 0, layer, lambda h, w: placed(h @ w), x, w) @ v,
    "jit": lambda w, v, b, x: jax.jit(layer)(x, w) @ v,
    "fori_loop": lambda w, v, b, x: (
        lax.fori_loop(0, 3, lambda i, h: placed(jnp.tanh(h)), x) @ w @ v
    ),
    "custom_vjp": lambda w, v, b, x: jnp.tanh(own_gradient(x, w)) @ v,
    "custom_jvp": lambda w, v, b, x: own_tangent(dot(x, w)) @ v,
    "relu": lambda w, v, b, x: jax.nn.relu(dot(x, w)) @ v,
    "vmap": lambda w, v, b, x: jax.vmap(lambda row: jnp.tanh(row @ w))(placed(x)) @ v,
    "einsum": lambda w, v, b, x: jnp.einsum("bi,ij->bj", x, w, out_sharding=ROWS) @ v,
    "reshape": _parts,
    "lookup": lambda w, v, b, x: w.at[jnp.arange(EXAMPLES) % WIDTH].get(out_sharding=ROWS) * x @ v,
    "shard_map": _mapped(None),
    "shard_map over a mesh": _mapped(MESH),
}


def loss_of(name: str) -> Callable[[Any, Any], Any]:
    """A loss that gathers its params by hand, before it casts them."""

    def loss(params: Any, x: Any) -> Any:
        gathered = [jax.reshard(p, P(*[None] * p.ndim)) for p in params]
        low = [p.astype(jnp.bfloat16) for p in gathered]
        out = BODIES[name](*low, x.astype(jnp.bfloat16))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return loss
