"""`recompute`: what users call."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax  # noqa: F401 (for the doctest)
import jax.numpy as jnp  # noqa: F401 (for the doctest)

from jaxmp import _compat
from jaxmp._calls import Static, joined, rewriting, split
from jaxmp._op_lists import COSTS
from jaxmp._recompute._control_flow import RULES
from jaxmp._recompute._interpreter import Context, run
from jaxmp._recompute._storage import names_of
from jaxmp._warnings import warn

Recompute = Literal["auto", "always", "never"]


def recompute(
    fun: Callable[..., Any], mode: Recompute = "auto", *, dear: Iterable[str] = ()
) -> Callable[..., Any]:
    """The same function, which keeps less for its backward pass, and computes no product twice.

    JAX keeps whatever a derivative asks for: a softmax and its mask, the tanh of a gelu, the steps
    of a norm. Here results of products are kept, and of other operations that are dear: random
    bits, sorts, running sums, gathers, linear algebra, collectives, loops, kernels, functions with
    a `jax.custom_vjp`. So are values that several of them need, such as the stream between layers,
    and small results of reductions. All else is computed again from those. The values of a
    function and of its gradients stay what they were. docs/recompute.md says more;
    `jaxmp.audit` shows what is kept.

    It holds inside of `jit`, `scan`, `cond` and `shard_map`, for what other transformations make of
    a function, and for any dtype. A `jax.checkpoint` in the function stays as it is.

    Args:
      fun: a function of pytrees that `jax.make_jaxpr` can trace.
      mode: `"auto"` lets the compiler keep what it would otherwise compute twice: memory is saved
        in loops, where the passes are two programs, and costs no time. `"always"` forbids that, and
        saves memory everywhere, for the time that it takes. `"never"` returns the function.
      dear: further names of primitives (`"tanh"`) and of functions with `jax.jit` or
        `jax.custom_jvp` (`"silu"`, `"jax.nn.silu"`) that are never computed again. A function
        without either has no name in a program (`jax.nn.gelu`): put it into `jax.jit`.

    Returns:
      A function with the arguments of `fun`. Called outside of `jit` it is compiled, once for
      each signature, unless it holds arrays of its own; what is no array among its arguments is
      static.

    Raises:
      TypeError: if `fun` is not callable, or `dear` holds something else than names.
      ValueError: for an unknown mode.

    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) @ w)
    >>> w, x = jnp.eye(2), jnp.ones((3, 2))
    >>> bool(jnp.all(jax.grad(recompute(loss))(w, x) == jax.grad(loss)(w, x)))
    True
    """
    if not callable(fun):
        raise TypeError(f"recompute takes a function, got {type(fun).__name__}")
    names = _check_names(dear)
    if check_recompute(mode) == "never":
        return fun

    def rewrite(closed: Any, static: Static, arrays: list[Any]) -> list[Any]:
        context = Context(mode == "always", names, RULES)
        for name in sorted(names.difference(COSTS, _names_in(closed)) if names else ()):
            warn(
                f"{name!r} is in dear, but is neither a primitive nor a function with jax.jit or "
                "jax.custom_jvp that this function calls"
            )
        return run(context, closed, arrays)

    call = rewriting(fun, rewrite, "recompute", "Put it around model.apply", as_jit=True)

    @functools.wraps(fun, updated=())
    def recompute_fun(*args: Any, **kwargs: Any) -> Any:
        out = call(*split((args, kwargs)))
        return joined(out.static, out.arrays)

    return recompute_fun


def check_recompute(mode: str) -> Recompute:
    """The mode, if it is one.

    Raises:
      ValueError: if it is none.
    """
    if mode not in ("auto", "always", "never"):
        raise ValueError(f"recompute must be 'auto', 'always' or 'never', got {mode!r}")
    return mode  # type: ignore[return-value]


def _check_names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"dear must be a list of names, got a string. Write dear=[{names!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(f"dear must be a list of names such as 'tanh', got {type(names).__name__}")
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "dear must list names of primitives such as 'tanh', or of jitted functions such as "
                f"'silu', got {name!r}"
            )
    return frozenset(names)


def _names_in(jaxpr: Any) -> set[str]:
    """All names by which a user can mean something in a program."""
    found: set[str] = set()
    for equation in _compat.open_jaxpr(jaxpr).eqns:
        found |= names_of(equation)
        found = found.union(*map(_names_in, _compat.sub_jaxprs(equation)))
    return found
