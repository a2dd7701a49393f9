"""The public function `recompute`."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax  # noqa: F401 (for the doctest)
import jax.numpy as jnp  # noqa: F401 (for the doctest)

from jaxmp._numerics.user_warnings import check_option, warn
from jaxmp._program.op_classes import COSTS
from jaxmp._program.program import equations_in
from jaxmp._program.tracing import Static, Traced, combine, partition, rewriting
from jaxmp._recompute.run import Settings, run_in_pieces
from jaxmp._recompute.storage import names_of

Recompute = Literal["auto", "always", "loops", "never"]


def recompute(
    fun: Callable[..., Any], mode: Recompute = "auto", *, dear: Iterable[str] = ()
) -> Callable[..., Any]:
    """Returns the function, keeping less for its backward pass; it computes no product twice.

    JAX keeps every value that a derivative asks for: a softmax and its mask, the tanh of a gelu,
    the steps of a norm. This function keeps the results of products, and of other dear operations:
    random bits, sorts, running sums, gathers, linear algebra, collectives, loops, kernels,
    functions with a `jax.custom_vjp`. It also keeps values that several of them need, such as the
    stream between layers, and small results of reductions. All other values are computed again from
    the kept ones. The function and its gradients stay the same, up to roundings that XLA leaves out
    by itself. docs/recompute.md says more; `jaxmp.audit` shows what is kept.

    It works inside `jit`, `scan`, `cond` and `shard_map`, for functions made by other
    transformations, and for any dtype. A `jax.checkpoint` in the function stays as it is.

    Args:
      fun: a function of pytrees that `jax.make_jaxpr` can trace.
      mode: `"auto"` lets the compiler keep values that it would otherwise compute twice. This saves
        memory in loops, where the passes are two programs, and costs no time. `"loops"` is that
        inside of `scan` alone, and leaves a program without one to the letter as it is. `"always"`
        forbids the compiler to keep: it saves memory everywhere, and costs time. `"never"` returns
        the function.
      dear: names of further primitives (`"tanh"`) and of functions with `jax.jit` or
        `jax.custom_jvp` (`"silu"`, `"jax.nn.silu"`) that are never computed again. A function
        without either, such as `jax.nn.gelu`, has no name in a program: put it into `jax.jit`.

    Returns:
      A function with the arguments of `fun`. Called outside of `jit` it is compiled, once for
      each signature, unless it holds arrays of its own; arguments that are not arrays are static.

    Raises:
      TypeError: if `fun` is not callable, or `dear` holds anything but names.
      ValueError: for an unknown mode.

    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) @ w)
    >>> w, x = jnp.eye(2), jnp.ones((3, 2))
    >>> bool(jnp.all(jax.grad(recompute(loss))(w, x) == jax.grad(loss)(w, x)))
    True
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function, got {type(fun).__name__}")
    if isinstance(dear, str):
        raise TypeError(f"dear must be a list of names, got a string. Write dear=[{dear!r}]")
    if not isinstance(dear, Iterable):
        raise TypeError(f"dear must be a list of names such as 'tanh', got {type(dear).__name__}")
    names = list(dear)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "dear must list names of primitives such as 'tanh', or of jitted functions such as "
                f"'silu', got {name!r}"
            )
    if check_recompute(mode) == "never":
        return fun

    def rewrite(traced: Traced, static: Static, arrays: list[Any]) -> list[Any]:
        closed = traced.closed
        context = Settings(mode == "always", mode == "loops", frozenset(names))
        # One list may serve several programs: names of primitives need not occur in this one.
        names_here = map(names_of, equations_in([closed])) if names else ()
        for name in sorted(context.dear.difference(COSTS, *names_here)):
            warn(
                f"{name!r} is in dear, but is neither a primitive nor a function with jax.jit or "
                "jax.custom_jvp that this function calls"
            )
        return run_in_pieces(context, closed, arrays)

    advice = "Put it around model.apply"
    call = rewriting(fun, rewrite, "recompute", advice, as_jit=True, explicit=True)

    @functools.wraps(fun, updated=())
    def recompute_fun(*args: Any, **kwargs: Any) -> Any:
        out = call(*partition((args, kwargs)))
        return combine(out.static, out.arrays)

    return recompute_fun


def check_recompute(mode: str) -> Recompute:
    """Returns the mode, and raises ValueError if there is none of this name."""
    checked: Recompute = check_option("recompute", mode, Recompute)
    return checked
