"""Histograms of the values that the modules of a model hand on, counted as the program runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from jaxmp._autocast.api import autocast
from jaxmp._numerics.histograms import BINS, Histograms, counted_when, histogram_of
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program import compat
from jaxmp._program.op_classes import CLASSES, OpClass
from jaxmp._program.program import read
from jaxmp._program.tracing import combine, partition
from jaxmp._tools.diagnostics.scope_values import Capture, scope_of_module, scope_values
from jaxmp._tools.inspect.equations import Site, site_of
from jaxmp._tools.inspect.lines import UNKNOWN, line_of


def activation_histograms(
    fun: Callable[..., Any],
    *args: Any,
    policy: str | jmp.Policy | PolicyRules | None = None,
    by_turn: bool = False,
    when: Any = None,
    **kwargs: Any,
) -> Histograms:
    """Counts the numbers that each module hands on, by their power of two.

    The gradients of params say that a layer loses numbers; the activations say where they begin to
    be lost. This runs the function once, and counts each value that is made in a module and read
    outside of it, for the module and for each module around it that the value leaves. Modules are
    those of Flax linen, those of nnx after `jaxmp.nnx.with_scopes(model)`, and the scopes of
    `jax.named_scope`. Outside of all, each source line counts as one: it hands on what another
    line reads.

    It looks into `jit`, `scan`, `while`, `cond`, `checkpoint`, functions with derivatives of their
    own and `shard_map`. It may be called under `jit`, where nothing waits for the host.

    Of a function that computes gradients, such as `jax.grad(loss_fn)`, what the backward pass of a
    module hands on has a row of its own, `"layer (backward)"`: the cotangents of its inputs, and
    the gradients of its params.

    Values in 16 bits have lost already what their dtype cannot hold. To ask what float16 would
    lose, run the function in float32: without a policy.

    Args:
      fun: a function of arrays, such as a loss function.
      *args: its arguments.
      policy: a policy to run it under, by `jaxmp.autocast`. None for the dtypes that it has.
      by_turn: whether modules in a scan have a row for each turn, such as `"block/mlp[3]"`: for
        layers in a scan. Without it turns are added up.
      when: a boolean scalar, such as `step % 100 == 0`, of the program. Where it is false the
        function does not run, and the histograms are all zero.
      **kwargs: more arguments.

    Returns:
      The histograms, named by module, in the order in which values are made. Those of a loop that
      runs until a condition holds are added up.

    Raises:
      TypeError: if `when` is not a boolean scalar, or as `jaxmp.autocast` does.

    >>> def mlp(w, x):
    ...     with jax.named_scope("hidden"):
    ...         h = jnp.tanh(x @ w)
    ...     return jnp.sum(h)
    >>> activations = activation_histograms(mlp, jnp.ones((4, 4)), jnp.ones((2, 4)))
    >>> activations.names[0], float(activations.counts[0].sum())
    ('hidden', 8.0)
    """
    fun = fun if policy is None else autocast(fun, policy)
    static, arrays = partition((args, kwargs))
    # Of several turns or devices, one histogram: their number may not be known.
    catching = scope_values(
        fun,
        histogram_of,
        _scope_or_line,
        join=lambda saved: (saved[0].sum(0), saved[1].max(0, initial=0)),
    )

    @jax.jit
    def run(arrays: list[Any]) -> Histograms:
        args, kwargs = combine(static, arrays)
        return _rows_by_name(catching(*args, **kwargs), by_turn)

    result: Histograms = run(arrays) if when is None else counted_when(when, run, arrays)
    return result


def _scope_or_line(site: Site) -> tuple[str, ...]:
    """Returns the modules around an equation; outside of all, its line."""
    if modules := scope_of_module(site):
        return modules
    line = line_of(site)
    # A call counts for the lines inside of it, if these are the user's. A helper that JAX jits,
    # such as `jnp.where`, has no line but that of its caller.
    is_control = CLASSES.get(site.name) is OpClass.CONTROL
    inner = [
        site_of(op, site)
        for body in (compat.bodies_of(site.equation) if is_control else ())
        for op in read(body).ops
    ]
    has_own_lines = inner and line not in map(line_of, inner)
    # What JAX adds under `vmap`, outside of all lines, has no row.
    return () if has_own_lines or line == UNKNOWN else (line,)


def _rows_by_name(capture: Capture, by_turn: bool) -> Histograms:
    """Adds up histograms for each module, each direction, and each turn if `by_turn`."""
    dtypes: dict[str, set[str]] = {}
    sources: list[tuple[int, str]] = []  # a row of all histograms, and the name it counts for
    counts, largest, row = [jnp.zeros((0, BINS))], [jnp.zeros(0)], 0
    for about, saved in zip(capture.values, capture.saved, strict=True):
        # It was counted when it was computed first.
        if about.direction == "recomputed":
            continue
        counts.append(saved[0].reshape(-1, BINS))
        largest.append(saved[1].ravel())
        ending = " (backward)" if about.direction == "backward" else ""
        for turns in np.ndindex(*about.turns):
            turn = "".join(f"[{i}]" for i in turns) if by_turn else ""
            names = [module + ending + turn for module in about.scopes]
            sources += [(row, name) for name in names]
            row += 1
            for name in names:
                dtypes.setdefault(name, set()).add(about.dtype)
    numbers = {name: i for i, name in enumerate(dtypes)}
    rows = np.array([row for row, _ in sources], int)
    at = np.array([numbers[name] for _, name in sources], int)
    # One scatter for all rows: a program has thousands, and each sum alone would be an equation.
    return Histograms(
        jnp.zeros((len(numbers), BINS)).at[at].add(jnp.concatenate(counts)[rows]),
        jnp.zeros(len(numbers)).at[at].max(jnp.concatenate(largest)[rows]),
        tuple(dtypes),
        tuple(", ".join(sorted(names)) for names in dtypes.values()),
    )
