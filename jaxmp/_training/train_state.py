"""The train state: everything that training carries, as one pytree, which Flax can serialize."""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jaxmp._mesh.placement import placed_beside
from jaxmp._numerics.dtypes import is_floating, is_key, suggestion
from jaxmp._numerics.loss_scale import LossScaleState
from jaxmp._numerics.tree import (
    all_finite,
    cast_floating,
    check_like,
    copied,
    leaf_names,
    select,
    stays_finite,
)
from jaxmp._training.optimizer import MixedPrecision, check_wrapped, params_and_state


def _register_with_flax(cls: Any) -> None:
    """Registers a class of train states and its subclasses with Flax, if Flax is imported."""
    # Flax knows its own classes and registered ones. Any other it returns as it is: a state cannot
    # be written then, and "restores" to what it was. Training alone does not import Flax.
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is not None:
        if not serialization.is_serializable(cls):
            serialization.register_serialization_state(cls, to_state_dict, from_state_dict)
        for subclass in cls.__subclasses__():
            _register_with_flax(subclass)


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """Finds Flax's module, and registers states once it is read: maybe after the first state."""
    spec: Any = PathFinder.find_spec(name, path) if name == "flax.serialization" else None
    if spec is not None:
        run, then = spec.loader.exec_module, functools.partial(_register_with_flax, TrainState)
        spec.loader.exec_module = lambda module: [run(module), then()]
    return spec


def to_state_dict(state: Any) -> dict[str, Any]:
    """Returns the arrays of a tree in nested dictionaries; of typed PRNG keys, their words.

    >>> to_state_dict({"layers": [jax.numpy.int32(1)], "nothing": None})
    {'layers': {'0': Array(1, dtype=int32)}}
    """
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        *outer, last = (jax.tree_util.keystr((entry,), simple=True) for entry in path)
        node = nested
        for name in outer:
            node = node.setdefault(name, {})
        if last in node:  # of a dictionary with the keys 1 and "1"
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"two arrays of the state have the name {name!r}: rename one")
        if is_key(leaf):  # Flax writes no typed keys, and a state may be abstract
            words = jax.random.key_data
            leaf = words(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(words, leaf)
        node[last] = leaf
    return nested


def from_state_dict(state: Any, saved: dict[str, Any]) -> Any:
    """Returns a state like `state`, with the arrays of another.

    Args:
      state: a state of the same policy, storage and optimizer. It may be abstract.
      saved: what `to_state_dict` returned, with NumPy arrays if it was written to a file.

    Raises:
      ValueError: naming the arrays that are missing, left over, or of another shape or dtype.
    """
    expected = to_state_dict(state)
    names = {"name": "the saved state", "like_name": "this one"}
    check_like(saved, expected, advice=_ADVICE, **names)
    # Those who restore go by names, and cast arrays of another dtype without a word.
    pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(expected), strict=True)
    for i, (x, y) in enumerate(pairs):
        if jnp.result_type(x) != jnp.result_type(y):
            raise ValueError(
                f"the saved state has {jnp.result_type(x)} at {leaf_names(expected)[i]!r}, and "
                f"this one {jnp.result_type(y)}. {_ADVICE}"
            )

    def leaf(path: tuple[Any, ...], like: Any) -> Any:
        value: Any = saved
        for entry in path:
            value = value[jax.tree_util.keystr((entry,), simple=True)]
        if not is_key(like):
            return value
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(jnp.empty((), like.dtype)))

    return jax.tree_util.tree_map_with_path(leaf, state)


_ADVICE = (
    "Restore into a state of the policy, the storage and the optimizer that wrote it, and convert: "
    "jaxmp.storage.convert_state(state, tx)"
)


# Arguments of methods that also take collections by keyword: no collection has these names.
_RESERVED = ("batch", "cast_params", "cls", "extra", "finite", "grads", "self")


def _is_data(field: Any) -> bool:
    """Whether a field holds arrays."""
    return not field.metadata.get("static", not field.metadata.get("pytree_node", True))


