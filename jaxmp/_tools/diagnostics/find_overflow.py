"""Finds the operation whose value first left the range of its dtype, in loss or gradients."""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.tree import split_floats
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program import compat
from jaxmp._program.mesh_axes import on_automatic_axes_here, on_automatic_mesh
from jaxmp._program.op_classes import LOGARITHMS
from jaxmp._program.program import read
from jaxmp._program.tracing import Static, combine, partition, trace_call
from jaxmp._tools.diagnostics.inputs import check_numbers
from jaxmp._tools.diagnostics.one_by_one import OneByOne, Place, RunValue
from jaxmp._tools.diagnostics.overflow import Overflow, OverflowOperand
from jaxmp._tools.inspect.lines import UNKNOWN, Lines, direction, module_path, scopes_of
from jaxmp._training.gradient_options import LossScaleLike
from jaxmp._training.gradients import value_and_grad


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
    that is not finite comes of it. -inf from a logarithm, from an argument or written in the
    program is named only if nothing else was found.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, as given to `make_train_step` or
        `value_and_grad`.
      params: the params. Make copies before a step that donates them.
      *args: the batch, and other arguments.
      policy: the policy of the step, for functions that it puts under autocast. None for models
        that have a policy of their own.
      loss_scale: the scale of the step: `state.loss_scale`, or a number.
      has_aux: whether `loss_fn` returns `(loss, aux)`, such as new batch statistics.
      **kwargs: collections, as the step passes them.

    Returns:
      The operation, with its line, module, pass, what it read and what came of it; None if loss,
      gradients, their norm and `aux` are finite.

    Raises:
      TypeError: for arrays without numbers, as under `jit`, or as `jaxmp.value_and_grad` does.
      ValueError: if the arrays were donated, or as `jaxmp.autocast` does.

    >>> params, x = {"w": jnp.full((2, 2), 400.0)}, jnp.full((1, 2), 100.0)
    >>> found = find_overflow(lambda p, x: jnp.sum(x @ p["w"]), params, x, policy="mixed_float16")
    >>> found.operation, found.direction, found.infinite, found.operands[0].largest
    ('dot_general', 'forward', 2, 100.0)
    """
    fun = loss_fn if policy is None else autocast(loss_fn, policy)
    gradient = value_and_grad(fun, has_aux=has_aux, loss_scale=loss_scale)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        out, gradients = gradient(*args, **kwargs)
        loss, aux = out if has_aux else (out, ())
        return loss, gradients, optax.tree.norm(split_floats(gradients)[0]), aux

    call = ((params, *args), kwargs)
    check_numbers(call, "find_overflow")
    static, arrays = partition(call)
    traced = trace_call(evaluate, static, arrays)
    search = _Search()
    given = [on_automatic_mesh(jnp.asarray(x)) for x in arrays]
    named = zip(given, _argument_names(static, arrays), strict=True)
    with on_automatic_axes_here(arrays):
        values = [search.argument(x, name) for x, name in named]
        results = OneByOne(search.see, search.join).run(read(traced.closed), values)
        loss, gradients, norm, aux = combine(traced.returned, results)
        grads, others = _named_leaves(gradients, "gradients"), _named_leaves(aux, "aux")
        return search.first([{"loss": loss}, grads, {"norm": norm}, others], len(grads))


def _named_leaves(tree: PyTree, name: str) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, behind a name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{name}/{_path_text(path)}".removesuffix("/"): leaf for path, leaf in leaves}


def _argument_names(static: Static, arrays: list[Any]) -> list[str]:
    """Returns what to call each array among the arguments."""
    (params, *args), kwargs = combine(static, arrays)
    parts = [("params", params), ("batch", args[0] if len(args) == 1 else args), *kwargs.items()]
    names = [place for name, part in parts for place in _named_leaves(part, name)]
    return [name for name, named in zip(names, static.are_arrays, strict=True) if named]


def _path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


class _Level(enum.IntEnum):
    """What in an array is not finite."""

    FINITE = 0
    MASKED = 1  # -inf alone, as in masks
    INFINITE = 2
    NAN = 3


class _Note(NamedTuple):
    """What is known of an array, and the numbers of the events that what is not finite is from."""

    level: _Level = _Level.FINITE
    events: frozenset[int] = frozenset()


class _Event(NamedTuple):
    """Something that is not finite, and began here.

    Attributes:
      rank: 0 if it is a fault, larger if it may be meant: 1 for -inf of a logarithm or given as an
        argument, 2 for an infinity in the program. The lowest rank is named, and of that the first.
      report: makes the report, of the results that it reaches and the number of gradients.
    """

    rank: int
    report: Callable[[tuple[str, ...], int], Overflow]


class _Search:
    """Notes of each array where what is not finite in it began."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._lines = Lines()

    def argument(self, array: Any, name: str) -> RunValue:
        """Returns an argument of the program."""
        level = _level(array)
        if not level:
            return RunValue(array, _Note())
        report = functools.partial(_report, "argument", name, "", "", (), (), _result_of(array))
        return RunValue(array, _Note(level, self._new(level is _Level.MASKED, report)))

    def see(self, place: Place, operands: list[RunValue], results: list[Any]) -> list[_Note]:
        """Returns what is known of the results of an operation."""
        written = [each for each in operands if compat.is_ref(each.array)]
        made = [*results, *(each.array for each in written)]
        levels = list(map(_level, made))
        notes = [_Note()] * len(made)
        if any(levels):
            known = [self._known(operand, place) for operand in operands]
            events = frozenset().union(*(note.events for note in known if note.level))
            before = max((note.level for note in known), default=_Level.FINITE)
            if max(levels) > before and (
                not before
                or (before is _Level.MASKED and max(levels) is _Level.NAN)
                or _is_beside(made, operands)
            ):
                worst = made[levels.index(max(levels))]
                meant = max(levels) is _Level.MASKED and place.site.name in LOGARITHMS
                events |= self._new(meant, self._report_at(place.site.name, place, operands, worst))
            notes = [_Note(level, events if level else frozenset()) for level in levels]
        for each, note in zip(written, notes[len(results) :], strict=True):
            each.note = note
        return notes[: len(results)]

    def join(self, array: Any, notes: list[_Note | None]) -> _Note | None:
        """Returns what is known of an array from what is known of its parts, or of its whole."""
        known = [note for note in notes if note is not None]
        if not known:  # constants, which are looked at where they are read
            return None
        events = frozenset().union(*(note.events for note in known))
        return _Note(level, events) if (level := _level(array)) else _Note()

    def first(self, groups: list[dict[str, Any]], gradients: int) -> Overflow | None:
        """Returns the first operation from which a result is not finite; None if all are.

        Results are grouped, and have names. What breaks a result of an earlier group comes first:
        of the loss, of the gradients (which are so many), of their norm.
        """
        broken = []
        for group in groups:
            values = {name: x for name, x in group.items() if isinstance(x, RunValue)}
            notes = {name: self._known(value, None) for name, value in values.items()}
            broken.append({name: note for name, note in notes.items() if note.level})
        if not any(broken):
            return None
        bad = next(group for group in broken if group)
        events = frozenset().union(*(note.events for note in bad.values()))
        begin = min(events, key=lambda number: (self._events[number].rank, number))
        _, grads, norm, _ = broken
        if grads:
            norm.clear()  # it says nothing new
        everything = [pair for group in broken for pair in group.items()]
        reached = tuple(name for name, note in everything if begin in note.events)
        return self._events[begin].report(reached, gradients)

    def _known(self, value: RunValue, place: Place | None) -> _Note:
        """Returns what is known of a value; a constant of the program is looked at here."""
        note: _Note | None = value.note
        if note is not None:
            return note
        level = _level(value.array)
        if not level:
            return _Note()
        report = self._report_at("constant", place, [], value.array)
        return _Note(level, self._new(0 if level is _Level.NAN else 2, report))

    def _new(self, rank: int, report: Any) -> frozenset[int]:
        self._events.append(_Event(int(rank), report))
        return frozenset([len(self._events) - 1])

    def _report_at(
        self, name: str, place: Place | None, operands: list[RunValue], worst: Any
    ) -> Any:
        if place is None:
            return functools.partial(_report, name, UNKNOWN, "", "", (), (), _result_of(worst))
        scopes = scopes_of(place.site)
        device = int(np.argwhere(~np.isfinite(_as_numpy(worst)))[0][0]) if place.mapped else None
        read = [each.array for each in operands if is_inexact(each.array)]
        return functools.partial(
            _report,
            name,
            self._lines.of(place.site),
            module_path(scopes),
            direction(scopes),
            place.turns,
            tuple(_operand_of(array if device is None else array[device]) for array in read),
            _result_of(worst if device is None else worst[device]),
        )


