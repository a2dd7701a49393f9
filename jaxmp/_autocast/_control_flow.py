"""Operations that contain programs: each is bound again around programs that were rewritten."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxmp import _compat
from jaxmp._autocast._custom_rules import custom_jvp, custom_vjp
from jaxmp._autocast._flow import Context, Plan, ResultsIn, plan
from jaxmp._autocast._interpreter import run, traced
from jaxmp._autocast._kinds import FLOAT32, Kind, State, entering, fits, joined
from jaxmp._autocast._recurrence import adds_up
from jaxmp._autocast._scopes import Region
from jaxmp._autocast._steps import States, Step, alone, is_ours
from jaxmp._dtypes import DType
from jaxmp._float32_sums import accumulator, is_half
from jaxmp._program import JITS, Op, read
from jaxmp._reduction import gradient_of

# What a scan may carry in 16 bits if its body returns it so: activations, in whatever dtype they
# begin. Zeros are not among them, with which sums begin, nor params laid out for an ensemble.
_MAY_BE_LOW = frozenset({Kind.LOW, Kind.BRIEF, Kind.PLACED})


def plan_control(op: Op, states: States, context: Context, region: Region) -> Step:
    """How an operation runs that contains programs."""
    if op.name in JITS:
        return _jit(op, states, context)
    planner = _PLANNERS.get(op.name)
    return alone(op, states) if planner is None else planner(op, states, context, region)


def planned(jaxpr: Any, states: States, context: Context, op: Op, *, widened: bool = False) -> Plan:
    """The plan of a program inside of an operation, made once for each way that it is called."""
    inside = context.inside(op)
    names = context.regions.deciding(inside.prefix)
    states = [state and entering(state) for state in states]
    results_in: ResultsIn = "float32" if widened else "low"
    key = ("plan", id(jaxpr), tuple(states), names, inside.functions, results_in)
    if key not in context.memo:
        # The jaxpr is kept, so that its id is not given to another.
        context.memo[key] = plan(read(jaxpr), states, inside, results_in=results_in), jaxpr
    return context.keep(op, jaxpr, context.memo[key][0])


def changes(plan: Plan) -> bool:
    """Whether a plan asks for anything that was not traced so."""
    for step in plan.steps:
        if step.run is not None and step.op.name != "convert_element_type":
            return True
        for aval, want in zip(step.op.in_avals, step.wants, strict=True):
            if want is not None and want != aval.dtype:
                return True
        if step.params or any(step.sources):
            return True
    return False


def in_dtypes(states: States) -> list[DType | None]:
    return [state and state.dtype for state in states]


def _jit(op: Op, states: States, context: Context, *, widened: bool = False) -> Step:
    inner = planned(op.params["jaxpr"], states, context, op, widened=widened)
    if not changes(inner) and _as_traced(op, inner):
        return _unchanged(op, states, inner)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        new = _traced_once(context, inner, values)
        return _compat.bind(op.equation, values, jaxpr=new)

    again = None if widened else lambda: _jit(op, states, context, widened=True)
    return Step(op, in_dtypes(states), inner.results, run=bind, widened=again)


def _as_traced(op: Op, inner: Plan) -> bool:
    """Whether results come in the dtypes that they were traced in: also those passed through."""
    made = zip(inner.results, op.out_avals, strict=True)
    return all(state is None or state.dtype == aval.dtype for state, aval in made)


def _unchanged(op: Op, states: States, inner: Plan) -> Step:
    """An operation whose programs are all right as they are."""
    step = alone(op, states)
    step.results = inner.results
    return step


def _traced_once(context: Context, inner: Plan, values: Sequence[Any]) -> Any:
    """The jaxpr of a plan; the same for calls that are alike: it is compiled once."""
    key = ("jaxpr", id(inner), *map(_compat.type_of, values))
    if key not in context.memo:
        context.memo[key] = traced(inner, values)
    return context.memo[key]


def _remat(
    op: Op, states: States, context: Context, region: Region, *, widened: bool = False
) -> Step:
    # What goes in is what a checkpoint keeps: activations in 16 bits.
    states = [state and _stored(state, region) for state in states]
    inner = planned(op.params["jaxpr"], states, context, op, widened=widened)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        new = _compat.without_consts(_traced_once(context, inner, values))
        return _compat.bind(op.equation, values, jaxpr=new)

    again = None if widened else lambda: _remat(op, states, context, region, widened=True)
    return Step(op, in_dtypes(states), inner.results, run=bind, widened=again)


def _scan(op: Op, states: States, context: Context, region: Region) -> Step:
    body = op.params["jaxpr"]
    consts, carries = _compat.scan_counts(op.params)
    carry = slice(consts, consts + carries)
    avals = op.in_avals
    inside = list(states)
    program = read(body)
    for i in range(carries):
        at = consts + i
        first = inside[at] = _first_carry(states[at], avals[at], region)
        if first is None or first.kind not in _BECOMES_LOW or avals[at].dtype != FLOAT32:
            continue
        if adds_up(program, at, i):
            inside[at] = State(Kind.WIDE, FLOAT32)
    low = None if region.exact else region.low
    inner, inside = _settled(body, inside, carry, avals, context, op, low=low)
    out: list[State | None] = list(inside[carry])
    for state in inner.results[carries:]:
        out.append(_stored(state, region))

    def bind(op: Op, values: list[Any]) -> list[Any]:
        avals = [_compat.type_of(v) for v in values]
        avals[consts + carries :] = [_compat.unstacked(aval) for aval in avals[consts + carries :]]
        new = _traced_as(context, inner, avals, out)
        if not any(map(is_half, values[:consts])):
            return _compat.bind(op.equation, values, jaxpr=new)
        return _summing_scan(op.params, new, values)

    return Step(op, in_dtypes(inside), out, run=bind)


def _summing_scan(params: dict[str, Any], body: Any, values: list[Any]) -> list[Any]:
    """A scan all of whose turns read 16-bit arrays: their gradients are added up in float32."""
    consts, carries = _compat.scan_counts(params)
    end = consts + carries
    sums = [accumulator(x) if is_half(x) else None for x in values[:consts]]
    run_body = core.jaxpr_as_fun(body)

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [
            x if total is None else gradient_of(x, total)
            for x, total in zip(values, sums, strict=False)
        ]
        made = run_body(*given, *carry, *xs)
        return made[:carries], made[carries:]

    names = {"length", "reverse", "unroll", "_split_transpose"}.intersection(params)
    options = {name: params[name] for name in names}
    carry, ys = lax.scan(turn, values[consts:end], values[end:], **options)
    return [*carry, *ys]


# Rows are exact as long as each turn returns rows: an embedding, but also phases by position.
_BECOMES_LOW = frozenset({Kind.LOW, Kind.ROWS})


def _first_carry(state: State | None, aval: Any, region: Region) -> State | None:
    """What a scan is first assumed to carry."""
    if state is None or aval.dtype != FLOAT32:
        return state and State(Kind.LOW, aval.dtype)
    if state.kind in _MAY_BE_LOW and not region.exact:
        return State(Kind.LOW, state.dtype if state.kind is Kind.LOW else region.low)
    return _no_literal(state)


def _settled(
    body: Any,
    inside: list[State | None],
    carry: slice,
    avals: list[Any],
    context: Context,
    op: Op,
    *,
    low: DType | None = None,
) -> tuple[Plan, list[State | None]]:
    """What a loop carries once nothing changes any more: each turn changes one carry for good.

    With a dtype `low`, what begins as rows and goes on as an activation is carried in it.
    """
    begun = list(inside)
    while True:
        inner = planned(body, inside, context, op)
        returned = inner.results[: carry.stop - carry.start]
        new = list(inside)
        new[carry] = [
            _next_carry(begin, end, aval, low)
            for begin, end, aval in zip(inside[carry], returned, avals[carry], strict=True)
        ]
        if new == inside:
            return inner, inside
        for i, kinds in enumerate(zip(*map(_kinds, (begun, inside, new)), strict=True)):
            if kinds[0] is kinds[2] is not kinds[1]:
                new[i] = State(Kind.WIDE, FLOAT32)  # or it went round in circles
        # What depends on rows that have become an activation is judged when they are one.
        streams = [
            end if _becomes_low(begin, end) else begin
            for begin, end in zip(inside, new, strict=True)
        ]
        inside = new if streams == inside else streams


def _kinds(states: States) -> list[Kind | None]:
    return [state and state.kind for state in states]


def _becomes_low(begin: State | None, end: State | None) -> bool:
    rows = begin is not None and begin.kind is Kind.ROWS
    return rows and end is not None and end.kind is Kind.LOW


def _next_carry(
    begin: State | None, end: State | None, aval: Any, low: DType | None
) -> State | None:
    if begin is None or end is None or aval.dtype != FLOAT32:
        return begin
    if begin.kind is Kind.ROWS and end.kind in _MAY_BE_LOW and low is not None:
        return State(Kind.LOW, end.dtype if end.kind is Kind.LOW else low)
    if begin.kind is Kind.LOW:
        if end.kind is Kind.ROWS:
            return State(Kind.ROWS, FLOAT32)  # the next token's embedding, or its phases
        stays = end.kind in _MAY_BE_LOW and (end.kind is not Kind.LOW or end.dtype == begin.dtype)
        literal = end.kind is Kind.LITERAL and fits(end.value, begin.dtype)
        return begin if stays or literal else State(Kind.WIDE, FLOAT32)
    return begin if end.kind is begin.kind else State(Kind.WIDE, FLOAT32)


def _stored(state: State | None, region: Region) -> State | None:
    """What is kept for long, by scans and checkpoints: activations in 16 bits.

    Rows of params have not met any. They may be an embedding, or phases that a cosine is taken of.
    """
    if state is not None and state.kind is Kind.BRIEF and not region.exact:
        return State(Kind.LOW, region.low)
    return state and _no_literal(state)


def _no_literal(state: State) -> State:
    return State(Kind.TABLE, state.dtype) if state.kind is Kind.LITERAL else state


def _traced_as(context: Context, inner: Plan, avals: list[Any], out: States) -> Any:
    """The jaxpr of a plan whose results come in given dtypes, none of them weak."""
    key = ("body", id(inner), tuple(avals), tuple(out))
    if key not in context.memo:

        def body(*args: Any) -> list[Any]:
            return [
                made if state is None else lax.convert_element_type(made, state.dtype)
                for made, state in zip(run(inner, args), out, strict=True)
            ]

        context.memo[key] = _compat.trace(body, avals)
    return context.memo[key]


def _while(op: Op, states: States, context: Context, region: Region) -> Step:
    params = op.params
    test, body = params["cond_nconsts"], params["body_nconsts"]
    carry = slice(body, None)
    avals = op.in_avals[test:]
    inside: list[State | None] = list(states[test:])
    # The number of turns is not known, nor what the carry is for: it keeps its dtype.
    inside[carry] = [
        None if state is None else _kept(state, aval)
        for state, aval in zip(inside[carry], avals[carry], strict=True)
    ]
    stop = len(inside)
    inner, inside = _settled(params["body_jaxpr"], inside, slice(body, stop), avals, context, op)
    tested = [*states[:test], *inside[carry]]
    condition = planned(params["cond_jaxpr"], tested, context, op)
    out = list(inside[carry])

    def bind(op: Op, values: list[Any]) -> list[Any]:
        avals = [_compat.type_of(v) for v in values]
        of_carry = avals[test + body :]
        new = _traced_as(context, inner, avals[test:], out)
        check = _traced_as(context, condition, [*avals[:test], *of_carry], condition.results)
        return _compat.bind(op.equation, values, body_jaxpr=new, cond_jaxpr=check)

    return Step(op, in_dtypes([*states[:test], *inside]), out, run=bind)


def _kept(state: State, aval: Any) -> State:
    if aval.dtype != FLOAT32:
        return State(Kind.LOW, aval.dtype)
    if state.kind in (Kind.LOW, Kind.BRIEF, Kind.LITERAL):
        return State(Kind.TABLE if state.kind is Kind.LITERAL else Kind.WIDE, FLOAT32)
    return State(state.kind, FLOAT32)


def _cond(op: Op, states: States, context: Context, region: Region) -> Step:
    branches = op.params["branches"]
    plans = [planned(branch, states[1:], context, op) for branch in branches]
    out: list[State | None] = []
    for results in zip(*(each.results for each in plans), strict=True):
        floats = [state for state in results if state is not None]
        out.append(_merged(floats) if len(floats) == len(results) else None)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        avals = [_compat.type_of(v) for v in values[1:]]
        new = tuple(_traced_as(context, each, avals, out) for each in plans)
        return _compat.bind(op.equation, values, branches=new)

    return Step(op, in_dtypes(states), out, run=bind)


def _merged(states: list[State]) -> State:
    state = joined(states)
    if state.kind is Kind.LOW and not all(fits(s.value, state.dtype) for s in states):
        return State(Kind.WIDE, FLOAT32)
    return _no_literal(state)


def _shard_map(op: Op, states: States, context: Context, region: Region) -> Step:
    params = op.params
    inner = planned(params["jaxpr"], states, context, op)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        mapped = _compat.shard_map(params, lambda *args: tuple(run(inner, args)))
        return list(mapped(*values))

    return Step(op, in_dtypes(states), inner.results, run=bind)


def _same_signature(name: str) -> Callable[[Op, States, Context, Region], Step]:
    """For an operation that must keep the dtypes of what goes in and out."""

    def plan_it(op: Op, states: States, context: Context, region: Region) -> Step:
        body = op.params[name]
        step = alone(op, states, exact=Kind.BRIEF)
        inside = [
            state and _kept(state, aval) for state, aval in zip(states, op.in_avals, strict=True)
        ]
        inner = planned(body, inside, context, op)
        out = [State(Kind.WIDE, aval.dtype) if is_ours(aval) else None for aval in op.out_avals]

        def bind(op: Op, values: list[Any]) -> list[Any]:
            avals = [_compat.type_of(v) for v in values]
            new = _traced_as(context, inner, avals, out)
            return _compat.bind(op.equation, values, **{name: new})

        step.run = bind
        return step

    return plan_it


_PLANNERS: dict[str, Callable[[Op, States, Context, Region], Step]] = {
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "custom_vmap_call": _same_signature("call"),
    "closed_call": _same_signature("call_jaxpr"),
    "core_call": _same_signature("call_jaxpr"),
}
