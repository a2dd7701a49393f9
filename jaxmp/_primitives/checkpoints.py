"""What checkpoint policies may save."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal, Primitive
from jax.interpreters import partial_eval


def never_saved(primitive: Primitive) -> None:
    """Makes checkpoints compute a primitive again, whatever their policy says.

    JAX rounds what a policy saves with `reduce_precision`, which knows only formats with
    infinities: of float8_e4m3fn, codes above 240 would become NaN (jax 0.10 and 0.12). What the
    codes are rounded from is saved instead.

    Args:
      primitive: a primitive that makes codes in float8.
    """
    rules: dict[Primitive, Callable[..., Any]] = partial_eval.partial_eval_jaxpr_custom_rules
    rules[primitive] = _computed_again


def _computed_again(
    saveable: Any, unknown: Sequence[bool], at_hand: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """The rule: which of the two programs runs an equation, and what the second one is handed."""
    del saveable
    inputs = zip(equation.invars, at_hand, strict=True)
    handed = [x for x, is_there in inputs if not (is_there or isinstance(x, Literal))]
    count = len(equation.outvars)
    first = None if any(unknown) else equation
    return first, equation, [first is None] * count, [True] * count, handed
