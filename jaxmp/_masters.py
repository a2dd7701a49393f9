"""Where the float32 value of a low-precision param lives between steps.

A storage says what is kept beside the live params (`MixedPrecisionState.master`), how the float32
masters are had from the two, and how new masters become new params. The optimizer knows no more,
so that a storage that keeps 16 bits, or none, changes neither it nor the layout of its state.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax
from jaxtyping import PyTree

from jaxmp._dtypes import is_narrow
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

    def init(self, params: PyTree, values: PyTree) -> PyTree:
        """What to keep beside `params` for masters that start as `values`."""
        ...

    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The float32 masters."""
        ...

    def store(self, values: PyTree, params: PyTree, master: PyTree) -> Stored:
        """Params and what is kept for the new masters `values`; the old ones tell the dtypes."""
        ...


class Float32Masters:
    """Keeps a float32 copy of each param that is narrower than 32 bits."""

    def init(self, params: PyTree, values: PyTree) -> PyTree:
        """The widened values of the narrow params."""
        # A widened float32 leaf would be the param's own buffer, and could not be donated.
        return jax.tree.map(
            lambda p, v: widen(v) if is_narrow(p.dtype) else optax.MaskedNode(), params, values
        )

    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The copies where there are some, the params elsewhere."""
        return jax.tree.map(lambda p, m: p if is_masked(m) else m, params, master)

    def store(self, values: PyTree, params: PyTree, master: PyTree) -> Stored:
        """The values rounded to the dtypes of the params, and the values themselves."""
        kept = jax.tree.map(lambda v, m: m if is_masked(m) else v, values, master)
        return Stored(round_like(values, params), kept)


class NoMasters:
    """Keeps nothing: narrow params are widened for the update and rounded after it.

    Updates smaller than half a unit in the last place of the param are lost.
    """

    def init(self, params: PyTree, values: PyTree) -> PyTree:
        """Nothing for every param."""
        del values
        return jax.tree.map(lambda _: optax.MaskedNode(), params)

    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The widened params."""
        del master
        return widen(params)

    def store(self, values: PyTree, params: PyTree, master: PyTree) -> Stored:
        """The values rounded to the dtypes of the params."""
        return Stored(round_like(values, params), master)


STORAGES: dict[str, MasterStorage] = {"float32": Float32Masters(), "none": NoMasters()}


def is_masked(x: Any) -> bool:
    """Whether nothing is kept beside a param."""
    return isinstance(x, optax.MaskedNode)


def round_like(values: PyTree, params: PyTree) -> PyTree:
    """Values in the dtypes of params; what is beyond a narrow one becomes its largest value."""
    return jax.tree.map(
        lambda v, p: round_finite(v, p.dtype) if is_narrow(p.dtype) else v.astype(p.dtype),
        values,
        params,
    )
