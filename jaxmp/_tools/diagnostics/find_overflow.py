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
from jaxmp._numerics.tree import leaf_names, split_floats
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program import compat
from jaxmp._program.mesh_axes import on_automatic_axes_here, on_automatic_mesh
from jaxmp._program.op_classes import LOGARITHMS
from jaxmp._program.program import read
from jaxmp._program.tracing import combine, partition, trace_call
from jaxmp._tools.diagnostics.inputs import check_numbers
from jaxmp._tools.diagnostics.one_by_one import OneByOne, Place, RunValue
from jaxmp._tools.diagnostics.overflow import Overflow, OverflowOperand
from jaxmp._tools.inspect.lines import UNKNOWN, direction, line_of, module_path, scopes_of
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

    A step is skipped if a gradient is infinite or NaN, and by then every gradient may be. This
    evaluates loss and gradients once more, one operation after the other, in the dtypes that the
    step has, and follows infinities and NaN back to where they began. It looks into `jit`, `scan`,
    `while`, `cond`, `checkpoint`, functions with derivatives of their own and `shard_map`. It runs
    many times slower than a step: call it when something is wrong, with the params and the batch of
    that step.

    An infinity that a program uses, such as -inf in a mask, does not count if the results are
    finite. -inf from a logarithm, from an argument or written in the program is named only if there
    is no other fault.

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
      The operation, with its line, module, pass, operands and the results that it reaches; None if
      loss, gradients, their norm and `aux` are finite.

    Raises:
      TypeError: for arrays without numbers, as under `jit`, or as `jaxmp.value_and_grad` does.
      ValueError: if the arrays were donated, or as `jaxmp.autocast` does.

    >>> params, x = {"w": jnp.full((2, 2), 400.0)}, jnp.full((1, 2), 100.0)
    >>> loss = lambda p, x: jnp.sum(x @ p["w"] @ p["w"])
    >>> fault = find_overflow(loss, params, x, policy="mixed_float16")
    >>> fault.operation, fault.direction, fault.infinite, fault.operands[0].largest
    ('dot_general', 'forward', 2, 100.0)
    """
    fun = loss_fn if policy is None else autocast(loss_fn, policy)
    gradient = value_and_grad(fun, has_aux=has_aux, loss_scale=loss_scale)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        out, gradients = gradient(*args, **kwargs)
        loss, aux = out if has_aux else (out, ())
        return loss, gradients, optax.tree.norm(split_floats(gradients)[0]), aux

    # The norm too: it may overflow where each gradient is finite, and the step is skipped then.
    call = ((params, *args), kwargs)
    check_numbers(call, "find_overflow")
    static, arrays = partition(call)
    traced = trace_call(evaluate, static, arrays)
    # From `combine`, which sorts keyword arguments as the program has them.
    (_, *batch), others = combine(static, arrays)
    parts = [("params", params), ("batch", batch[0] if len(batch) == 1 else batch), *others.items()]
    names = [place for name, part in parts for place in leaf_names({name: part})]
    # Other leaves, such as functions, are not arguments of the program.
    are_arrays = zip(names, static.are_arrays, strict=True)
    names = [name for name, is_array in are_arrays if is_array]
    # Operations that run alone have no shardings in their types, as explicit mesh axes need.
    operands = [on_automatic_mesh(jnp.asarray(x)) for x in arrays]
    search = _Search()
    with on_automatic_axes_here(arrays):
        values = [search.argument(x, name) for x, name in zip(operands, names, strict=True)]
        results = OneByOne(search.see, search.join).run(read(traced.closed), values)
        loss, gradients, norm, aux = combine(traced.returned, results)
        grads, auxes = _leaves_by_name(gradients, "gradients"), _leaves_by_name(aux, "aux")
        return search.first([{"loss": loss}, grads, {"norm": norm}, auxes], len(grads))


def _leaves_by_name(tree: PyTree, name: str) -> dict[str, Any]:
    return dict(zip(leaf_names({name: tree}), jax.tree.leaves(tree), strict=True))


class _Level(enum.IntEnum):
    """How bad an array is: the larger, the worse."""

    FINITE = 0
    MASKED = 1  # -inf alone, as in masks
    INFINITE = 2
    NAN = 3


class _Note(NamedTuple):
    """How bad an array is, and the numbers of the events that made it so."""

    level: _Level = _Level.FINITE
    events: frozenset[int] = frozenset()


class _Event(NamedTuple):
    """Something that is not finite, and began here.

    Attributes:
      rank: 0 if it is a fault, larger if it may be on purpose: 1 for -inf of a logarithm or of an
        argument, 2 for an infinity in the program. The lowest rank is named, and of that the first.
      report: makes the report, from the results that it reaches and the number of gradients.
    """

    rank: int
    report: Callable[[tuple[str, ...], int], Overflow]


class _Search:
    """Follows infinities and NaN: each array has a note of the events in which they began."""

    def __init__(self) -> None:
        self._events: list[_Event] = []

    def argument(self, array: Any, name: str) -> RunValue:
        """Returns an argument of the program."""
        # A param that is not finite is a fault of an earlier step: its name is the answer.
        level = _level(array)
        if not level:
            return RunValue(array, _Note())
        report = functools.partial(Overflow, "argument", name, "", "", (), (), *_result_of(array))
        return RunValue(array, _Note(level, self._new_event(level is _Level.MASKED, report)))

    def see(self, place: Place, operands: list[RunValue], results: list[Any]) -> list[_Note]:
        """Returns the notes of the results of an operation."""
        # An operation may write to arrays: what it leaves in them is a result, too.
        refs = [operand for operand in operands if compat.is_ref(operand.array)]
        arrays = [*results, *(ref.array for ref in refs)]
        levels = list(map(_level, arrays))
        notes = [_Note()] * len(arrays)
        if any(levels):
            sources = [self._note_of(operand, place) for operand in operands]
            events = frozenset().union(*(note.events for note in sources if note.level))
            before = max((note.level for note in sources), default=_Level.FINITE)
            # A worse result than all operands is an event of its own. With operands that are not
            # finite it may only hand these on: -inf squared is inf. It began here if numbers are
            # bad elsewhere than theirs, or if NaN came of masks, as from -inf - -inf.
            if max(levels) > before and (
                not before
                or (before is _Level.MASKED and max(levels) is _Level.NAN)
                or _breaks_other_places(arrays, operands)
            ):
                worst = arrays[levels.index(max(levels))]
                # -inf as the logarithm of zero, which an exponential may take back.
                on_purpose = max(levels) is _Level.MASKED and place.site.name in LOGARITHMS
                report = self._report_at(place.site.name, place, operands, worst)
                events |= self._new_event(on_purpose, report)
            notes = [_Note(level, events if level else frozenset()) for level in levels]
        for ref, note in zip(refs, notes[len(results) :], strict=True):
            ref.note = note
        return notes[: len(results)]

    def join(self, array: Any, notes: list[_Note | None]) -> _Note | None:
        """Returns the note of an array from the notes of its parts, or of its whole."""
        sources = [note for note in notes if note is not None]
        if not sources:  # constants, which are looked at where they are read
            return None
        events = frozenset().union(*(note.events for note in sources))
        return _Note(level, events) if (level := _level(array)) else _Note()

    def first(self, groups: list[dict[str, Any]], gradients: int) -> Overflow | None:
        """Returns the first operation from which a result is not finite; None if all are.

        Results are grouped, and have names: loss, gradients, their norm, and `aux`.
        """
        # What breaks an earlier group comes first: an `aux` that is not finite hides nothing.
        broken = []
        for group in groups:
            values = {name: x for name, x in group.items() if isinstance(x, RunValue)}
            notes = {name: self._note_of(value, None) for name, value in values.items()}
            broken.append({name: note for name, note in notes.items() if note.level})
        if not any(broken):
            return None
        # By rank first: a mask of -inf is written before the overflow of most programs.
        bad = next(group for group in broken if group)
        events = frozenset().union(*(note.events for note in bad.values()))
        begin = min(events, key=lambda number: (self._events[number].rank, number))
        _, grads, norm, _ = broken
        if grads:
            norm.clear()  # it follows from the gradients
        pairs = [pair for group in broken for pair in group.items()]
        reached = tuple(name for name, note in pairs if begin in note.events)
        return self._events[begin].report(reached, gradients)

    def _note_of(self, value: RunValue, place: Place | None) -> _Note:
        """Returns the note of a value; a constant of the program gets one where it is read."""
        note: _Note | None = value.note
        if note is not None:
            return note
        level = _level(value.array)
        if not level:
            return _Note()
        report = self._report_at("constant", place, [], value.array)
        # Programs write infinities on purpose, as masks and as starts of a maximum. NaN is a fault.
        return _Note(level, self._new_event(0 if level is _Level.NAN else 2, report))

    def _new_event(self, rank: int, report: Any) -> frozenset[int]:
        self._events.append(_Event(int(rank), report))
        return frozenset([len(self._events) - 1])

    def _report_at(
        self, name: str, place: Place | None, operands: list[RunValue], worst: Any
    ) -> Any:
        if place is None:
            return functools.partial(Overflow, name, UNKNOWN, "", "", (), (), *_result_of(worst))
        scopes = scopes_of(place.site)
        # In a `shard_map` of the first device on which it is not finite.
        device = int(np.argwhere(~np.isfinite(_as_numpy(worst)))[0][0]) if place.mapped else None
        arrays = [operand.array for operand in operands if is_inexact(operand.array)]
        return functools.partial(
            Overflow,
            name,
            line_of(place.site),
            module_path(scopes),
            direction(scopes),
            place.turns,
            tuple(_operand_of(array if device is None else array[device]) for array in arrays),
            *_result_of(worst if device is None else worst[device]),
        )


def _level(array: Any) -> _Level:
    return _Level(int(_level_of(_contents(array)))) if is_inexact(array) else _Level.FINITE


def _contents(array: Any) -> Any:
    # A mutable array (jax.new_ref) is read where it is: its value changes as the program runs.
    return array[...] if compat.is_ref(array) else array


# Compiled, so that one number comes from the device for each array, not four.
@jax.jit
def _level_of(x: Any) -> Any:
    infinite = jnp.isinf(x) if jnp.iscomplexobj(x) else jnp.isposinf(x)
    level = jnp.where(jnp.any(infinite), 2, jnp.where(jnp.any(jnp.isinf(x)), 1, 0))
    return jnp.where(jnp.any(jnp.isnan(x)), 3, level)


def _breaks_other_places(results: list[Any], operands: list[RunValue]) -> bool:
    """Whether a result is not finite in places where all operands are."""
    numbers = [_as_numpy(operand.array) for operand in operands if is_inexact(operand.array)]
    masks = [~np.isfinite(x) for x in numbers if not np.isfinite(x).all()]
    for result in filter(is_inexact, results):
        bad = ~np.isfinite(_as_numpy(result))
        # An operation that moves numbers, such as a product or a transpose, has no same places.
        if not all(
            mask.ndim == bad.ndim
            and all(n in (1, m) for n, m in zip(mask.shape, bad.shape, strict=True))
            for mask in masks
        ):
            continue
        same = [np.broadcast_to(mask, bad.shape) for mask in masks]
        if (bad & ~np.any(same, axis=0)).any():
            return True
    return False


def _as_numpy(array: Any) -> Any:
    # NumPy has no functions for bfloat16 and float8.
    return np.asarray(_contents(array)).astype(
        np.complex128 if jnp.iscomplexobj(array) else np.float64
    )


def _result_of(array: Any) -> tuple[Any, ...]:
    """Returns the attributes of an `Overflow` from `dtype` to `index`."""
    # Numbers, not the array: many events are never reported, and arrays would stay in memory.
    x = _as_numpy(array)
    bad = ~np.isfinite(x)
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    infinite = int(np.isinf(x).sum())
    return array.dtype.name, x.shape, infinite, int(bad.sum()) - infinite, index


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
