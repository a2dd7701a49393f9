"""Puts new arrays, such as counters and scales, on the devices of the params."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._program import compat

State = TypeVar("State")


def placed_beside(params: PyTree, state: State) -> State:
    """Replicates arrays on JAX's default device over the mesh of the params.

    Arrays that the user has put on a device stay there. If the params are traced, or not on a mesh,
    nothing changes.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> w = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec()))
    >>> len(placed_beside(w, jnp.zeros(())).devices()) == jax.device_count()
    True
    """
    # Counters and scales are made on the default device. If they stayed there, the first step would
    # return them on the mesh, and the second step would compile anew. A checkpoint of several
    # processes refuses arrays that are local to each process.
    mesh = _mesh_of(params)
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if not isinstance(x, jax.Array) or compat.is_traced(x) or x.committed:
            return x
        return _replicate(x, everywhere)

    return jax.tree.map(place, state)


def _mesh_of(params: PyTree) -> Mesh | None:
    # A mesh of one device counts too: programs are tried on it.
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not compat.is_traced(leaf):
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding):
                return sharding.mesh if isinstance(sharding.mesh, Mesh) else None
    return None


def _replicate(x: Any, sharding: NamedSharding) -> Any:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # NumPy, which the callback below returns, has no arrays of keys.
        data = _replicate(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    # Each process has its own copy, which jax.device_put does not accept as part of one array.
    values = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: values[index])
