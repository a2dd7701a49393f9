"""Catches the values that leave each scope of a program: those that a module hands on.

The program runs again under the trace of the caller, so that it can be compiled. A value leaves a
scope if an operation outside of it reads it, or if the program returns it; a value that is computed
outside of all scopes leaves none. The values of the turns of a scan are stacked.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp  # noqa: F401 (for the doctest)
from jax.extend import core

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program import compat
from jaxmp._program.op_classes import CLASSES, OPAQUE, OpClass
from jaxmp._program.program import Op, Program, read
from jaxmp._program.tracing import combine, partition, trace_call
from jaxmp._program.wiring import Wiring
from jaxmp._tools.diagnostics.rerun import Key, Rerun
from jaxmp._tools.inspect.equations import Site, site_of
from jaxmp._tools.inspect.lines import direction, line_of, module_path, scopes_of

ANCHOR = "name"  # the primitive of `jax.ad_checkpoint.checkpoint_name`


class ScopeValue(NamedTuple):
    """A value that leaves a scope.

    Attributes:
      path: the scope, names joined by `/`; `""` is outside of all scopes.
      scopes: those that it leaves, outermost first: its own, and some around that one.
      anchor: the name that `checkpoint_name` gave it, or `""`.
      direction: `"forward"`, `"backward"`, `"recomputed"`, or `""` without gradients.
      operation: the primitive.
      line: the line of the user's code.
      shape: its shape in one turn of the loops around it.
      dtype: its dtype.
      turns: the lengths of the scans around it, outermost first.
      order: its place in the program, to sort by; None where the number of a turn belongs.
    """

    path: str
    scopes: tuple[str, ...]
    anchor: str
    direction: str
    operation: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    turns: tuple[int, ...]
    order: tuple[int | None, ...]


class NotEntered(NamedTuple):
    """An operation with programs inside of which nothing is caught: its name, scope and line."""

    operation: str
    path: str
    line: str


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["out", "saved"],
    meta_fields=["values", "not_entered"],
)
@dataclasses.dataclass(frozen=True)
class Capture:
    """The results of a function, and the values that left its scopes. A jitted function returns it.

    Attributes:
      out: the results of the function; for those that are not arrays, see `scope_values`.
      saved: what `keep` returned for each value; stacked along first axes for the scans around it.
      values: the place of each of them, in the order of the program.
      not_entered: the operations inside of which nothing was caught.
    """

    out: Any
    saved: tuple[Any, ...]
    values: tuple[ScopeValue, ...]
    not_entered: tuple[NotEntered, ...]


# Returns the names of the scope of an equation: `scope_of_module`, or `scope_of_line`.
ScopeOf = Callable[[Site], tuple[str, ...]]


def scope_of_module(site: Site) -> tuple[str, ...]:
    """Returns the names of the modules and named scopes around an equation."""
    path = module_path(scopes_of(site))
    return tuple(path.split("/")) if path else ()


def scope_of_line(site: Site) -> tuple[str, ...]:
    """Returns the line of the user's code as the scope of an equation."""
    return (line_of(site),)


def scope_values(
    fun: Callable[..., Any],
    keep: Callable[[Any], Any] = lambda value: value,
    scope_of: ScopeOf = scope_of_module,
    join: Callable[[Any], Any] | None = None,
) -> Callable[..., Capture]:
    """Returns the function together with the values that leave its scopes.

    Args:
      fun: a function of pytrees.
      keep: a function of an array, which returns the arrays to save, such as a histogram of it. In
        a scan it runs in each turn.
      scope_of: returns the scope of an equation.
      join: makes one array of those of several turns or devices, stacked along a first axis; zeros
        stand for nothing.

    Returns:
      A function with the arguments of `fun`, which may be jitted. It looks into jit, scan, cond,
      checkpoint, and functions with derivatives of their own; with `join` also into while and
      shard_map.

    >>> def net(x):
    ...     with jax.named_scope("up"):
    ...         h = 2 * x
    ...     return jnp.sum(h)
    >>> capture = jax.jit(scope_values(net))(jnp.ones(3))
    >>> [(value.path, value.operation) for value in capture.values], capture.saved[0].tolist()
    ([('up', 'mul')], [2.0, 2.0, 2.0])
    """

    def catching(*args: Any, **kwargs: Any) -> Capture:
        static, arrays = partition((args, kwargs))
        traced = trace_call(fun, static, arrays)
        catcher = _Catcher(keep, scope_of, join)
        order: list[Key] = []

        def run(*arguments: Any) -> list[Any]:
            rules = catcher.but(saved={})
            results = rules.run(read(traced.closed), arguments)
            order[:] = sorted(rules.saved)
            return [*results, *(rules.saved[key] for key in order)]

        # `order` and the places are known only after the program ran.
        axes = traced.axes
        both = axes.run(run, arrays) if axes.mesh is None else _on_automatic(run, traced, arrays)
        count = len(both) - len(order)
        values = tuple(catcher.values[key] for key in order)
        out = combine(traced.returned, both[:count])
        return Capture(out, tuple(both[count:]), values, tuple(dict.fromkeys(catcher.not_entered)))

    return catching


