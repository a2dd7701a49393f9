"""Finds the arrays that a loss function keeps in memory for its backward pass."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._numerics.dtypes import is_floating, nbytes_of
from jaxmp._program.facts import ForwardAnalysis, arguments_read, propagate
from jaxmp._program.op_classes import CALLS, ENCODES, SAME_NUMBERS
from jaxmp._program.program import Program
from jaxmp._tools.inspect.compiled import is_array
from jaxmp._tools.inspect.equations import Site, walk
from jaxmp._tools.inspect.lines import line_of, module_path, scopes_of
from jaxmp._tools.inspect.rows import Residual
from jaxmp._tools.inspect.summarize import branch_text

Kind = Literal["activations", "params"]


class NoLoss(Exception):
    """The function is not a loss, so that it has no residuals; the text says why."""


def check_loss(result: Any, first: Any) -> None:
    """Raises `NoLoss` unless a function with this result and first argument is a loss."""
    # As jax.value_and_grad has it: a scalar, or (scalar, aux).
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss = result[0] if is_pair else result
    if not is_floating(loss) or loss.shape != ():
        raise NoLoss("its result is neither a float scalar nor (a float scalar, something else)")
    if not any(is_floating(leaf) for leaf in jax.tree.leaves(first)):
        raise NoLoss("its first argument holds no floats to differentiate by")


def residuals(
    loss: Callable[..., Any], first: Any, others: Any, has_aux: bool, recomputes: bool
) -> tuple[tuple[Residual, ...], Program | None]:
    """Lists the arrays that `loss(first, others)` keeps for a backward pass by floats of `first`.

    Returns:
      The rows by dtype and line, largest first, without arguments and constants, which are in
      memory anyway. And the program of both passes; None without checkpoints (`recomputes`).

    Raises:
      NoLoss: if the function cannot be differentiated.
    """
    leaves, structure = jax.tree.flatten(first)  # an Equinox module has functions in it
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[i] for i in places]
    float_places = [i for i, array in enumerate(arrays) if is_floating(array)]

    def pullback(arrays: list[Any], others: Any) -> Any:
        def of_floats(floats: list[Any]) -> Any:
            filled = dict(enumerate(arrays)) | dict(zip(float_places, floats, strict=True))
            whole = dict(enumerate(leaves)) | dict(zip(places, filled.values(), strict=True))
            value = loss(jax.tree.unflatten(structure, whole.values()), others)
            return value[0] if has_aux else value

        return jax.vjp(of_floats, [arrays[i] for i in float_places])

    try:
        jaxpr, shapes = jax.make_jaxpr(pullback, return_shape=True)(arrays, others)
        body = walk(jaxpr)
        # Only tracing the backward pass reveals that JAX cannot transpose a `while`.
        backward = walk(jax.make_jaxpr(_applied)(*shapes))
        # Tracing both passes together doubles the work: only checkpoints need it, whose
        # recomputation stands between them.
        both: Program | None = None
        if recomputes:
            both = walk(jax.make_jaxpr(lambda *args: _applied(*pullback(*args)))(arrays, others))
    except Exception as error:  # anything that a user's function may raise under differentiation
        reason = str(error).partition("\n")[0]
        raise NoLoss(f"it cannot be differentiated: {type(error).__name__}: {reason}") from error
    # JAX hands on some arrays that the backward pass never reads, and compilers drop these: such as
    # the wide sources of codes, which only second derivatives need.
    are_read = arguments_read(backward, [True] * len(backward.outputs), lambda site: site.bodies)
    return _residual_rows(body, len(arrays), are_read), both


def _applied(value: Any, backward: Any) -> Any:
    return backward(jnp.ones_like(value))


def _residual_rows(program: Program, params: int, are_read: Sequence[bool]) -> tuple[Residual, ...]:
    """Returns the rows of a forward pass, which returns all arrays that it hands on.

    Its first arguments are the params, and the backward pass reads some of its results.
    """
    producers = _producers(program)
    arguments = {*program.inputs, *(number for number, _ in program.consts)}
    is_param = [i < params for i in range(len(program.inputs))]
    groups: dict[tuple[str, str, str, str, Kind], list[int]] = {}
    counted: set[Any] = set()
    outputs: tuple[Any, ...] = program.outputs
    results = zip(outputs, copies(program, is_param), are_read, strict=True)
    for atom, is_copy, is_read in results:
        origin = _origin(atom, producers)
        # Arguments are in memory anyway, whatever the backward pass keeps. One array may be
        # returned twice.
        is_free = isinstance(origin, core.Literal) or origin in arguments or atom in counted
        if is_free or not is_read:
            continue
        counted.add(atom)
        makers = _innermost_sites(atom, producers)
        where = line_of(makers[0]), module_path(scopes_of(makers[0]))
        kind: Kind = "params" if is_copy else "activations"
        aval = program.avals[atom]
        key = str(aval.dtype), *where, branch_text(makers), kind
        groups.setdefault(key, []).append(nbytes_of(aval))
    rows = [
        Residual(dtype, line, path, len(sizes), sum(sizes), branch, kind)
        for (dtype, line, path, branch, kind), sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


_Producers = dict[Any, tuple[Any, int]]


def _producers(program: Program) -> _Producers:
    return {number: (site, i) for site in program.ops for i, number in enumerate(site.outputs)}


def _origin(atom: Any, producers: _Producers) -> Any:
    """Returns the argument that a call merely passes through, or else the array itself."""
    while not isinstance(atom, core.Literal) and atom in producers:
        site, i = producers[atom]
        if site.name not in CALLS or len(site.bodies) != 1:
            return atom
        (body,) = site.bodies
        inner = _origin(body.outputs[i], _producers(body))
        # An argument that the call returns unchanged is followed on; anything else is its own.
        if isinstance(inner, core.Literal):
            return inner
        if inner not in body.inputs:
            return atom
        atom = site.inputs[body.inputs.index(inner)]
    return atom


def _innermost_sites(atom: Any, producers: _Producers) -> list[Site]:
    """Returns the operations that compute an array, inside of calls, scans and conditionals."""
    site, i = producers[atom]
    chooses = site.wiring.chooses
    makers: list[Site] = []
    for body in site.bodies if len(site.bodies) == 1 or chooses else ():
        inner = _producers(body)
        result = body.outputs[i] if len(body.outputs) == len(site.outputs) else None
        if not isinstance(result, core.Literal) and result in inner:
            makers += _innermost_sites(result, inner)
    if chooses:
        # All branches return the same list of arrays. One that keeps fewer arrays fills the places
        # of the missing ones: with empty arrays, or with a scalar that it broadcasts.
        makers = [
            maker
            for maker in makers
            if not maker.name.startswith("empty")
            and not (maker.name == "broadcast_in_dim" and maker.in_avals[0].shape == ())
        ]
    return makers or [site]


class _Origin(enum.IntEnum):
    """The origin of a value. If a value has several possible origins, the greatest holds."""

    NUMBERS = 0  # constants of the program, such as the fillers that branches return
    COPY = 1  # computed from the params by casts and moves alone
    OTHER = 2


def copies(program: Program, are_params: Sequence[bool]) -> list[bool]:
    """Returns whether each result of a walked program is a copy of params.

    It is computed from params (at least one) by casts and moves alone. Constants of the program may
    be among them.
    """
    arguments = [_Origin.COPY if is_param else _Origin.OTHER for is_param in are_params]
    analysis = ForwardAnalysis(bottom=_Origin.NUMBERS, join=max, transfer=_result_origins)
    origins = propagate(program, arguments, analysis, lambda site: site.bodies)
    return [origin is _Origin.COPY for origin in origins]


def _result_origins(site: Site, operands: Sequence[_Origin]) -> list[_Origin]:
    count = len(site.outputs)
    if site.name == "optimization_barrier":
        return list(operands)
    # Codes and scale of a param are a copy of it in 8 bits.
    if site.name in ENCODES:
        return list(operands) * count
    if site.name not in SAME_NUMBERS:
        return [_Origin.OTHER if site.inputs else _Origin.NUMBERS] * count
    # The index of a slice may depend on the data: only the numbers count.
    pairs = zip(site.in_avals, operands, strict=True)
    floats = [fact for aval, fact in pairs if is_floating(aval) or aval.dtype == jnp.int8]
    origin = max(floats, default=_Origin.OTHER)
    # A bias broadcast over a batch is as large as an activation, so it counts as one.
    grows = site.name == "broadcast_in_dim" and site.out_avals[0].size > site.in_avals[0].size
    return [_Origin.OTHER if grows and origin is _Origin.COPY else origin] * count
