"""How float32 masters are kept beside live params of fewer bits.

A storage says what is kept beside the live params, and how to have the float32 masters from both.
The master follows its param: where the rounded master is not the param, the param was set from
outside, and its value is the master from now on. Another storage is another class with these
methods, and an entry in `STORAGES`; the rest of the optimizer does not change.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32, PyTree

from jaxmp._dtypes import at_least_float32, is_floating, is_narrow
from jaxmp._rounding import round_finite
from jaxmp._tree import widen


class Stored(NamedTuple):
    """New live params, and what is kept beside them."""

    params: PyTree
    master: PyTree


@runtime_checkable
class MasterStorage(Protocol):
    """A way to keep float32 masters. A float32 (or wider) leaf is always its own master.

    `master` has the structure of the params, with `optax.MaskedNode()` where nothing is kept.
    """

    def init(self, params: PyTree, values: PyTree, moved: PyTree) -> PyTree:
        """What to keep beside `params` for masters that start as `values`.

        Args:
          params: the live params.
          values: the first masters, rounded or not.
          moved: for each leaf whether the optimizer ever moves it; others need no master.
        """
        ...

    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The float32 masters, which follow params that were set from outside."""
        ...

    def store(self, values: PyTree, params: PyTree, master: PyTree) -> Stored:
        """Params and what is kept for the new masters `values`; the old ones tell the dtypes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float32Masters:
    """Keeps a float32 copy of each param that is narrower than 32 bits and moves, or none.

    A narrow param without a copy is widened for the update and rounded after it: updates smaller
    than half a unit in its last place are lost.

    Args:
      copies: whether copies are kept.
    """

    copies: bool

    def init(self, params: PyTree, values: PyTree, moved: PyTree) -> PyTree:
        """The widened values of the narrow params that move."""

        def keep(param: Any, value: Any, moves: bool) -> Any:
            # A widened float32 leaf would be the param's own buffer, and could not be donated.
            kept = self.copies and moves and is_narrow(param.dtype)
            return value.astype(at_least_float32(param.dtype)) if kept else optax.MaskedNode()

        return jax.tree.map(keep, params, values, moved)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The copies where they round to the params, the widened params elsewhere."""
        return jax.tree.map(lambda p, m: widen(p) if is_masked(m) else follow(m, p), params, master)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def store(self, values: PyTree, params: PyTree, master: PyTree) -> Stored:
        """The values rounded to the dtypes of the params, and the values themselves."""
        kept = jax.tree.map(lambda v, m: m if is_masked(m) else v, values, master)
        return Stored(round_like(values, params), kept)


STORAGES: dict[str, MasterStorage] = {
    "float32": Float32Masters(copies=True),
    "none": Float32Masters(copies=False),
}


def is_masked(x: Any) -> bool:
    """Whether nothing is kept beside a param."""
    return isinstance(x, optax.MaskedNode)


def follow(
    master: Float32[Array, "*shape"], param: Float[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The master where it rounds to the param, and the widened param where it does not.

    People set params: pretrained weights, a clip after the step, an average, a restored file. An
    update made from the old master would undo that without a word.

    Args:
      master: the float32 master.
      param: the live param, of fewer bits.

    Returns:
      The master from which the next update is made. Bit for bit the old one where nothing was set.

    >>> follow(jnp.float32([1.001, 1.001]), jnp.bfloat16([1.0, 7.0]))
    Array([1.001, 7.   ], dtype=float32)
    """
    return jnp.where(same_bits(round_finite(master, param.dtype), param), master, widen(param))


def same_bits(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether two narrow floats are the same number; zero is, whatever its sign.

    As integers: floats may be compared in float32, and compilers for GPUs delete the rounding of a
    value that is widened again (openxla/xla issue 41605). Each master would seem to differ.
    """
    info = jnp.finfo(x.dtype)
    a, b = (jax.lax.bitcast_convert_type(v, f"uint{info.bits}") for v in (x, y))
    if "fnuz" in info.dtype.name:  # these have no negative zero
        return a == b
    magnitude = jnp.asarray(2 ** (info.bits - 1) - 1, a.dtype)
    return (a == b) | (((a | b) & magnitude) == 0)


def round_like(values: PyTree, params: PyTree) -> PyTree:
    """Values in the dtypes of params; what is beyond a narrow one becomes its largest value."""

    def round_leaf(value: Any, param: Any) -> Any:
        narrow = is_narrow(param.dtype) and is_floating(value)
        return round_finite(value, param.dtype) if narrow else value.astype(param.dtype)

    return jax.tree.map(round_leaf, values, params)
