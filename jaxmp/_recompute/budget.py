"""Chooses the products that run again, so that a program keeps a share of what JAX would keep.

A result is worth keeping if it took many operations for each of its bytes. Scores of attention take
the fewest, and the projection from four times the width the most. The model of the option is
torch.compile's `activation_memory_budget` (2024).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxmp._numerics.dtypes import nbytes_of
from jaxmp._numerics.tree import split_floats
from jaxmp._numerics.user_warnings import warn
from jaxmp._program.compat import open_jaxpr, sub_jaxprs, trace_trees
from jaxmp._program.program import Memo
from jaxmp._recompute.run import Settings, run_in_pieces
from jaxmp._recompute.storage import Price, price_of

# Each candidate is traced once.
_MOST_CANDIDATES = 8


def within_budget(share: float, settings: Settings, closed: Any, arrays: Sequence[Any]) -> Settings:
    """Returns settings under which a program keeps at most this share of what JAX would keep.

    Products run again in the order of their price, until what is kept, and what the largest piece
    makes again, fit into the share. Otherwise the settings that keep the least, with a warning.

    Args:
      share: of the bytes that the backward pass would read besides the arguments.
      settings: those without products that run again.
      closed: the program.
      arrays: its arguments, or their types.
    """
    jax_keeps = kept_bytes(core.jaxpr_as_fun(closed), arrays)
    needed = dict[Price | None, int]()

    def with_price(most: Price | None) -> Settings:
        # Outside of loops a compiler would merge a product with the one that runs again.
        barriers = most is not None
        return dataclasses.replace(
            settings, again=most, barriers=barriers, memo=Memo(), bytes_again=[]
        )

    for most in _candidates(closed):
        trial = with_price(most)
        run = functools.partial(run_in_pieces, trial, closed)
        kept = kept_bytes(lambda *arrays, run=run: run(arrays), arrays)
        needed[most] = kept + max(trial.bytes_again, default=0)
        if needed[most] <= share * jax_keeps:
            return with_price(most)
    least = min(needed, key=lambda most: needed[most])
    warn(
        f"recompute={share} asks for {share:.0%} of what JAX keeps, but this function needs "
        f"{needed[least] / max(jax_keeps, 1):.0%}. A jax.checkpoint around each block keeps less, "
        "and so does kept='int8' of jaxmp.recompute"
    )
    return with_price(least)


def _candidates(closed: Any) -> list[Price | None]:
    """Returns the highest prices to choose from, ascending, from None for no product.

    The dearest products of a program never run again: what they make separates the parts of a
    program that run again one by one.
    """
    prices = sorted(set(_prices(closed)))
    dearest = max((flops for flops, _ in prices), default=0.0)
    prices = [price for price in prices if price[0] < dearest]
    step = -(-len(prices) // _MOST_CANDIDATES) or 1
    return [None, *prices[::-1][::step][::-1]]


def _prices(jaxpr: Any) -> Iterator[Price]:
    for equation in open_jaxpr(jaxpr).eqns:
        if price := price_of(equation):
            yield price
        for inner in sub_jaxprs(equation):
            yield from _prices(inner)


def kept_bytes(fun: Callable[..., Any], arrays: Sequence[Any]) -> int:
    """Returns the bytes that the backward pass of a function of arrays reads, without these."""

    def residuals(arrays: list[Any]) -> list[Any]:
        floats, merge = split_floats(arrays)
        return jax.tree.leaves(jax.vjp(lambda floats: fun(*merge(floats, arrays)), floats)[1])

    jaxpr = open_jaxpr(trace_trees(residuals, list(arrays))[0])
    caller_holds = {*jaxpr.invars, *jaxpr.constvars}
    kept = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)} - caller_holds
    return sum(nbytes_of(x.aval) for x in kept)
