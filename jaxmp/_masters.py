"""The float32 masters of all params: the params themselves, or what is kept beside them."""

import dataclasses
import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree

from jaxmp._dtypes import at_least_float32, is_floating, is_narrow
from jaxmp._master_storages import STORAGES, MasterStorage, NoMaster, Stored
from jaxmp._rounding import round_finite
from jaxmp._tree import leaf_names, widen


class LiveAndMaster(NamedTuple):
    """Live params, and what is kept beside them, in the same structure."""

    params: PyTree
    master: PyTree


@dataclasses.dataclass(frozen=True)
class Masters:
    """The masters of a tree of params. A float32 (or wider) leaf is its own master.

    `master` has the structure of the params, with `optax.MaskedNode()` where nothing is kept.

    Args:
      name: how that of a narrow param is kept, a key of `STORAGES`.
    """

    name: str

    @property
    def storage(self) -> MasterStorage:
        """How that of a narrow param is kept."""
        return STORAGES[self.name]

    def kind(self, params: PyTree) -> dict[str, Int32[Array, ""]] | Int32[Array, ""]:
        """An entry whose name tells apart trees of params and masters that are stored differently.

        Args:
          params: the live params, or what has their dtypes.

        Returns:
          By the dtypes of the params, and how masters are kept if there are any, the number of
          params. Where there are no params, the number alone: optax's tools have a placeholder
          instead, whose state has to fit that of any params.

        >>> Masters("remainder").kind({"w": jnp.bfloat16(0)})
        {'bfloat16-remainder': Array(1, dtype=int32)}
        """
        dtypes = [x.dtype for x in jax.tree.leaves(params)]
        count = jnp.int32(len(dtypes))
        parts = sorted({dtype.name for dtype in dtypes})
        if any(map(is_narrow, dtypes)):
            parts.append(self.name)
        if len(set(dtypes)) > 1:  # which param has which
            order = " ".join(dtype.name for dtype in dtypes)
            parts.append(f"{zlib.crc32(order.encode()):08x}")
        return {"-".join(parts): count} if dtypes else count

    def first(self, values: PyTree, params: PyTree, moved: PyTree) -> LiveAndMaster:
        """Live params and what is kept, for masters that start as `values`.

        Args:
          values: the first masters, rounded or not.
          params: tells the dtypes of the live params.
          moved: for each leaf whether the optimizer ever moves it; others need no master.
        """
        names = jax.tree.unflatten(jax.tree.structure(params), leaf_names(params))

        def first(value: Any, param: Any, moves: bool, name: str) -> Stored:
            if not is_narrow(param.dtype) or not is_floating(value):
                return Stored(value.astype(param.dtype), optax.MaskedNode())
            storage = self.storage if moves else NoMaster()
            try:
                wide = value.astype(at_least_float32(param.dtype))
                return storage.first(wide, param.dtype)
            except TypeError as error:
                raise TypeError(f"params, leaf {name!r}, {error}") from None

        return _transposed(jax.tree.map(first, values, params, moved, names))

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """The float32 masters, which follow params that were set from outside."""

        def load(param: Any, kept: Any) -> Any:
            return widen(param) if is_masked(kept) else self.storage.load(param, kept)

        return jax.tree.map(load, params, master)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def store(self, values: PyTree, params: PyTree, master: PyTree) -> LiveAndMaster:
        """Params and what is kept for the new masters; the old ones tell the dtypes."""

        def store(value: Any, param: Any, kept: Any, number: int) -> Stored:
            if is_masked(kept):
                return Stored(round_like(value, param), kept)
            return self.storage.store(value, param.dtype, kept, number)

        leaves, structure = jax.tree.flatten(params)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        return _transposed(jax.tree.map(store, values, params, master, numbers))


def _transposed(stored: PyTree) -> LiveAndMaster:
    def each(field: str) -> PyTree:
        def is_stored(x: Any) -> bool:
            return isinstance(x, Stored)

        return jax.tree.map(lambda x: getattr(x, field), stored, is_leaf=is_stored)

    return LiveAndMaster(each("param"), each("master"))


def is_masked(x: Any) -> bool:
    """Whether nothing is kept beside a param."""
    return isinstance(x, optax.MaskedNode)


def round_like(values: PyTree, params: PyTree) -> PyTree:
    """Values in the dtypes of params; what is beyond a narrow one becomes its largest value."""

    def round_leaf(value: Any, param: Any) -> Any:
        narrow = is_narrow(param.dtype) and is_floating(value)
        return round_finite(value, param.dtype) if narrow else value.astype(param.dtype)

    return jax.tree.map(round_leaf, values, params)
