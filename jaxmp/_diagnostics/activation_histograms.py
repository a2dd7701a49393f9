"""Histograms of what the modules of a model hand on, counted as the program runs."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jax.extend import core

from jaxmp._autocast.api import autocast
from jaxmp._inspect.equations import Site
from jaxmp._inspect.lines import Lines, direction, module_path, scopes_of
from jaxmp._jaxpr import compat
from jaxmp._jaxpr.op_classes import CLASSES, OpClass
from jaxmp._jaxpr.rebind import call_again, entered, run_by_rule, scan_again
from jaxmp._jaxpr.tracing import partition, trace_call
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.histograms import (
    BINS,
    Histograms,
    counted_when,
    histogram_of,
    zeros_as,
)
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._primitives.varying import varying_axes


def activation_histograms(
    fun: Callable[..., Any],
    *args: Any,
    policy: str | jmp.Policy | PolicyRules | None = None,
    by_turn: bool = False,
    when: Any = None,
    **kwargs: Any,
) -> Histograms:
    """Counts the numbers that each module hands on, by their power of two.

    The gradients of params say that a layer loses numbers; the activations say where they begin to
    be lost. This runs the function once, and counts each value that is made in a module and read
    outside of it, for the module and for each module around it that the value leaves. Modules are
    those of Flax linen, and the scopes of `jax.named_scope`. Outside of all modules, each source
    line counts as one: it hands on what another line reads.

    It looks into `jit`, `scan`, `while`, `cond`, `checkpoint`, functions with derivatives of their
    own and `shard_map`. It may be called under `jit`, where nothing waits for the host.

    Of a function that computes gradients, such as `jax.grad(loss_fn)`, what the backward pass of a
    module hands on has a row of its own, `"layer (backward)"`: the cotangents of its inputs, and
    the gradients of its params.

    Values in 16 bits have lost already what their dtype cannot hold. To ask what float16 would
    lose, run the function in float32: without a policy.

    Args:
      fun: a function of arrays, such as a loss function.
      *args: its arguments.
      policy: a policy to run it under, by `jaxmp.autocast`. None for the dtypes that it has.
      by_turn: whether modules in a scan have a row for each turn, such as `"block/mlp[3]"`: for
        layers in a scan. Without it turns are added up.
      when: a boolean scalar, such as `step % 100 == 0`, of the program. Where it is false the
        function does not run, and the histograms are all zero.
      **kwargs: more arguments.

    Returns:
      The histograms, named by module, in the order in which values are made. Those of a loop that
      runs until a condition holds are added up.

    Raises:
      TypeError: if `when` is not a boolean scalar, or as `jaxmp.autocast` does.

    >>> def mlp(w, x):
    ...     with jax.named_scope("hidden"):
    ...         h = jnp.tanh(x @ w)
    ...     return jnp.sum(h)
    >>> found = activation_histograms(mlp, jnp.ones((4, 4)), jnp.ones((2, 4)))
    >>> found.names[0], float(found.counts[0].sum())
    ('hidden', 8.0)
    """
    named = fun if policy is None else autocast(fun, policy)
    static, arrays = partition((args, kwargs))
    traced = trace_call(named, static, arrays)
    taps = _Taps(by_turn)

    def count(*arrays: Any) -> list[Any]:
        _, records = taps.run(traced.closed, list(arrays), None)
        return taps.rows(records)

    on_axes = traced.axes._replace(specs=(jax.P(), jax.P()))

    @jax.jit
    def run(arrays: list[Any]) -> list[Any]:
        return on_axes.run(count, arrays)

    counts, largest = run(arrays) if when is None else counted_when(when, run, arrays)
    return Histograms(counts, largest, *taps.names_and_dtypes())


@dataclasses.dataclass(frozen=True)
class _Record:
    """What was counted for one name: arrays with an axis for each loop whose turns are kept."""

    counts: Any
    largest: Any

    def __add__(self, other: "_Record") -> "_Record":
        return _Record(self.counts + other.counts, jnp.maximum(self.largest, other.largest))

    def added_up(self) -> "_Record":
        """Returns the record without its first axis."""
        return _Record(self.counts.sum(0), self.largest.max(0, initial=0))


jax.tree_util.register_dataclass(_Record, ["counts", "largest"], [])
# By name; a name ends in "[]" for each loop whose turns are kept.
_Records = dict[str, _Record]
_TURN = "[]"


class _Taps:
    """Runs a program, and counts the values that leave modules."""

    def __init__(self, by_turn: bool) -> None:
        self._by_turn = by_turn
        self._lines = Lines()
        self._dtypes: dict[str, set[str]] = {}  # by name, in the order of the program
        self._rows: list[tuple[str, str]] = []

    def run(
        self, program: Any, args: Sequence[Any], outer: Site | None
    ) -> tuple[list[Any], _Records]:
        """Runs a program; returns its results, and what was counted.

        Args:
          program: a jaxpr, closed or open.
          args: its arguments.
          outer: the equation that it is in.
        """
        jaxpr, records = compat.open_jaxpr(program), _Records()
        left = self._left(jaxpr, outer)

        def rule(equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
            site = Site(equation, equation.primitive.name, 1, outer)
            made, inside = self._equation(site, operands)
            _add(records, inside)
            for variable, value in zip(equation.outvars, made, strict=True):
                if names := left.get(variable):
                    record = _Record(*histogram_of(value))
                    _add(records, dict.fromkeys(names, record))
                    for name in names:
                        self._dtypes.setdefault(name, set()).add(value.dtype.name)
            return made

        return run_by_rule(jaxpr, compat.consts_of(program), args, rule), records

    def rows(self, records: _Records) -> list[Any]:
        """Returns the counts and the largest magnitudes of all rows, and remembers their names."""
        self._rows.clear()
        counts, largest = [jnp.zeros((0, BINS))], [jnp.zeros(0)]
        for key in sorted(records, key=list(self._dtypes).index):
            name, record = key.replace(_TURN, ""), records[key]
            turns = itertools.product(*map(range, record.largest.shape))
            dtype = ", ".join(sorted(self._dtypes[key]))
            self._rows += [(name + "".join(f"[{i}]" for i in turn), dtype) for turn in turns]
            counts.append(record.counts.reshape(-1, BINS))
            largest.append(record.largest.reshape(-1))
        return [jnp.concatenate(counts), jnp.concatenate(largest)]

    def names_and_dtypes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names and the dtypes of the rows."""
        return tuple(name for name, _ in self._rows), tuple(dtype for _, dtype in self._rows)

    def _left(self, jaxpr: core.Jaxpr, outer: Site | None) -> dict[Any, list[str]]:
        """Returns the names of the modules that each value leaves, by variable."""
        made: dict[Any, tuple[tuple[str, ...], str]] = {}
        left: dict[Any, dict[str, None]] = {}

        def read(atom: Any, reader: tuple[str, ...]) -> None:
            if not isinstance(atom, core.Literal) and atom in made:
                path, ending = made[atom]
                shared = _common_length(path, reader)
                names = ("/".join(path[:end]) for end in range(shared + 1, len(path) + 1))
                left.setdefault(atom, {}).update((name + ending, None) for name in names)

        for equation in jaxpr.eqns:
            site = Site(equation, equation.primitive.name, 1, outer)
            path, run = self._path(site), direction(scopes_of(site))
            for atom in equation.invars:
                read(atom, path)
            if run != "recomputed":  # it was counted when it was computed first
                counted = filter(_is_counted, equation.outvars)
                ending = " (backward)" if run == "backward" else ""
                made.update(dict.fromkeys(counted, (path, ending)))
        for atom in jaxpr.outvars:
            read(atom, self._path(outer))
        return {variable: list(names) for variable, names in left.items() if names}

    def _path(self, site: Site | None) -> tuple[str, ...]:
        """Returns the modules around an equation, outermost first; else its line."""
        if site is None:
            return ()
        if modules := module_path(scopes_of(site)):
            return tuple(modules.split("/"))
        line = self._lines.of(site)
        # What a function makes is of its own lines. Those of a helper of JAX are the caller's.
        inside = [
            Site(equation, equation.primitive.name, 1, site)
            for body in _bodies(site)
            for equation in compat.open_jaxpr(body).eqns
        ]
        return () if inside and line not in map(self._lines.of, inside) else (line,)

    def _equation(self, site: Site, operands: list[Any]) -> tuple[list[Any], _Records]:
        if site.name in _LOOPS_AND_MAPS:
            return _LOOPS_AND_MAPS[site.name](self, site, operands)
        bodies = _bodies(site)
        if not bodies:
            return compat.bind(site.equation, operands), {}
        if not entered(site.equation):
            return self.run(bodies[0], operands, site)

        def function(values: Sequence[Any], _: Any) -> Any:
            return self.run(bodies[0], values, site)

        results, records = call_again(site.equation, operands, None, function)
        return results, records

    def _scan(self, site: Site, operands: list[Any]) -> tuple[list[Any], _Records]:
        params = site.equation.params
        (body,) = compat.bodies_of(site.equation)
        consts, count = compat.scan_counts(params)
        fixed, carry = operands[:consts], operands[consts : consts + count]

        def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
            made, records = self.run(body, [*fixed, *carry, *slices], site)
            return made[:count], (made[count:], records)

        last, (stacked, records) = scan_again(params, turn, carry, operands[consts + count :])
        return [*last, *stacked], self._after_turns(records)

    def _after_turns(self, records: _Records) -> _Records:
        if not self._by_turn:
            return {name: record.added_up() for name, record in records.items()}
        for name in [name for name in self._dtypes if name in records]:
            self._dtypes.setdefault(name + _TURN, self._dtypes[name])
        return {name + _TURN: record for name, record in records.items()}

    def _while(self, site: Site, operands: list[Any]) -> tuple[list[Any], _Records]:
        params = site.equation.params
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = operands[:tested], operands[tested : tested + consts]

        def body(values: list[Any]) -> tuple[list[Any], _Records]:
            return self.run(params["body_jaxpr"], [*of_body, *values], site)

        def turn(state: tuple[list[Any], _Records]) -> tuple[list[Any], _Records]:
            values, records = state
            made, inside = body(values)
            return made, {name: records[name] + inside[name] for name in records}

        def goes_on(state: tuple[list[Any], _Records]) -> Any:
            jaxpr = params["cond_jaxpr"]
            return core.jaxpr_as_fun(jaxpr)(*of_test, *state[0])[0]

        carry = operands[tested + consts :]
        _, none = zeros_as(body, carry)
        results, records = jax.lax.while_loop(goes_on, turn, (carry, none))
        return results, records

    def _cond(self, site: Site, operands: list[Any]) -> tuple[list[Any], _Records]:
        index, *rest = operands

        def branch(program: Any) -> Callable[..., Any]:
            return lambda *values: self.run(program, values, site)

        branches = list(map(branch, site.equation.params["branches"]))
        none: _Records = {}
        for each in branches:
            none |= zeros_as(each, *rest)[1]

        def with_all(each: Callable[..., Any]) -> Callable[..., Any]:
            def run(*values: Any) -> Any:
                made, records = each(*values)
                return made, none | records

            return run

        results, records = jax.lax.switch(index, list(map(with_all, branches)), *rest)
        return results, records

    def _shard_map(self, site: Site, operands: list[Any]) -> tuple[list[Any], _Records]:
        params = site.equation.params
        (body,) = compat.bodies_of(site.equation)
        axes = frozenset(params["newly_manual_axes"])

        def local(*values: Any) -> tuple[Any, ...]:
            made, records = self.run(body, values, site)
            return (*made, {name: _over_devices(x, axes, params) for name, x in records.items()})

        mapped = params | {"out_specs": (*params["out_specs"], jax.P())}
        *results, records = compat.shard_map_again(mapped, local)(*operands)
        return results, records


_LOOPS_AND_MAPS: dict[str, Callable[..., tuple[list[Any], _Records]]] = {
    "scan": _Taps._scan,
    "while": _Taps._while,
    "cond": _Taps._cond,
    "shard_map": _Taps._shard_map,
}


def _bodies(site: Site) -> list[Any]:
    """Returns the programs inside of control flow; kernels and solvers count as one operation."""
    is_control = CLASSES.get(site.name) is OpClass.CONTROL
    return compat.bodies_of(site.equation) if is_control else []


def _is_counted(variable: Any) -> bool:
    return is_inexact(variable.aval) and variable.aval.size > 0


def _add(records: _Records, others: _Records) -> None:
    for name, record in others.items():
        records[name] = records[name] + record if name in records else record


def _over_devices(record: _Record, axes: frozenset[str], params: dict[str, Any]) -> _Record:
    """Adds the records of all devices of a `shard_map`; what is the same on all counts once."""
    over = tuple(sorted(axes & varying_axes(record.counts) if params["check_vma"] else axes))
    if not over:
        return record
    return _Record(jax.lax.psum(record.counts, over), jax.lax.pmax(record.largest, over))


def _common_length(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Returns how many outer modules two paths share."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))
    return sum(1 for _ in same)
