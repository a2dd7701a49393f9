"""Finds the arrays that a loss function keeps in memory for its backward pass."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._numerics.dtypes import is_floating, nbytes_of
from jaxmp._program.facts import Question, arguments_read, propagate
from jaxmp._program.op_classes import CALLS, SAME_NUMBERS
from jaxmp._program.program import Program
from jaxmp._tools.inspect.compiled import is_array
from jaxmp._tools.inspect.equations import Site, walk
from jaxmp._tools.inspect.lines import Lines, module_path, scopes_of
from jaxmp._tools.inspect.rows import Residual
from jaxmp._tools.inspect.summarize import branch_text

Kind = Literal["activations", "params"]


class NoLoss(Exception):
    """The function is not a loss, so that it has no residuals; the text says why."""


def check_loss(result: Any, first: Any) -> None:
    """Raises `NoLoss` unless a function with this result and first argument is a loss."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss = result[0] if is_pair else result
    if not is_floating(loss) or loss.shape != ():
        raise NoLoss("its result is neither a float scalar nor (a float scalar, something else)")
    if not any(is_floating(leaf) for leaf in jax.tree.leaves(first)):
        raise NoLoss("its first argument holds no floats to differentiate by")


def residuals(
    loss: Callable[..., Any], first: Any, rest: Any, has_aux: bool, recomputes: bool
) -> tuple[tuple[Residual, ...], Program | None]:
    """Lists the arrays kept for the backward pass, by dtype and by the line that computed them.

    An array that is handed on but that the backward pass never reads is not kept: compilers drop
    it. Such are the wide sources of products, which only second derivatives ask for.

    Args:
      loss: `loss(first, rest)`.
      first: the argument whose floats to differentiate with respect to.
      rest: the other arguments.
      has_aux: whether the function returns `(loss, aux)`.
      recomputes: whether the function has checkpoints.

    Returns:
      The rows, largest first, without arguments and constants: these are in memory anyway. And
      the program of both passes; None if the function has no checkpoints.

    Raises:
      NoLoss: if the function cannot be differentiated.
    """
    everything, structure = jax.tree.flatten(first)  # an Equinox module has functions in it
    places = [i for i, leaf in enumerate(everything) if is_array(leaf)]
    leaves = [everything[i] for i in places]
    chosen = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def pullback(leaves: list[Any], rest: Any) -> Any:
        def of_floats(floats: list[Any]) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(chosen, floats, strict=True))
            every = dict(enumerate(everything)) | dict(zip(places, filled.values(), strict=True))
            value = loss(jax.tree.unflatten(structure, every.values()), rest)
            return value[0] if has_aux else value

        return jax.vjp(of_floats, [leaves[i] for i in chosen])

    try:
        jaxpr, shapes = jax.make_jaxpr(pullback, return_shape=True)(leaves, rest)
        body = walk(jaxpr)
        # Only tracing the backward pass reveals that it cannot go through a `while`.
        backward = walk(jax.make_jaxpr(_applied)(*shapes))
        both: Program | None = None
        if recomputes:
            both = walk(jax.make_jaxpr(lambda *args: _applied(*pullback(*args)))(leaves, rest))
    except Exception as error:  # anything that a user's function may raise under differentiation
        reason = str(error).partition("\n")[0]
        raise NoLoss(f"it cannot be differentiated: {type(error).__name__}: {reason}") from error
    read = arguments_read(backward, [True] * len(backward.outputs), lambda site: site.bodies)
    return _residual_rows(body, len(leaves), read), both


def _applied(value: Any, backward: Any) -> Any:
    return backward(jnp.ones_like(value))


def _residual_rows(program: Program, params: int, read: Sequence[bool]) -> tuple[Residual, ...]:
    """Returns the rows of a walked forward pass whose first arguments are the params.

    It returns a value and all arrays that it hands on; `read` says which the backward pass reads.
    """
    lines, producers = Lines(), _producers(program)
    given = {*program.inputs, *(number for number, _ in program.consts)}
    is_param = [i < params for i in range(len(program.inputs))]
    groups: dict[tuple[str, str, str, str, Kind], list[int]] = {}
    seen: set[Any] = set()
    outputs: tuple[Any, ...] = program.outputs
    results = zip(outputs, copies(program, is_param), read, strict=True)
    for atom, is_copy, is_read in results:
        origin = _origin(atom, producers)
        # Arguments are in memory anyway, whatever the backward pass keeps.
        if not is_read or isinstance(origin, core.Literal) or atom in seen or origin in given:
            continue
        seen.add(atom)
        makers = _innermost_sites(atom, producers)
        where = lines.of(makers[0]), module_path(scopes_of(makers[0]))
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
        if isinstance(inner, core.Literal):
            return inner
        if inner not in body.inputs:
            return atom
        atom = site.inputs[body.inputs.index(inner)]
    return atom


def _innermost_sites(atom: Any, producers: _Producers) -> list[Site]:
    """Returns the operations that compute an array, inside of the calls and scans that return it.

    All branches of a conditional return the same list of arrays. A branch that keeps fewer arrays
    returns fillers for the missing ones, which are left out here.
    """
    site, i = producers[atom]
    chooses = site.wiring.chooses
    makers: list[Site] = []
    for body in site.bodies if len(site.bodies) == 1 or chooses else ():
        inner = _producers(body)
        made = body.outputs[i] if len(body.outputs) == len(site.outputs) else None
        if not isinstance(made, core.Literal) and made in inner:
            makers += _innermost_sites(made, inner)
    if chooses:
        makers = [each for each in makers if not _is_filler(each)]
    return makers or [site]


def _is_filler(site: Site) -> bool:
    """Whether an operation only broadcasts a scalar, as a branch does for a missing array."""
    return site.name.startswith("empty") or (
        site.name == "broadcast_in_dim" and site.in_avals[0].shape == ()
    )


class _Made(enum.IntEnum):
    """The origin of a value. If a value has several possible origins, the greatest holds."""

    NUMBERS = 0  # constants of the program, such as the fillers that branches return
    COPY = 1  # made from the given arguments by casts and moves alone
    OTHER = 2


def copies(program: Program, given: Sequence[bool]) -> list[bool]:
    """Returns whether each result of a walked program is a copy of given arguments.

    It is made from the given arguments (at least one) by casts and moves alone. Constants of the
    program may be among them.
    """
    made = [_Made.COPY if is_given else _Made.OTHER for is_given in given]
    question = Question(nothing=_Made.NUMBERS, join=max, rule=_made_by)
    origins = propagate(program, made, question, lambda site: site.bodies)
    return [origin is _Made.COPY for origin in origins]


def _made_by(site: Site, operands: Sequence[_Made]) -> list[_Made]:
    count = len(site.outputs)
    if site.name == "optimization_barrier":
        return list(operands)
    if site.name == "float8_encode":
        return list(operands) * count
    if site.name not in SAME_NUMBERS:
        return [_Made.OTHER if site.inputs else _Made.NUMBERS] * count
    pairs = zip(site.in_avals, operands, strict=True)
    made = max((origin for aval, origin in pairs if is_floating(aval)), default=_Made.OTHER)
    # A bias broadcast over a batch is as large as an activation, so it counts as one.
    grows = site.name == "broadcast_in_dim" and site.out_avals[0].size > site.in_avals[0].size
    return [_Made.OTHER if grows and made is _Made.COPY else made] * count
