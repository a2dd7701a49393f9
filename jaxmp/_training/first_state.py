"""Makes a first state as one compiled program, whatever the number of shapes in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._mesh.placement import placed_beside
from jaxmp._program import compat


def in_one_program(make: Callable[..., Any], params: PyTree, *others: PyTree) -> Any:
    """Returns `make(params, *others)`, a state of these params, by one compiled program.

    One operation after the other, a state costs a program for each shape and each operation: 430 of
    them for eight params with remainders and 8-bit moments.

    Returns:
      The state, on the devices of the params. If arguments are traced, it is a part of that
      program. Its operations run one by one if arrays are on several devices, where each follows
      the arrays that it reads; or if `make` cannot be traced, as an optimizer that reads numbers.
    """
    arrays = (params, *others)
    leaves = jax.tree.leaves(arrays)
    if any(map(compat.is_traced, leaves)) or not _on_one_device(leaves):
        return placed_beside(params, make(*arrays))

    def without_given(*arrays: PyTree) -> Any:
        given = {id(x): _Given(i) for i, x in enumerate(jax.tree.leaves(arrays))}
        return jax.tree.map(lambda x: given.get(id(x), x), make(*arrays))

    # The state lies on the device of all arguments, also of those that nothing is made of.
    program = jax.jit(without_given, keep_unused=True)
    try:
        program.trace(*arrays)
    except Exception:  # any exception: the optimizer is the user's, and raises it again
        return make(*arrays)

    def with_given(x: Any) -> Any:
        return leaves[x.index] if isinstance(x, _Given) else x

    return jax.tree.map(with_given, program(*arrays), is_leaf=lambda x: isinstance(x, _Given))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for an array that was given, and would be copied if a program returned it."""

    index: int


def _on_one_device(leaves: list[Any]) -> bool:
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    on_mesh = any(isinstance(x.sharding, NamedSharding) for x in arrays)
    return not on_mesh and len({device for x in arrays for device in x.devices()}) <= 1
