"""Walks through a model and its optimizer once, and then notices what is replaced in them."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jaxmp._flax.nnx_training import Optimizer
from jaxmp._modules.decisions import kind_text
from jaxmp._program import compat
from jaxmp._training.optimizer import MixedPrecision
from jaxmp._training.optimizer_checks import check_same_params
from jaxmp._training.train_state import TrainState

Path = tuple[Any, ...]


class Structure(NamedTuple):
    """A model and an optimizer without their arrays: what a step is traced for.

    Arrays are one list: those of trained variables, of other variables, of the optimizer's state,
    and the number of steps.

    Attributes:
      graphdef: the model.
      trained: the paths of the variables that are trained.
      others: the paths of all others.
      variables: the tree structure of the states of both.
      params: that of the values of trained variables.
      opt_state: that of the values of the optimizer's state.
      values: that of the list of the values of all variables.
      items: what lists and dictionaries hold beside arrays and modules. The model has these
        themselves, which change.
      tx: the optimizer.
    """

    graphdef: Any
    trained: tuple[Path, ...]
    others: tuple[Path, ...]
    variables: Any
    params: Any
    opt_state: Any
    values: Any
    items: Any
    tx: MixedPrecision

    def state(self, arrays: list[Any]) -> TrainState:
        """Returns the train state of these arrays."""
        values = self.values.unflatten(arrays)
        first, second = len(self.trained), len(self.trained) + len(self.others)
        return TrainState(
            step=jnp.asarray(values[-1], jnp.int32),
            params=self.params.unflatten(jax.tree.leaves(values[:first])),
            opt_state=self.opt_state.unflatten(jax.tree.leaves(values[second:-1])),
            collections=dict(zip(map(name_of, self.others), values[first:second], strict=True)),
            tx=self.tx,
        )

    def arrays(self, state: TrainState, dtype: Any) -> list[Any]:
        """Returns the arrays of a train state; the number of steps has this dtype."""
        others = [state.collections[name_of(path)] for path in self.others]
        leaves = jax.tree.leaves((state.params, others, state.opt_state))
        return [*leaves, jnp.asarray(state.step, dtype)]

    def model(self, params: PyTree, others: dict[str, PyTree]) -> Any:
        """Returns the model with the values of its variables; those of `others` by their names."""
        leaves = jax.tree.leaves((params, [others[name_of(path)] for path in self.others]))
        return nnx.merge(self.graphdef, *jax.tree.unflatten(self.variables, leaves))


class Walk:
    """The variables of a model and its optimizer, and what shows that any of them is another.

    Args:
      model: the model.
      optimizer: the optimizer, which is not kept.

    Attributes:
      structure: what is traced.
      run: the jitted step that was called last.
    """

    run: jax.stages.Wrapped | None = None

    def __init__(self, model: Any, optimizer: Optimizer) -> None:
        self.model = model
        nodes = dict(nnx.iter_graph(model, graph=True))
        graphdef, *states = nnx.split(model, optimizer.wrt, ..., graph=True)
        trained, others = (tuple(path for path, _ in variables_in(state)) for state in states)
        owned = [(nodes[path[:-1]], path[-1], nodes[path]) for path in (*trained, *others)]
        moments, _ = jax.tree_util.tree_flatten_with_path(optimizer.opt_state, is_leaf=is_variable)
        owned += [(*_owner(optimizer.opt_state, path), x) for path, x in moments]
        places = [x if is_variable(x) else _Item(owner, key) for owner, key, x in owned]
        if any(isinstance(owner, tuple) and not is_variable(x) for owner, _, x in owned):
            raise TypeError(
                "optimizer.opt_state has arrays in place of its variables. Put new values into "
                "these: nnx.update(optimizer.opt_state, nnx.state(opt_state))"
            )
        self._places = [*places, optimizer.step]
        values = list(map(_raw_value_of, self._places))
        names = map(name_of, (*trained, *others, *(("opt_state",) for _ in moments), ("step",)))
        for name, value in zip(names, values, strict=True):
            _check_value(name, value)
        params, opt_state = nnx.as_pure(states[0]), nnx.as_pure(optimizer.opt_state)
        check_same_params(params, opt_state.master)
        roots = (model, vars(optimizer), optimizer.opt_state)
        self._dicts, self._lists = _containers(roots)
        attributes = [vars(x) for x in nodes.values() if isinstance(x, nnx.Pytree)]
        of_objects = {id(vars(optimizer)), *map(id, attributes)}
        plain = [x.items() for x in self._dicts if id(x) not in of_objects]
        items = [_static(x) for x in (*plain, *map(enumerate, self._lists))]
        self.structure = Structure(
            graphdef=graphdef,
            trained=trained,
            others=others,
            variables=jax.tree.structure(states),
            params=jax.tree.structure(params),
            opt_state=jax.tree.structure(opt_state),
            values=jax.tree.structure(values),
            items=items,
            tx=optimizer.tx,
        )
        self._variables = [x for x in places[: len(trained) + len(others)] if is_variable(x)]
        self._holds_items = not all(map(is_variable, places))
        self._seen = self._look()
        self._latest: list[Callable[[], Any]] = []

    def arrays(self) -> list[Any] | None:
        """Returns all arrays; None if anything but arrays was replaced."""
        (objects, others), (seen, others_seen) = self._look(), self._seen
        same = len(objects) == len(seen) and all(map(operator.is_, objects, seen))
        if not same or not are_equal(others, others_seen):
            return None
        arrays, structure = jax.tree.flatten(list(map(_raw_value_of, self._places)))
        return arrays if structure == self.structure.values else None

    def _look(self) -> tuple[list[Any], Any]:
        # In each call: all attributes of all modules, in a few passes that run in C.
        values = map(dict.values, self._dicts)
        objects = list(itertools.chain.from_iterable((*values, *self._lists)))
        keys = list(itertools.chain.from_iterable(self._dicts))
        sizes = list(map(len, (*self._dicts, *self._lists)))
        return objects, (keys, sizes, list(map(_metadata_of, self._variables)))

    def put(self, arrays: list[Any]) -> None:
        """Gives the variables new arrays."""
        values = self.structure.values.unflatten(arrays)
        if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, arrays))):
            for place, value in zip(self._places, values, strict=True):
                place.set_raw_value(value)
        else:
            # What `set_raw_value` does after tests of the trace, which take 20 times as long.
            for place, value in zip(self._places, values, strict=True):
                object.__setattr__(place, "_raw_value", value)
        if self._holds_items:
            self._seen = self._look()
        # Weak, so that the old arrays are freed where others put new ones.
        self._latest = list(map(weakref.ref, arrays))

    def replace(self, new: Callable[[Any], Any]) -> None:
        """Gives the variables `new(array)`, one after the other: no second model is in memory."""
        for place in self._places:
            place.set_raw_value(jax.tree.map(new, place.get_raw_value()))
        if self._holds_items:
            self._seen = self._look()

    def latest(self) -> list[Any]:
        """Returns the arrays that `put` was given last, with None for those that are no more."""
        return list(map(operator.call, self._latest))


class _Item:
    """An array that is no variable: an attribute of a module, an item of a list or dictionary."""

    def __init__(self, owner: Any, key: Any) -> None:
        self._owner = owner
        self._key = key
        self._is_attribute = isinstance(owner, nnx.Pytree) and not isinstance(owner, nnx.List)

    def get_raw_value(self) -> Any:
        return getattr(self._owner, self._key) if self._is_attribute else self._owner[self._key]

    def set_raw_value(self, value: Any) -> None:
        if self._is_attribute:
            setattr(self._owner, self._key, value)
        else:
            self._owner[self._key] = value

    _raw_value = property(get_raw_value, set_raw_value)


def variables_in(state: Any) -> list[tuple[Path, Any]]:
    """Returns paths and variables of a state, or its arrays, in the order of JAX's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
    return [(tuple(entry.key for entry in path), x) for path, x in leaves]


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def name_of(path: Path) -> str:
    """Returns the name of a variable, which no other path has.

    >>> name_of(("layers", 0, "kernel"))
    "['layers'][0]['kernel']"
    """
    return "".join(f"[{key!r}]" for key in path)


