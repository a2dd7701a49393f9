"""Shards the state of an optimizer like its params."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._mesh.specs import check_rank
from jaxmp._numerics.block_codes import spec_of_blocks
from jaxmp._numerics.tree import leaf_names
from jaxmp._numerics.user_warnings import warn
from jaxmp._training.compact_forms import CodedState

_Path = tuple[Any, ...]


def state_shardings(state: Any, params: PyTree, shardings: PyTree = None) -> PyTree:
    """Returns the sharding of every array in an optimizer state: that of its param, or replicated.

    Masters and moments are two to three times the size of the params. `jax.jit(tx.init)` lets the
    compiler place them, and it puts zeros whole on one device or on each: it shards only arrays
    that are computed from sharded arrays.

    An array belongs to a param if its path ends in the path of the param and it has the param's
    shape. It may have further leading dimensions (as the history of L-BFGS), which are not sharded.
    This works for any chain, partition or mask of optax optimizers, and for anything else in a
    state, such as an average of params. Counters, the loss scale and factored moments (of
    Adafactor) are replicated.

    Args:
      state: an optimizer; or a state, such as a `TrainState`, of arrays or from `jax.eval_shape`.
      params: the sharded params for which the state is made: arrays, or `jax.ShapeDtypeStruct` with
        a sharding. Inside `jit` arrays have no shardings to read, so that `shardings` is needed.
      shardings: the `NamedSharding` of each param, or a prefix of that tree, in place of the
        shardings of `params`, which may then be abstract.

    Returns:
      A tree like the state, for `out_shardings` of a jitted `init` and for the `in_shardings` and
      `out_shardings` of a step.

    Raises:
      ValueError: for params without a `NamedSharding`, or on different meshes.

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> params = {"w": jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data")))}
    >>> placed = state_shardings(optax.sgd(0.1, momentum=0.9), params)
    >>> placed[0].trace["w"].spec
    P('data',)
    >>> state = jax.jit(optax.sgd(0.1, momentum=0.9).init, out_shardings=placed)(params)

    For a whole `TrainState`:

    >>> import functools, jaxmp
    >>> tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16")
    >>> create = functools.partial(jaxmp.TrainState.create, tx=tx)
    >>> placed = state_shardings(jax.eval_shape(create, params=params), params)
    >>> placed.opt_state.master["w"].spec, placed.step.spec
    (P('data',), P())
    >>> state = jax.jit(create, out_shardings=placed)(params=params)
    """
    if isinstance(state, (optax.GradientTransformation, optax.MultiSteps)):
        state = jax.eval_shape(state.init, params)
    params_by_path = _params_by_path(params, shardings)
    if not params_by_path:
        raise ValueError("params has no leaves, so that there is no mesh to be read from it")
    meshes = [sharding.mesh for _, sharding in params_by_path.values()]
    mesh = meshes[0]
    if others := [other for other in meshes if other != mesh]:
        raise ValueError(
            f"params lie on different meshes, {mesh} and {others[0]}. Place all on one"
        )
    largest = max(math.prod(shape) for shape, _ in params_by_path.values())
    # `jax.jit(tx.init)` puts zeros whole on one device or on each: it shards only arrays that are
    # computed from sharded arrays.
    replicated = NamedSharding(mesh, jax.P())
    leftover = []

    # Scales are split as their codes are, where devices hold whole blocks.
    def of_blocks(scale: Any, sharding: NamedSharding) -> NamedSharding:
        spec = spec_of_blocks(scale.shape, sharding.spec, sharding.mesh)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    def place(path: _Path, x: Any) -> Any:
        if isinstance(x, CodedState):
            codes = place_all(path, x.codes)
            pairs = zip(x.scales, jax.tree.leaves(codes), strict=False)
            scales = [
                scale if isinstance(scale, optax.MaskedNode) else of_blocks(scale, sharding)
                for scale, sharding in pairs
            ]
            step: Any = replicated
            return CodedState(codes, tuple(scales), step)
        shape = jnp.shape(x)
        sharding = _sharding_like(path, shape, params_by_path)
        # Counters and factored moments are small enough for every device.
        if sharding is None and math.prod(shape) > largest:
            leftover.append(f"{jax.tree_util.keystr(path, simple=True, separator='/')} {shape}")
        return replicated if sharding is None else sharding

    def place_all(path: _Path, tree: PyTree) -> PyTree:
        def is_coded(x: Any) -> bool:
            return isinstance(x, CodedState)

        with_path = jax.tree_util.tree_map_with_path
        return with_path(lambda end, x: place((*path, *end), x), tree, is_leaf=is_coded)

    placed = place_all((), state)
    if leftover:
        warn(
            f"the state has arrays that belong to no param, but are larger than any: "
            f"{', '.join(leftover)}. Every device will hold all of them; give them other shardings "
            "in the tree that state_shardings returned, if memory is short"
        )
    return placed


def _params_by_path(params: PyTree, shardings: PyTree) -> dict[_Path, tuple[tuple[int, ...], Any]]:
    """Returns shape and sharding of each param, by its path."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    if shardings is None:
        sharding_leaves = [getattr(x, "sharding", None) for _, x in paths]
    else:
        try:
            sharding_leaves = jax.tree.leaves(jax.tree.broadcast(shardings, params))
        except ValueError as error:
            raise ValueError(
                f"shardings must be a tree like the params, or a prefix of it: {error}"
            ) from None
    params_by_path = {}
    for name, (path, x), sharding in zip(leaf_names(params), paths, sharding_leaves, strict=True):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"params leaf {name!r} has no NamedSharding, but {sharding}. Place params on a "
                "mesh, jax.device_put(params, shardings); for abstract ones, or inside of jit, "
                "give state_shardings(state, params, shardings)"
            )
        check_rank(name, jnp.ndim(x), sharding.spec)
        params_by_path[tuple(path)] = (jnp.shape(x), sharding)
        if isinstance(params, optax.LookaheadParams):  # the fast ones have moments
            params_by_path.setdefault(tuple(path[1:]), (jnp.shape(x), sharding))
    return params_by_path


def _sharding_like(
    path: _Path, shape: tuple[int, ...], params_by_path: dict[_Path, tuple[tuple[int, ...], Any]]
) -> NamedSharding | None:
    """Returns the sharding of the param whose path is the longest end of this path."""
    # A state has its own levels around the structure of the params: `0/mu/layers/0/w`.
    ends = [path[start:] for start in range(len(path) + 1)]
    end = next((end for end in ends if end in params_by_path), None)
    if end is None:
        return None
    like, sharding = params_by_path[end]
    # The history of L-BFGS has a leading dimension, which is not sharded.
    extra = len(shape) - len(like)
    if extra < 0 or shape[extra:] != like:
        return None
    if extra == 0:
        return sharding
    spec = jax.P(*[None] * extra, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