def _on_automatic(run: Callable[..., list[Any]], traced: Any, arrays: Sequence[Any]) -> list[Any]:
    # Each result has a spec there: the trace has those of the program, and saved arrays are whole.
    mesh = traced.axes.mesh
    with jax.sharding.use_abstract_mesh(mesh):
        axes = tuple(mesh.explicit_axes)
        free = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.closed.in_avals]
        shape = jax.eval_shape(lambda *xs: run(*xs), *free)
        specs = [*traced.axes.specs, *[jax.P()] * (len(shape) - len(traced.axes.specs))]
        return list(jax.sharding.auto_axes(run, axes=axes, out_sharding=specs)(*arrays))


class _Catcher(Rerun):
    def __init__(
        self,
        keep: Callable[[Any], Any],
        scope_of: ScopeOf,
        join: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__()
        self._keep, self._scope_of, self.join = keep, scope_of, join
        self._sites: list[Site] = []
        self._scopes: list[tuple[str, ...]] = []
        self._leaving: dict[int, int] = {}
        self.values: dict[Key, ScopeValue] = {}
        self.not_entered: list[NotEntered] = []

    def run(self, program: Program, arguments: Any) -> list[Any]:
        # The readers of a value decide which scopes it leaves: they are known before it is.
        self._sites = [site_of(op, self.outer) for op in program.ops]
        self._scopes = list(map(self._scope_of, self._sites))
        outer = () if self.outer is None else self._scope_of(self.outer)
        self._leaving = _leaving(program, self._scopes, outer)
        return super().run(program, arguments)

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        results = super().operation(op, operands)
        site, scope = self._sites[op.number], self._scopes[op.number]
        for i, (number, value) in enumerate(zip(op.outputs, results, strict=True)):
            if not is_inexact(value) or compat.is_ref(value):
                continue
            # `checkpoint_name` names a value wherever it is: it counts even if it stays inside.
            if number in self._leaving or op.name == ANCHOR:
                # What is inside of an operation comes before its results.
                key = (*self.key, 2 * op.number + 1, i)
                stays = self._leaving.get(number, len(scope))
                self.saved[key] = self._keep(value)
                self.values[key] = self._value(site, scope, stays, value, key)
        return results

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        if site.name in OPAQUE or CLASSES.get(site.name) is OpClass.CONTROL:
            self._note(site)
        return super().whole(site, operands)

    def while_loop(self, site: Site, operands: list[Any]) -> list[Any]:
        if not self.join:
            self._note(site)
        return super().while_loop(site, operands)

    def _note(self, site: Site) -> None:
        path = "/".join(scope_of_module(site))
        self.not_entered.append(NotEntered(site.name, path, line_of(site)))

    def _value(
        self, site: Site, scope: tuple[str, ...], stays: int, value: Any, key: Key
    ) -> ScopeValue:
        anchor = str(site.params["name"]) if site.name == ANCHOR else ""
        around: list[Wiring] = []
        outer = site.outer
        while outer is not None:
            around.insert(0, outer.wiring)
            outer = outer.outer
        return ScopeValue(
            "/".join(scope),
            tuple("/".join(scope[:n]) for n in range(stays + 1, len(scope) + 1)),
            anchor,
            direction(scopes_of(site)),
            site.name,
            line_of(site),
            tuple(value.shape),
            value.dtype.name,
            tuple(wiring.known_turns for wiring in around if wiring.counted),
            _order(key, around),
        )


def _order(key: Key, around: Sequence[Wiring]) -> tuple[int | None, ...]:
    """Returns a place with None for the number of the turn, behind each scan."""
    order: list[int | None] = []
    numbers = iter(key)
    for wiring in around:
        order.append(next(numbers))
        if wiring.counted:
            order.append(None)
        if wiring.chooses:
            order.append(next(numbers))
    return (*order, *numbers)


def _leaving(
    program: Program, scopes: Sequence[tuple[str, ...]], outer: tuple[str, ...]
) -> dict[int, int]:
    """Returns the values that leave the scope of their operation, and how many they stay in."""
    scoped = list(zip(program.ops, scopes, strict=True))
    maker = {number: scope for op, scope in scoped for number in op.outputs}
    # A program inside of an operation hands its results to the scope of that operation.
    reads = [(atom, scope) for op, scope in scoped for atom in op.inputs]
    reads += [(atom, outer) for atom in program.outputs]
    leaving: dict[int, int] = {}
    for atom, reader in reads:
        if isinstance(atom, core.Literal) or atom not in maker:
            continue
        own = maker[atom]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, reader, strict=False))
        if (shared := len(list(same))) < len(own):
            leaving[atom] = min(shared, leaving.get(atom, shared))
    # A cast of a value is not another value: neither of one from outside, nor of one that leaves.
    casts = {op.outputs[0]: op.inputs[0] for op in program.ops if op.name == "convert_element_type"}
    copies = {
        number
        for number, source in casts.items()
        if isinstance(source, core.Literal)
        or maker.get(source) != maker[number]
        or source in leaving
    }
    return {number: shared for number, shared in leaving.items() if number not in copies}