def _owner(tree: Any, path: Any) -> tuple[Any, Any]:
    """Returns the container of a leaf of a tree, and its key there."""
    owner, key = None, None
    for entry in path:
        owner = tree
        is_field = isinstance(entry, jax.tree_util.GetAttrKey)
        key = entry.name if is_field else getattr(entry, "key", getattr(entry, "idx", None))
        tree = getattr(tree, entry.name) if is_field else tree[key]
    return owner, key


def _static(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns items without arrays, modules and containers, of which only the keys are left."""
    moving = (jax.Array, np.ndarray, nnx.Variable, nnx.Pytree, nnx.State, list, dict)
    return [(key, None if isinstance(x, moving) else x) for key, x in items]


def _check_value(name: str, value: Any) -> None:
    numbers = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)
    for x in jax.tree.leaves(value):
        if not isinstance(x, numbers) or compat.is_ref(x):
            raise TypeError(
                f"the variable {name} holds {kind_text(x)}: a step takes variables of arrays alone"
            )


def _containers(roots: Iterable[Any]) -> tuple[list[dict[Any, Any]], list[list[Any]]]:
    """Returns the dictionaries and lists in trees, whose items can be replaced."""
    dicts, lists, seen = [], [], dict[int, Any]()
    waiting = list(roots)
    while waiting:
        x = waiting.pop()
        if id(x) in seen or is_variable(x):
            continue
        seen[id(x)] = x  # kept, so that no other object has its id
        if isinstance(x, nnx.Pytree | nnx.State):
            waiting.append(vars(x) if isinstance(x, nnx.Pytree) else x.raw_mapping)
        elif isinstance(x, dict):
            dicts.append(x)
            waiting += x.values()
        elif isinstance(x, list):
            lists.append(x)
            waiting += x
        elif x is not None and not jax.tree_util.all_leaves([x]):
            waiting += _children(x)
    return dicts, lists


def _children(container: Any) -> list[Any]:
    return jax.tree.leaves(container, is_leaf=lambda x: x is not container)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two structures or metadata are equal; False where that cannot be told."""
    try:
        return bool(one == other)
    except Exception:  # any exception: attributes and metadata may be arrays, or of any class
        return False


# As a method, `get_raw_value` takes three times as long.
_raw_value_of = operator.attrgetter("_raw_value")
_metadata_of = operator.methodcaller("get_metadata")