class _Result(NamedTuple):
    """The result of an operation: its dtype and shape, and what in it is not finite."""

    dtype: str
    shape: tuple[int, ...]
    infinite: int
    nan: int
    first: tuple[int, ...]


def _report(
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


def _level(array: Any) -> _Level:
    return _Level(int(_level_of(_contents(array)))) if is_inexact(array) else _Level.FINITE


def _contents(array: Any) -> Any:
    """Returns an array, or what a mutable reference to one holds."""
    return array[...] if compat.is_ref(array) else array


@jax.jit
def _level_of(x: Any) -> Any:
    infinite = jnp.isinf(x) if jnp.iscomplexobj(x) else jnp.isposinf(x)
    level = jnp.where(jnp.any(infinite), 2, jnp.where(jnp.any(jnp.isinf(x)), 1, 0))
    return jnp.where(jnp.any(jnp.isnan(x)), 3, level)


def _is_beside(results: list[Any], operands: list[RunValue]) -> bool:
    """Whether results are not finite where operands are: in other places, not with another sign."""
    read = [_as_numpy(each.array) for each in operands if is_inexact(each.array)]
    broken = [~np.isfinite(x) for x in read if not np.isfinite(x).all()]
    for result in filter(is_inexact, results):
        bad = ~np.isfinite(_as_numpy(result))
        same = [np.broadcast_to(x, bad.shape) for x in broken if _broadcasts(x.shape, bad.shape)]
        if len(same) == len(broken) and (bad & ~np.any(same, axis=0)).any():
            return True
    return False


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) == len(target) and all(
        n in (1, m) for n, m in zip(shape, target, strict=True)
    )


def _as_numpy(array: Any) -> Any:
    """Returns numbers of any dtype as NumPy computes with them."""
    return np.asarray(_contents(array)).astype(
        np.complex128 if jnp.iscomplexobj(array) else np.float64
    )


def _result_of(array: Any) -> _Result:
    x = _as_numpy(array)
    bad = ~np.isfinite(x)
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    infinite = int(np.isinf(x).sum())
    return _Result(array.dtype.name, x.shape, infinite, int(bad.sum()) - infinite, index)


def _operand_of(array: Any) -> OverflowOperand:
    x = np.abs(_as_numpy(array))
    finite = x[np.isfinite(x)]
    nonzero = finite[finite > 0]
    return OverflowOperand(
        array.dtype.name,
        x.shape,
        float(finite.max(initial=0)),
        float(nonzero.min()) if nonzero.size else 0.0,
    )
