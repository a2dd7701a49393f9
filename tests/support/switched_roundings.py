"""A low program run in float32, with the roundings of each part switched on or off.

It measures what `sensitivity` predicts: the error that the roundings of one part make alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._program.program import read
from jaxmp._program.scopes import names_in
from jaxmp._tools.diagnostics.precision_parts import precision_parts_of
from jaxmp._tools.diagnostics.roundings import Roundings, in_float32, place_of, readers_of
from jaxmp._tools.inspect.equations import Site
from jaxmp._tools.inspect.lines import scopes_of


class Switched(Roundings):
    """Rounds where a switch is on."""

    def __init__(self, on: Callable[[Site], Any]) -> None:
        super().__init__()
        self._on = on

    def rounded(self, site: Site, exact: Any, low: Any) -> Any:
        return jnp.where(self._on(site), low, exact)


def switched(
    closed: Any, arrays: Sequence[Any], flags: Any, part_of: Callable[[tuple[str, ...]], Any]
) -> list[Any]:
    """Runs a program with the roundings of some parts, and of the products that read them."""

    def owner(site: Site) -> Any:
        return part_of(names_in(scopes_of(site)))

    readers = readers_of(closed, owner)

    def on(site: Site) -> Any:
        parts = {owner(site), *readers.get(place_of(site), ())} - {None}
        return jnp.any(jnp.array([flags[part] for part in parts], bool))

    return Switched(on).run(read(closed), list(map(in_float32, arrays)))


def measured_alone(
    loss_fn: Callable[..., Any], params: Any, *args: Any, low: str = "mixed_bfloat16"
) -> dict[str, tuple[float, float]]:
    """Measures the errors of loss and gradients that the roundings of each part make alone."""
    call = jax.value_and_grad(jaxmp.autocast(loss_fn, low))
    closed = jax.make_jaxpr(call)(params, *args)
    parts = precision_parts_of(jax.make_jaxpr(loss_fn)(params, *args), None)
    numbers: dict[Any, int] = {part: i for i, part in enumerate(parts.parts)}

    @jax.jit
    def run(flags: Any) -> Any:
        leaves = jax.tree.leaves((params, *args))
        return switched(closed, leaves, flags, lambda names: numbers.get(parts.owner(names)))

    loss, *gradients = run(jnp.zeros(len(numbers), bool))
    size = norm(gradients)
    errors = {}
    for part, i in numbers.items():
        other, *others = run(jnp.arange(len(numbers)) == i)
        off = [a - b for a, b in zip(others, gradients, strict=True)]
        errors[part.name] = abs(float(other - loss) / float(loss)), norm(off) / size
    return errors


def norm(arrays: Sequence[Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in arrays)))
