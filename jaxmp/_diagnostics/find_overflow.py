"""Finds the operation whose value first left the range of its dtype, in loss or gradients."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._diagnostics.one_by_one import OneByOne, Place, RunValue
from jaxmp._inspect.equations import Site
from jaxmp._inspect.lines import Lines, direction, module_path, scopes_of
from jaxmp._jaxpr.mesh_axes import on_automatic_axes_here, on_automatic_mesh
from jaxmp._jaxpr.tracing import Static, combine, partition, trace_call
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._training.gradient_options import LossScaleLike
from jaxmp._training.gradients import value_and_grad

Pass = Literal["forward", "backward", "recomputed", ""]


@dataclasses.dataclass(frozen=True)
class OverflowOperand:
    """What an operation read.

    Attributes:
      dtype: its dtype.
      shape: its shape; on one device, in a `shard_map`.
      largest: the largest magnitude of its finite numbers; 0 if there are none.
      smallest: the smallest magnitude of those that are not zero; 0 if there are none.
    """

    dtype: str
    shape: tuple[int, ...]
    largest: float
    smallest: float


@dataclasses.dataclass(frozen=True)
class Overflow:
    """The operation whose value first left the range of its dtype. It prints as a paragraph.

    Attributes:
      operation: the name of the primitive, such as `"exp"`, or `"argument"` if what was given is
        not finite itself.
      line: the line of the user's code; the name of the leaf for an argument.
      path: the module or scope.
      direction: `"forward"`, `"backward"`, `"recomputed"` by a checkpoint, or `""`.
      turns: the numbers of the turns of the loops that it is in, outermost first: for layers in a
        scan, the layer.
      operands: what it read.
      dtype: the dtype of its result.
      shape: the shape of its result.
      infinite: how many numbers of its result are infinite.
      nan: how many are NaN.
      index: where the first of these is.
      reaches: which results are not finite because of it: `"loss"` and the names of gradients.
      gradients: how many gradients there are.
    """

    operation: str
    line: str
    path: str
    direction: Pass
    turns: tuple[int, ...]
    operands: tuple[OverflowOperand, ...]
    dtype: str
    shape: tuple[int, ...]
    infinite: int
    nan: int
    index: tuple[int, ...]
    reaches: tuple[str, ...]
    gradients: int

    def __str__(self) -> str:
        size = math.prod(self.shape)
        bad = [f"{n:,} {word}" for n, word in ((self.infinite, "infinite"), (self.nan, "NaN")) if n]
        what = f"{' and '.join(bad)} of {size:,} numbers in {self.dtype}"
        grads = [name for name in self.reaches if name != "loss"]
        reached = ["the loss"] * ("loss" in self.reaches)
        if grads:
            reached.append(f"{len(grads)} of {self.gradients} gradients ({_some(grads)})")
        tail = f"Not finite because of it: {' and '.join(reached)}."
        if self.operation == "argument":
            return f"{self.line} was given with {what}, first at {self.index}. {tail}"
        where = [self.line, self.path and f"in {self.path}", self.direction and f"{self.direction}"]
        where += [f"turn {', '.join(map(str, self.turns))} of its loop"] * bool(self.turns)
        read = " and ".join(
            f"{each.dtype}{list(each.shape)} of {each.smallest:.3g} to {each.largest:.3g}"
            for each in self.operands
        )
        return (
            f"{self.operation} at {', '.join(part for part in where if part)} gives {what}, first "
            f"at {self.index}, from {read}. {tail}"
        )


def find_overflow(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    policy: str | jmp.Policy | PolicyRules | None = None,
    loss_scale: LossScaleLike = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Overflow | None:
    """Finds why a step is skipped: the first operation whose result is not finite.

    A skipped step says that a gradient is infinite or NaN, and by then every gradient may be. This
    evaluates loss and gradients once more, one operation after the other, in the dtypes that the
    step has, and follows what is not finite back to where it began. It looks into `jit`, `scan`,
    `while`, `cond`, `checkpoint`, functions with derivatives of their own and `shard_map`. It runs
    many times slower than a step: call it when something is wrong, with the params and the batch of
    that step.

    An infinity that a program uses, such as -inf for what is masked, does not count where nothing
    that is not finite comes of it.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, as given to `make_train_step` or
        `value_and_grad`.
      params: the params. Make copies before a step that donates them.
      *args: the batch, and other arguments.
      policy: the policy of the step, for functions that it puts under autocast. None for models
        that have a policy of their own.
      loss_scale: the scale of the step: `state.loss_scale`, or a number.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **kwargs: collections, as the step passes them.

    Returns:
      The operation, with its line, module, pass, what it read and what came of it; None if loss and
      gradients are finite.

    Raises:
      TypeError, ValueError: as `jaxmp.autocast` and `jaxmp.value_and_grad` do.

    >>> params, x = {"w": jnp.full((2, 2), 400.0)}, jnp.full((1, 2), 100.0)
    >>> found = find_overflow(lambda p, x: jnp.sum(x @ p["w"]), params, x, policy="mixed_float16")
    >>> found.operation, found.direction, found.infinite, found.operands[0].largest
    ('dot_general', 'forward', 2, 100.0)
    """
    fun = loss_fn if policy is None else autocast(loss_fn, policy)
    gradient = value_and_grad(fun, has_aux=has_aux, loss_scale=loss_scale)
    static, arrays = partition(((params, *args), kwargs))
    traced = trace_call(gradient, static, arrays)
    search = _Search()
    named = zip(map(on_automatic_mesh, arrays), _argument_names(static, arrays), strict=True)
    with on_automatic_axes_here(arrays):
        given = [search.argument(x, name) for x, name in named]
        made = OneByOne(search.see, search.join).run(traced.closed, given)
    loss, gradients = combine(traced.returned, made)
    results = {"loss": loss[0] if has_aux else loss}
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradients)
    results |= {_path_text(path): value for path, value in leaves}
    return search.first(results)


def _argument_names(static: Static, arrays: list[Any]) -> list[str]:
    """Returns what to call each array among the arguments."""
    (params, *args), kwargs = combine(static, map(_Leaf, arrays))
    rest = args[0] if len(args) == 1 else args
    parts = {"params": params, "batch": rest, **kwargs}
    found = {
        id(leaf.array): f"{name}/{_path_text(path)}".removesuffix("/")
        for name, part in parts.items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
        if isinstance(leaf, _Leaf)
    }
    return [found[id(x)] for x in arrays]


class _Leaf:
    """An array in a tree."""

    def __init__(self, array: Any) -> None:
        self.array = array


def _path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


class _Note(NamedTuple):
    """What is known of an array.

    Attributes:
      severity: 0 if it is finite, 1 if it holds infinities, 2 if it holds NaN.
      events: the numbers of the operations that what is not finite comes from.
    """

    severity: int = 0
    events: frozenset[int] = frozenset()


class _Search:
    """Notes of each array where what is not finite in it began."""

    def __init__(self) -> None:
        self._events: list[Callable[[tuple[str, ...], int], Overflow]] = []
        self._lines = Lines()

    def argument(self, array: Any, name: str) -> RunValue:
        """Returns an argument of the program."""
        severity = _severity(array)
        if not severity:
            return RunValue(array, _Note())
        event = functools.partial(_event, "argument", name, "", "", (), (), _result_of(array))
        return RunValue(array, _Note(severity, self._new(event)))

    def see(self, place: Place, operands: list[RunValue], results: list[Any]) -> list[_Note]:
        """Returns what is known of the results of an operation."""
        severities = list(map(_severity, results))
        if not any(severities):
            return [_Note()] * len(results)
        known = [self._known(operand) for operand in operands]
        events = frozenset().union(*(note.events for note in known if note.severity))
        if max(severities) > max((note.severity for note in known), default=0):
            worst = results[severities.index(max(severities))]
            events |= self._new(self._at(place, operands, worst))
        return [_Note(severity, events if severity else frozenset()) for severity in severities]

    def join(self, array: Any, notes: list[_Note | None]) -> _Note:
        """Returns what is known of an array from what is known of its parts."""
        known = [note for note in notes if note is not None]
        return _Note(
            max((note.severity for note in known), default=0),
            frozenset().union(*(note.events for note in known)),
        )

    def first(self, named: dict[str, RunValue]) -> Overflow | None:
        """Returns the first operation from which a result is not finite; None if all are."""
        notes = {name: self._known(value) for name, value in named.items()}
        bad = {name: note for name, note in notes.items() if note.severity}
        if not bad:
            return None
        begun = min(min(note.events) for note in bad.values() if note.events)
        reached = tuple(name for name, note in bad.items() if begun in note.events)
        return self._events[begun](reached, len(named) - 1)

    def _known(self, value: RunValue) -> _Note:
        note: _Note | None = value.note
        return note if note is not None else _Note(_severity(value.array))

    def _new(self, event: Any) -> frozenset[int]:
        self._events.append(event)
        return frozenset([len(self._events) - 1])

    def _at(self, place: Place, operands: list[RunValue], worst: Any) -> Any:
        outer: Site | None = None
        for equation in reversed(place.equations[1:]):
            outer = Site(equation, equation.primitive.name, 1, outer)
        site = Site(place.equations[0], place.equations[0].primitive.name, 1, outer)
        scopes = scopes_of(site)
        return functools.partial(
            _event,
            site.name,
            self._lines.of(site),
            module_path(scopes),
            direction(scopes),
            place.turns,
            tuple(_operand_of(each.array) for each in operands if is_inexact(each.array)),
            _result_of(worst),
        )


class _Result(NamedTuple):
    """The result of an operation: its dtype and shape, and what in it is not finite."""

    dtype: str
    shape: tuple[int, ...]
    infinite: int
    nan: int
    first: tuple[int, ...]


def _event(
    operation: str,
    line: str,
    path: str,
    run: Any,
    turns: tuple[int, ...],
    operands: tuple[OverflowOperand, ...],
    result: _Result,
    reaches: tuple[str, ...],
    gradients: int,
) -> Overflow:
    return Overflow(
        operation, line, path, run, turns, operands, *result, reaches=reaches, gradients=gradients
    )


def _severity(array: Any) -> int:
    """Returns 0 for finite numbers, 1 for infinities among them, 2 for NaN."""
    return int(_severity_of(array)) if is_inexact(array) else 0


@jax.jit
def _severity_of(x: Any) -> Any:
    return jnp.where(jnp.any(jnp.isnan(x)), 2, jnp.where(jnp.any(jnp.isinf(x)), 1, 0))


def _result_of(array: Any) -> _Result:
    x = np.asarray(array).astype(np.complex64 if jnp.iscomplexobj(array) else np.float64)
    bad = ~np.isfinite(x)
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    nan = int(np.isnan(x).sum())
    return _Result(array.dtype.name, x.shape, int(bad.sum()) - nan, nan, index)


def _operand_of(array: Any) -> OverflowOperand:
    x = np.abs(np.asarray(array).astype(np.complex64 if jnp.iscomplexobj(array) else np.float64))
    finite = x[np.isfinite(x)]
    nonzero = finite[finite > 0]
    return OverflowOperand(
        array.dtype.name,
        x.shape,
        float(finite.max(initial=0)),
        float(nonzero.min()) if nonzero.size else 0.0,
    )


_SHOWN = 3


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
