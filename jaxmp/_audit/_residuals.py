"""What a loss function keeps in memory for its backward pass."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._audit._copies import copies
from jaxmp._audit._lines import Lines, module_path, scopes_of
from jaxmp._audit._rows import Residual
from jaxmp._audit._tally import branch_text, bytes_of
from jaxmp._audit._walk import Body, Site, walk
from jaxmp._dtypes import is_floating

# They hand on arrays of the program around them without making a copy.
_CALLS = ("jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


Kind = Literal["activations", "params"]


class NoLoss(Exception):
    """Says why there are no residuals to speak of."""


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
) -> tuple[tuple[Residual, ...], Body | None]:
    """The arrays kept for the backward pass, by dtype and by the line that computed them.

    Args:
      loss: `loss(first, rest)`.
      first: what is differentiated by, where it is float.
      rest: everything else.
      has_aux: whether the loss is the first of a pair.
      recomputes: whether there are checkpoints in it.

    Returns:
      The rows, the largest first. Arguments and constants are no part of it: they are in memory
      anyway. And the program of both passes, if it recomputes.

    Raises:
      NoLoss: if it cannot be differentiated.
    """
    leaves, structure = jax.tree.flatten(first)
    chosen = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def pullback(leaves: list[Any], rest: Any) -> Any:
        def of_floats(floats: list[Any]) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(chosen, floats, strict=True))
            value = loss(jax.tree.unflatten(structure, filled.values()), rest)
            return value[0] if has_aux else value

        return jax.vjp(of_floats, [leaves[i] for i in chosen])

    try:
        body = walk(jax.make_jaxpr(lambda *args: pullback(*args)[1])(leaves, rest))
        both: Body | None = None
        # Only the backward pass itself finds out that it cannot go through a `while`.
        if recomputes or any(site.name == "while" for site in body.all_sites()):
            both = walk(jax.make_jaxpr(lambda *args: _applied(*pullback(*args)))(leaves, rest))
    except Exception as error:  # anything that a user's function may raise under differentiation
        reason = str(error).partition("\n")[0]
        raise NoLoss(f"it cannot be differentiated: {type(error).__name__}: {reason}") from error
    return _rows(body, len(leaves)), both


def _applied(value: Any, backward: Any) -> Any:
    return backward(jnp.ones_like(value))


def _rows(body: Body, params: int) -> tuple[Residual, ...]:
    """The rows of a program whose first arguments are the params."""
    lines, producers = Lines(), _producers(body)
    given = {*body.jaxpr.invars, *body.jaxpr.constvars}
    is_param = [i < params for i in range(len(body.jaxpr.invars))]
    groups: dict[tuple[str, str, str, str, Kind], list[int]] = {}
    seen: set[Any] = set()
    for atom, is_copy in zip(body.jaxpr.outvars, copies(body, is_param), strict=True):
        origin = _origin(atom, producers)
        if isinstance(origin, core.Literal) or atom in seen or origin in given:
            continue
        seen.add(atom)
        makers = _innermost(atom, producers)
        where = lines.of(makers[0]), module_path(scopes_of(makers[0]))
        kind: Kind = "params" if is_copy else "activations"
        key = str(atom.aval.dtype), *where, branch_text(makers), kind
        groups.setdefault(key, []).append(bytes_of(atom.aval))
    rows = [
        Residual(dtype, line, path, len(sizes), sum(sizes), branch, kind)
        for (dtype, line, path, branch, kind), sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


_Producers = dict[Any, tuple[Site, int]]


def _producers(body: Body) -> _Producers:
    return {
        variable: (site, i)
        for site in body.sites
        for i, variable in enumerate(site.equation.outvars)
    }


def _origin(atom: Any, producers: _Producers) -> Any:
    """The array itself, where a call only hands it on: an argument that was given to it."""
    while not isinstance(atom, core.Literal) and atom in producers:
        site, i = producers[atom]
        if site.name not in _CALLS or len(site.bodies) != 1:
            return atom
        jaxpr = site.bodies[0].jaxpr
        inner = _origin(jaxpr.outvars[i], _producers(site.bodies[0]))
        if isinstance(inner, core.Literal):
            return inner
        if inner not in jaxpr.invars:
            return atom
        atom = site.equation.invars[jaxpr.invars.index(inner)]
    return atom


def _innermost(atom: Any, producers: _Producers) -> list[Site]:
    """The equations that compute an array, inside of the calls and scans that return it.

    Branches return one array for what each of them keeps: it is made of nothing in a branch that
    keeps less.
    """
    site, i = producers[atom]
    found: list[Site] = []
    for body in site.bodies if len(site.bodies) == 1 or site.name == "cond" else ():
        inner = _producers(body)
        results = body.jaxpr.outvars
        made = results[i] if len(results) == len(site.equation.outvars) else None
        if not isinstance(made, core.Literal) and made in inner:
            found += _innermost(made, inner)
    if site.name == "cond":
        found = [each for each in found if not _is_filler(each)]
    return found or [site]


def _is_filler(site: Site) -> bool:
    """Whether an equation only lays out a number, as a branch returns what it has not computed."""
    return site.name.startswith("empty") or (
        site.name == "broadcast_in_dim" and site.equation.invars[0].aval.shape == ()
    )
