"""The public function `recompute`."""

import functools
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax  # noqa: F401 (for the doctest)
import jax.numpy as jnp  # noqa: F401 (for the doctest)

from jaxmp._numerics.removed_names import takes_old_options
from jaxmp._numerics.user_warnings import check_option, warn
from jaxmp._program.op_classes import COSTS
from jaxmp._program.program import equations_in
from jaxmp._program.tracing import Static, Traced, combine, partition, rewriting
from jaxmp._recompute.budget import within_budget
from jaxmp._recompute.codes import RowFormat
from jaxmp._recompute.run import Settings, run_in_pieces
from jaxmp._recompute.storage import names_of

Mode = Literal["auto", "always", "loops", "never"]
# What functions with gradients take as `recompute=`: a mode, a share of what JAX would keep, or a
# function that wraps the loss.
Recompute = Mode | float | Callable[[Callable[..., Any]], Callable[..., Any]]


@takes_old_options(dear="save", kept="codes")
def recompute(
    fun: Callable[..., Any],
    mode: Mode | float = "auto",
    *,
    save: Iterable[str] = (),
    codes: RowFormat | None = None,
) -> Callable[..., Any]:
    """Returns the function, keeping less for its backward pass; it computes no product twice.

    JAX keeps every value that a derivative asks for: a softmax and its mask, the tanh of a gelu,
    the steps of a norm. This function keeps the results of products, and of other dear operations:
    random bits, sorts, running sums, gathers, linear algebra, collectives, loops, kernels,
    functions with a `jax.custom_vjp`. It also keeps values that several of them need, such as the
    stream between layers, and small results of reductions. All other values are computed again from
    the kept ones. The function and its gradients stay the same, up to roundings that XLA leaves out
    by itself. docs/recompute.md says more; `jaxmp.audit` shows what is kept.

    Lookups of one number in each row run by comparison with the label, which compilers fuse.

    It works inside `jit`, `scan`, `cond` and `shard_map`, for functions made by other
    transformations, and for any dtype. A `jax.checkpoint` in the function stays as it is;
    with `codes`, one of a whole block reads its operands as codes.

    Args:
      fun: a function of pytrees that `jax.make_jaxpr` can trace.
      mode: `"auto"` lets the compiler keep values that it would otherwise compute twice. This saves
        memory in loops, where the passes are two programs, and costs no time. `"loops"` is that
        inside of `scan` alone; outside, lookups of one number in each row, as of the logit of a
        label, change, and nothing else. `"always"` forbids the compiler to keep: it saves memory
        everywhere, and costs time. `"never"` returns the function. A number is the largest share
        of what JAX would keep: if the above is not enough, products run again, those with the
        fewest operations for each kept byte first. This traces the function several times.
      save: names of further primitives (`"tanh"`) and of functions with `jax.jit` or
        `jax.custom_jvp` (`"silu"`, `"jax.nn.silu"`) that are never computed again. A function
        without either, such as `jax.nn.gelu`, has no name in a program: put it into `jax.jit`.
      codes: `"int8"` or `"float8_e4m3fn"` keeps floats of 16 or 32 bits as codes of one byte, with
        scales for each row. The forward pass stays as it is; the derivative reads rounded values:
        gradients get a small error, which averages out over a batch. Take float8 for functions
        steep at zero, as the `log` of a spectrum. Small arrays, integers and arguments keep their
        bits. No second derivative exists. Put it around `autocast`, `vmap` and `scan`, not inside.

    Returns:
      A function with the arguments of `fun`. Called outside of `jit` it is compiled, once for
      each signature, unless it closes over arrays; arguments that are not arrays are static.

    Raises:
      TypeError: if `fun` is not callable, or `save` holds anything but names.
      ValueError: for an unknown mode, a share that is not in (0, 1], or an unknown dtype of codes.
      NotImplementedError: under a second derivative, if `codes` is set.

    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) @ w)
    >>> w, x = jnp.eye(2), jnp.ones((3, 2))
    >>> bool(jnp.all(jax.grad(recompute(loss))(w, x) == jax.grad(loss)(w, x)))
    True
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function, got {type(fun).__name__}")
    if isinstance(save, str):
        raise TypeError(f"save must be a list of names, got a string. Write save=[{save!r}]")
    if not isinstance(save, Iterable):
        raise TypeError(f"save must be a list of names such as 'tanh', got {type(save).__name__}")
    names = list(save)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "save must list names of primitives such as 'tanh', or of jitted functions such as "
                f"'silu', got {name!r}"
            )
    if codes is not None:
        check_option("codes", codes, RowFormat)
    check_recompute(mode)
    if mode == "never":
        if codes is not None:
            raise ValueError(f"codes={codes!r} needs mode 'auto', 'always' or 'loops', got 'never'")
        return fun

    def rewrite(traced: Traced, static: Static, arrays: list[Any]) -> list[Any]:
        closed = traced.closed
        settings = Settings(mode == "always", mode == "loops", frozenset(names), codes)
        if not isinstance(mode, str):
            settings = within_budget(mode, settings, closed, arrays)
        # One list may serve several programs: names of primitives need not occur in this one.
        names_here = map(names_of, equations_in([closed])) if names else ()
        for name in sorted(settings.save.difference(COSTS, *names_here)):
            warn(
                f"{name!r} is in save, but is neither a primitive nor a function with jax.jit or "
                "jax.custom_jvp that this function calls"
            )
        results = run_in_pieces(settings, closed, arrays)
        if codes is not None and not settings.types_in_codes:
            warn(
                f"codes={codes!r} keeps nothing in codes here: no array of 4,096 floats or more is "
                "kept. Put recompute around vmap and scan, and not inside"
            )
        return results

    advice = "Put it around model.apply"
    call = rewriting(fun, rewrite, "recompute", advice, as_jit=True, explicit=True)

    @functools.wraps(fun, updated=())
    def recompute_fun(*args: Any, **kwargs: Any) -> Any:
        out = call(*partition((args, kwargs)))
        return combine(out.static, out.arrays)

    return recompute_fun


def apply_recompute(fun: Callable[..., Any], recompute_as: Recompute) -> Callable[..., Any]:
    """Returns the function as an option `recompute=` says."""
    return recompute_as(fun) if callable(recompute_as) else recompute(fun, recompute_as)


def check_recompute(option: Recompute) -> None:
    """Raises ValueError for an option `recompute=` that is not a mode, a share or a function."""
    # Also the scalars of NumPy.
    if not isinstance(option, str) and isinstance(option, numbers.Real):
        if isinstance(option, bool) or not 0 < option <= 1:
            raise ValueError(f"recompute as a share must be in (0, 1], got {option!r}")
    elif not callable(option):
        check_option("recompute", str(option), Mode)
