"""The float32 masters of all params: the params themselves, or what is stored with them."""

import dataclasses
import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree

from jaxmp._numerics.dtypes import DType, at_least_float32, is_floating, is_narrow
from jaxmp._numerics.rounding import round_finite
from jaxmp._numerics.tree import leaf_names, widen
from jaxmp._training.master_storages import STORAGES, MasterStorage, StoredParam


class LiveAndMaster(NamedTuple):
    """Live params, and what is stored with them, in the same structure."""

    params: PyTree
    master: PyTree


@dataclasses.dataclass(frozen=True)
class Masters:
    """The masters of a tree of params. A float32 (or wider) leaf is its own master.

    `master` has the structure of the params, with `optax.MaskedNode()` where nothing is stored.

    Args:
      name: how the master of a narrow param is kept, a key of `STORAGES`.
    """

    name: str

    @property
    def storage(self) -> MasterStorage:
        """How the master of a narrow param is kept."""
        return STORAGES[self.name]

    def kind(self, params: PyTree) -> dict[str, Int32[Array, ""]] | Int32[Array, ""]:
        """Returns a count of steps, whose name says how the params and masters are stored.

        It is zero, under a name made of the dtypes of the params and, if there are masters, of how
        these are stored. Without params, zero alone.

        >>> Masters("remainder").kind({"w": jnp.bfloat16(0)})
        {'bfloat16-remainder': Array(0, dtype=int32)}
        """
        dtypes = [x.dtype for x in jax.tree.leaves(params)]
        parts = sorted({dtype.name for dtype in dtypes})
        if any(map(is_narrow, dtypes)):
            parts.append(self.name)
        # A checkpoint is restored by names, and arrays are silently cast: two models with other
        # dtypes need other names.
        if len(set(dtypes)) > 1:
            order = " ".join(dtype.name for dtype in dtypes)
            parts.append(f"{zlib.crc32(order.encode()):08x}")
        # optax's tools pass a placeholder instead of params, and its state must fit the state of
        # any params.
        return {"-".join(parts): jnp.int32(0)} if dtypes else jnp.int32(0)

    def first(self, values: PyTree, dtypes: PyTree, trainable: PyTree) -> LiveAndMaster:
        """Returns live params of these dtypes and what is stored, for masters that start as values.

        What the optimizer never changes, and is not `trainable`, needs no master.
        """
        names = jax.tree.unflatten(jax.tree.structure(values), leaf_names(values))

        def first(value: Any, dtype: DType, is_trainable: bool, name: str) -> StoredParam:
            if not is_narrow(dtype) or not is_floating(value):
                return StoredParam(value.astype(dtype), optax.MaskedNode())
            # A frozen backbone needs no masters, which are as many bytes as its params or more.
            storage = self.storage if is_trainable else STORAGES["none"]
            try:
                return storage.first(value.astype(at_least_float32(dtype)), dtype)
            except TypeError as error:
                raise TypeError(f"params, leaf {name!r}, {error}") from None

        return _unzip(jax.tree.map(first, values, dtypes, trainable, names))

    # Outside of `jit`, `load` and `store` are one compiled call each, not one for each operation.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def load(self, params: PyTree, master: PyTree) -> PyTree:
        """Returns the float32 masters, which follow params that were set from outside."""

        def load(param: Any, stored: Any) -> Any:
            return widen(param) if is_masked(stored) else self.storage.load(param, stored)

        return jax.tree.map(load, params, master)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def store(self, values: PyTree, params: PyTree, master: PyTree, step: Any) -> LiveAndMaster:
        """Returns params, in their old dtypes, and what is stored for new masters in this step."""

        def store(value: Any, param: Any, stored: Any, number: int) -> StoredParam:
            if is_masked(stored):
                narrow = is_narrow(param.dtype) and is_floating(value)
                rounded = round_finite(value, param.dtype) if narrow else value.astype(param.dtype)
                return StoredParam(rounded, stored)
            return self.storage.store(value, param.dtype, stored, number, step)

        leaves, structure = jax.tree.flatten(params)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        return _unzip(jax.tree.map(store, values, params, master, numbers))


def _unzip(stored: PyTree) -> LiveAndMaster:
    def is_stored(x: Any) -> bool:
        return isinstance(x, StoredParam)

    params = jax.tree.map(lambda x: x.param, stored, is_leaf=is_stored)
    return LiveAndMaster(params, jax.tree.map(lambda x: x.master, stored, is_leaf=is_stored))


def is_masked(x: Any) -> bool:
    """Whether a param has no master but itself."""
    return isinstance(x, optax.MaskedNode)
