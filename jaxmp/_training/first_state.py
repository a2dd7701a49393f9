"""Makes a first state as one compiled program, whatever the number of shapes in it."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._mesh.placement import placed_beside
from jaxmp._program import compat
from jaxmp._program.mesh_axes import constrain_to
from jaxmp._training.state_shardings import shardings_in_state


class OneProgram:
    """Runs a function that makes a state of params as one compiled program.

    One operation after the other, a state costs a program for each shape and each operation: 430 of
    them for eight params with remainders and 8-bit moments. The program is kept as long as this
    object.

    Args:
      make: `make(*static, params, *others)`, which is traced once for each kind of arrays.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        # Results lie on the devices of all arguments, also of those that nothing is made of.
        self._jitted = jax.jit(self._placed, static_argnums=(0, 1), keep_unused=True)

    def __call__(self, params: PyTree, *others: PyTree, static: tuple[Hashable, ...] = ()) -> Any:
        """Returns what the function makes, on the devices of the params, and sharded like these.

        Args:
          params: the live params, or the first masters.
          others: further trees.
          static: arguments that are no arrays.

        Returns:
          The state. If arguments are traced, it is a part of that program. If the function cannot
          be traced, as an optimizer that reads numbers of params, its operations run one by one.
        """
        arrays = (params, *others)
        leaves = jax.tree.leaves(arrays)
        if any(map(compat.is_traced, leaves)):
            return self._make(*static, *arrays)
        shardings = _param_shardings(params)
        try:
            self._jitted.trace(static, shardings, *arrays)
        except (TypeError, IndexError):  # of JAX, or one that the call will raise again
            made = self._make(*static, *arrays)
        else:
            made = self._jitted(static, shardings, *arrays)

        def given(x: Any) -> Any:
            return leaves[x.index] if isinstance(x, _Given) else x

        made = jax.tree.map(given, made, is_leaf=lambda x: isinstance(x, _Given))
        return placed_beside(params, made)

    def _placed(self, static: tuple[Any, ...], shardings: Any, *arrays: PyTree) -> Any:
        made = self._make(*static, *arrays)
        given = {id(x): _Given(i) for i, x in enumerate(jax.tree.leaves(arrays))}
        made = jax.tree.map(lambda x: given.get(id(x), x), made)
        if shardings is None:
            return made
        # Left to itself, the compiler places zeros whole on one device or on each.
        shardings = jax.tree.unflatten(jax.tree.structure(arrays[0]), shardings)
        return jax.tree.map(constrain_to, made, shardings_in_state(made, arrays[0], shardings)[0])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for an array that was given, and would be copied if a program returned it."""

    index: int


def _param_shardings(params: PyTree) -> tuple[NamedSharding, ...] | None:
    """Returns the shardings of params on a mesh; of those that no one has placed, replicated."""
    placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    mesh = next((x.mesh for x in placed if isinstance(x, NamedSharding)), None)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, jax.P())
    return tuple(x if isinstance(x, NamedSharding) else everywhere for x in placed)
