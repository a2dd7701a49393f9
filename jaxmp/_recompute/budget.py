"""Chooses the products that run again, so that a program keeps a share of what JAX would keep.

A result is worth keeping if it took many operations for each of its bytes. Scores of attention take
the fewest, and the projection from four times the width the most. The model of the option is
torch.compile's `activation_memory_budget` (2024).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxmp._numerics.dtypes import nbytes_of
from jaxmp._numerics.tree import split_floats
from jaxmp._numerics.user_warnings import warn
from jaxmp._program.compat import open_jaxpr, trace_trees
from jaxmp._program.flops import products_in
from jaxmp._program.parts import PartCache
from jaxmp._recompute.run import Settings, run_in_pieces
from jaxmp._recompute.storage import Price, price_of

# Each candidate is traced once.
_MOST_CANDIDATES = 8


def within_budget(share: float, settings: Settings, closed: Any, arrays: Sequence[Any]) -> Settings:
    """Returns settings under which a program keeps at most this share of what JAX would keep.

    Products run again in the order of their price, until the bytes of what is kept, and of the
    products that the largest piece makes again, fit into the share. If no price is enough, the
    settings are those that keep the least, and if the program cannot be measured, those without
    products that run again. Both warn.

    Args:
      share: of the bytes that the backward pass would read besides the arguments.
      settings: those without products that run again.
      closed: the program.
      arrays: its arguments, or their types.
    """

    def with_price(most: Price | None) -> Settings:
        # Outside of loops a compiler would merge a product with the one that runs again.
        barriers = most is not None
        new = dataclasses.replace(settings, again=most, barriers=barriers)
        return dataclasses.replace(new, shared=PartCache(), types_in_codes=[], bytes_again=[])

    sizes = dict[Price | None, float]()
    try:
        jax_size = kept_bytes(core.jaxpr_as_fun(closed), arrays)
        for most in _candidates(closed):
            trial = with_price(most)
            run = functools.partial(run_in_pieces, trial, closed)
            size = kept_bytes(lambda *arrays, run=run: run(arrays), arrays)
            sizes[most] = size + max(trial.bytes_again, default=0)
            if sizes[most] <= share * jax_size:
                return with_price(most)
    except Exception as error:  # any error: the derivative by some argument may not exist
        warn(
            f"recompute={share} is as recompute='auto' here, since what this function keeps cannot "
            f"be measured: {type(error).__name__}: {error}"
        )
        return settings
    least = min(sizes, key=lambda most: sizes[most])
    advice = "" if settings.codes else ", and so does codes='int8' of jaxmp.recompute"
    warn(
        f"recompute={share} cannot be reached: this function needs {sizes[least] / jax_size:.3g} "
        f"of what JAX keeps. A jax.checkpoint around each block keeps less{advice}"
    )
    return with_price(least)


def _candidates(closed: Any) -> list[Price | None]:
    """Returns the highest prices to choose from, ascending, from None for no product.

    The dearest products of a program never run again: what they make separates the parts of a
    program that run again one by one.
    """
    prices = sorted({price for x in products_in(closed) if (price := price_of(x))})
    dearest = max((flops for flops, _ in prices), default=0.0)
    prices = [price for price in prices if price[0] < dearest]
    step = -(-len(prices) // _MOST_CANDIDATES) or 1
    return [None, *prices[::-1][::step][::-1]]


def kept_bytes(fun: Callable[..., Any], arrays: Sequence[Any]) -> int:
    """Returns the bytes that the backward pass of a function of arrays reads, without these."""

    def residuals(arrays: list[Any]) -> list[Any]:
        floats, merge = split_floats(arrays)
        return jax.tree.leaves(jax.vjp(lambda floats: fun(*merge(floats, arrays)), floats)[1])

    jaxpr = open_jaxpr(trace_trees(residuals, list(arrays))[0])
    caller_holds = {*jaxpr.invars, *jaxpr.constvars}
    kept = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)} - caller_holds
    return sum(nbytes_of(x.aval) for x in kept)