@functools.cache
def _register_pytree(cls: Any) -> None:
    """Registers a train state with JAX, or a subclass that has not registered itself."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    data = [field.name for field in fields if _is_data(field)]
    static = [field.name for field in fields if not _is_data(field)]
    with contextlib.suppress(ValueError):  # it is registered
        jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that training carries: a pytree of arrays. Make one with `create`.

    Read a collection such as `batch_stats=...` as `state.batch_stats`. A skipped step changes only
    the loss scale and the counts of skips, and no collection: otherwise one overflowed batch would
    leave infinite batch statistics in the model for ever. A subclass is a pytree too. If it is a
    keyword-only dataclass, its further fields are data, and `create` takes them by name.

    Attributes:
      step: how many steps were taken (int32 scalar); skipped ones do not count.
      params: the live params.
      opt_state: the `MixedPrecisionState` of `tx`.
      collections: a dictionary of further state of the model.
      tx: the optimizer (static).
    """

    # JAX and orbax also build trees of shardings, names and None with this class, so that nothing
    # here may require arrays.
    step: Any
    params: PyTree
    opt_state: Any
    collections: Any
    # Marked as in dataclasses of JAX, and of Flax: this field holds no arrays.
    tx: MixedPrecision = dataclasses.field(metadata={"static": True, "pytree_node": False})

    # Code that restores a state calls the class, and not `create`.
    def __new__(cls, *_: Any, **__: Any) -> "TrainState":
        _register_pytree(cls)  # type: ignore[arg-type]  # classes are hashable
        _register_with_flax(cls)
        return object.__new__(cls)

    @classmethod
    def create(
        cls, *, params: PyTree, tx: MixedPrecision, cast_params: bool = True, **collections: PyTree
    ) -> "TrainState":
        """Makes a state at step 0.

        Args:
          params: a tree of arrays, usually float32. The live params are cast to the policy's
            `param_dtype`; the masters keep the given values. Integer params are allowed if the
            optimizer freezes them. The state has its own buffers, so that it may be donated to a
            step while `params` stay usable.
          tx: what `mixed_precision` returned.
          cast_params: False leaves the dtypes of the params unchanged, for models that choose the
            dtype of each param themselves.
          **collections: mutable state of the model by name, `batch_stats=...` or `rng=key`, and
            the further fields of a subclass.

        Returns:
          The state.

        Raises:
          TypeError: if `tx` is not wrapped in `mixed_precision`, or a collection holds anything but
            arrays.
          ValueError: if a collection has a name that `TrainState` uses itself.
        """
        check_wrapped(tx)
        all_fields = {field.name: field for field in dataclasses.fields(cls)}
        own = set(all_fields) - {field.name for field in dataclasses.fields(TrainState)}
        fields = {name: collections.pop(name) for name in own & set(collections)}
        arrays = {name: value for name, value in fields.items() if _is_data(all_fields[name])}
        if clash := sorted({*dir(cls), *all_fields, *_RESERVED} & set(collections)):
            raise ValueError(
                f"collections cannot be called {clash}: TrainState uses such a name itself"
            )
        for name, value in (collections | arrays).items():
            for i, leaf in enumerate(jax.tree.leaves(value)):
                dtype = getattr(leaf, "dtype", None)
                numeric = dtype is not None and getattr(dtype, "kind", None) not in ("O", "S", "U")
                if not isinstance(leaf, (int, float, complex)) and not numeric:
                    raise TypeError(
                        f"{name} must be a tree of arrays, but its leaf {leaf_names(value)[i]!r} "
                        f"is a {type(leaf).__name__}. TrainState keeps no functions and no text: "
                        "let the loss function close over them, as over model.apply"
                    )
        # A step may donate the state, while `params` stay usable.
        params, opt_state = params_and_state(tx, params, cast_params=cast_params, own=True)
        state = cls(
            step=jnp.int32(0),
            params=params,
            opt_state=opt_state,
            collections=copied(collections),
            tx=tx,
            **(fields | copied(arrays)),
        )
        return placed_beside(params, state)

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss scale for the next loss."""
        return self.opt_state.loss_scale

    def __getattr__(self, name: str) -> PyTree:
        collections = self.__dict__.get("collections")
        if isinstance(collections, Mapping) and name in collections:
            return collections[name]
        raise AttributeError(f"TrainState has no field or collection {name!r}")

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a copy with other fields or collections, by name.

        Args:
          **changes: new values. Unlike in `apply_gradients`, nothing is checked or skipped.

        Returns:
          The changed state.
        """
        collections = {k: v for k, v in changes.items() if k in self.collections}
        fields = {k: v for k, v in changes.items() if k not in collections}
        fields["collections"] = fields.get("collections", self.collections) | collections
        return dataclasses.replace(self, **fields)

    def apply_gradients(
        self,
        grads: PyTree,
        extra: dict[str, Any] | None = None,
        *,
        finite: Bool[Array, ""] | None = None,
        **collections: PyTree,
    ) -> "TrainState":
        """Returns the state after one optimizer step, taken or skipped.

        A step is skipped if a gradient is not finite, or if a number in a collection was finite
        and no longer is: batch statistics can overflow in a batch whose gradients vanish. (Not
        with an optimizer that never skips.)

        Args:
          grads: unscaled gradients, as `jaxmp.value_and_grad` returns them.
          extra: further arguments for the inner optimizer's update, such as `{"value": loss}`.
          finite: whether to take the step, in place of this test. Inside `shard_map` it must be the
            same on all devices.
          **collections: new values of collections; the others do not change.

        Returns:
          The next state. After a skip, only its loss scale and its counts of skipped steps
          differ.

        Raises:
          ValueError: for a collection that the state does not have, or whose structure changed.
        """
        new_collections = update_collections(self.collections, collections)
        if finite is None:
            # A float16 variance of 300s is infinite and its inverse is zero, and so are all
            # gradients: they alone do not show the overflow.
            finite = all_finite(grads) & stays_finite(new_collections, self.collections)
        params, opt_state = self.tx.apply_gradients(
            grads, self.opt_state, self.params, finite=finite, **(extra or {})
        )
        finite = opt_state.grads_finite
        return dataclasses.replace(
            self,
            step=self.step + finite.astype(jnp.int32),
            params=params,
            opt_state=opt_state,
            collections=select(finite, new_collections, self.collections),
        )


def update_collections(old: dict[str, PyTree], changed: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the collections with new values, in the old dtypes: a step must keep its types."""
    for name, new in changed.items():
        if name not in old:
            near = suggestion(name, list(old))
            raise ValueError(
                f"the state has no collection {name!r}.{near} It has: {', '.join(old) or 'none'}. "
                "Give it to TrainState.create, or return it as aux: has_aux=True, (loss, "
                "collections, aux)"
            )
        check_like(
            new,
            old[name],
            name=f"collection {name!r}",
            like_name="the old one",
            advice="A step must keep the structure of a collection.",
        )

    def cast_like(x: Any, y: Any) -> Any:
        return cast_floating(jnp.asarray(x), y.dtype) if is_floating(y) else x

    return old | {name: jax.tree.map(cast_like, new, old[name]) for name, new in changed.items()}


_register_pytree(TrainState)
sys.meta_path.insert(0, types.SimpleNamespace(find_spec=_find_spec))
