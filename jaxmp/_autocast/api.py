"""The public functions `autocast` and `full_precision`."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp  # noqa: F401 (for the doctests)
import jmp
from jax import lax

from jaxmp._autocast.control_flow import plan_control
from jaxmp._autocast.coverage import warn_of_products_left
from jaxmp._autocast.decorator import policy_may_come_first
from jaxmp._autocast.kernels import Replacements, low_kernels
from jaxmp._autocast.op_plans import Reading, argument_state
from jaxmp._autocast.plan import PlanContext, plan
from jaxmp._autocast.regions import DONE, EXACT, Regions, region_of
from jaxmp._autocast.run import run_plan
from jaxmp._numerics.dtypes import HALVES
from jaxmp._numerics.precision import default_precision, precision_of
from jaxmp._numerics.rounding import open_cast
from jaxmp._numerics.user_warnings import check_option, warn
from jaxmp._policies.patterns import is_about_paths
from jaxmp._policies.policy import Policy, get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import dtypes_of, get_rules
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler
from jaxmp._program.op_lists import OpLists, op_lists
from jaxmp._program.tracing import Static, Traced, combine, partition, rewriting
from jaxmp._recompute.api import Recompute, apply_recompute, check_recompute
from jaxmp._recompute.run import is_changed

Output = Literal["traced", "policy", "computed"]
Kernels = Literal["traced", "low"]


@policy_may_come_first
def autocast(
    fun: Callable[..., Any] | str | jmp.Policy | PolicyRules,
    policy: str | jmp.Policy | PolicyRules | None = None,
    *,
    lower: Iterable[str] = (),
    float32: Iterable[str] = (),
    promote: Iterable[str] = (),
    output: Output = "traced",
    enter_custom_vjp: bool = False,
    kernels: Kernels = "low",
    recompute: Recompute = "never",
) -> Callable[..., Any]:
    """Returns the function in mixed precision: products low, sensitive operations in float32.

    It is for code of any library that says nothing about dtypes. The function is traced in float32
    and rewritten: matrix products and convolutions in the compute dtype of the policy;
    exponentials, logarithms, sums and norms in float32; other operations in the dtype of the
    activations that reach them, so that activations are stored in 16 bits. It works inside `jit`,
    `scan`, `while`, `cond`, `checkpoint`, `shard_map` and functions with derivatives of their own,
    and composes with all transformations. Gradients of parameters come out of their products in
    float32. docs/autocast.md says what runs in which precision, and why; `jaxmp.audit` shows it.

    Args:
      fun: a function of pytrees that `jax.make_jaxpr` can trace. Or the policy alone, for a
        decorator: `@jaxmp.autocast("mixed_bfloat16")`.
      policy: a policy or its name, with a 16-bit compute dtype. A float32 policy leaves the
        function as it is, and its products ask for the policy's `precision`. Or rules over the
        scopes in the function: module names in linen, `jax.named_scope` anywhere. A rule holds for
        everything inside the innermost scope that it matches. The param dtype is not used: params
        keep the dtypes that the caller gives them.
      lower: primitives (`"tanh"`) or jitted functions (`"silu"`) to run in the compute dtype.
      float32: primitives or jitted functions to run in float32.
      promote: primitives or jitted functions to follow their operands, as `add` does.
      output: the dtype of the results: `"traced"` as without autocast, `"policy"` for the policy's
        output dtype, `"computed"` without a last cast, in which the loss of 16-bit params keeps
        its digits.
      enter_custom_vjp: whether to rewrite functions with a `jax.custom_vjp` too, forward and
        backward. Otherwise they run as traced, with casts around them; in float32 parts, only the
        precision of their products is set.
      kernels: the precision of kernels behind `jax.custom_vjp`, Pallas and the like: `"low"` as if
        arguments had been cast to 16 bits, `"traced"` as without autocast. `"low"` takes the
        kernels from a second trace, which a function without any does not need. That trace casts
        the arguments that products read, but not labels or time stamps. The first argument of the
        function counts as the params. A kernel that shows no product inside stays as it is, and so
        does a solver. Kernels that the two traces do not have in common stay too, with a warning;
        all stay if the second trace fails or has another number of kernels.
      recompute: `"loops"`, `"auto"`, `"always"` or a share of what JAX would keep: keeps less for
        the backward pass, and computes cheap values again; see `jaxmp.recompute`. Or a function
        that wraps the rewritten function.

    Returns:
      A function with the arguments of `fun`. Called outside of `jit` it is compiled, once for each
      signature, unless it closes over arrays, or over numbers that change; arguments that are not
      arrays are static.

    Raises:
      ValueError: if the policy computes in a dtype that autocast cannot lower to, or for an
        unknown option.
      TypeError: if `fun` is not callable, or a list holds anything but names.

    >>> mean_dot = lambda x, w: jnp.mean(x @ w)
    >>> x, w = jnp.ones((2, 256)), jnp.full((256, 2), 1 / 3)
    >>> autocast(mean_dot, "mixed_bfloat16")(x, w)
    Array(85.5, dtype=float32)
    >>> autocast(lambda x: x @ x.T, "bfloat16", output="computed")(x).dtype
    dtype(bfloat16)
    """
    checked, lists = _check_policy(policy), op_lists(lower, float32, promote)
    check_option("output", output, Output)
    if not isinstance(enter_custom_vjp, bool):
        raise TypeError(f"enter_custom_vjp must be True or False, got {enter_custom_vjp!r}")
    check_option("kernels", kernels, Kernels)
    if not callable(fun):
        raise TypeError(f"autocast takes a function, got {type(fun).__name__}")
    check_recompute(recompute)
    settings = _Settings(checked, lists, output, enter_custom_vjp)
    warned: list[str] = []
    computed_in = dtypes_of(get_rules(checked))
    is_exact = isinstance(checked, Policy) and region_of(checked).exact
    scope = EXACT if is_exact else DONE  # nothing for an outer autocast

    def rewrite(traced: Traced, static: Static, arrays: list[Any]) -> list[Any]:
        closed = traced.closed
        replacements: Replacements = {}
        if kernels == "low":
            replacements = low_kernels(
                closed,
                Regions(checked),
                traced.for_dtypes,
                weights=_params_of(static),
                enter_custom_vjp=enter_custom_vjp,
            )

        def run(*arrays: Any) -> list[Any]:
            return _run_rewritten(closed, list(arrays), settings, replacements, warned)

        # Without a scan that would be one more trace of the same program.
        same = recompute == "loops" and not is_changed(closed)
        return run(*arrays) if same else apply_recompute(run, recompute)(*arrays)

    call = rewriting(fun, rewrite, "autocast", _IN_A_LINEN_MODULE)

    @functools.wraps(fun, updated=())
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        static, arrays = partition((args, kwargs))
        # The precision of an exact part around this one does not hold in here.
        with jax.named_scope(scope), default_precision(None), _WITHIN(True):
            out = call(static, arrays)
        warn_of_cpu_compiler(computed_in, out.arrays, in_jit=True)
        return combine(out.static, out.arrays)

    return autocast_fun


def _params_of(static: Static) -> set[int]:
    """Returns the numbers of the arrays in the first argument of a call, which are its params.

    A program does not say which arguments are params. Loss functions take them first. The weights
    of a teacher in a later argument count as data.
    """
    positional, by_name = static.tree.children()
    first = [*positional.children(), *by_name.children()][:1]
    count = sum(child.num_leaves for child in first)
    return set(range(sum(static.are_arrays[:count])))


_IN_A_LINEN_MODULE = (
    "Put autocast around model.apply, and say by rules which modules run in which precision: "
    "jaxmp.autocast(model.apply, jaxmp.PolicyRules(...)). Within a module, jaxmp.full_precision "
    "works"
)


def full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function as it was written, with float32 products that are float32 on every device.

    On a TPU a plain float32 product is one of bfloat16, and on a GPU one of TF32. In this function
    products ask for HIGHEST, forward and backward, unless they name a precision themselves or
    `jax_default_matmul_precision` is set. Products in 16 bits do not change. Autocast leaves the
    function alone, wherever it is called: the mark stays on the operations, also inside `jit`,
    `scan` and `checkpoint`, and in the gradient. JAX traces the backward pass of a
    `jax.custom_vjp`, and often the rule of a `jax.custom_jvp`, later. In `autocast` and in train
    steps they ask all the same; under `jax.grad` alone, write `precision=` in their products. On a
    TPU, the compiler refuses HIGHEST for 16-bit products in Pallas kernels and in `ragged_dot`:
    leave these out.

    Args:
      fun: any function.

    Returns:
      The function. Its arguments reach it in the dtypes that they have without autocast.

    Raises:
      TypeError: if `fun` is not callable.

    >>> exact = full_precision(lambda x, w: x @ w)
    >>> f = autocast(lambda x, w: exact(x, w), "mixed_bfloat16")
    >>> f(jnp.ones((1, 3)), jnp.full((3, 1), 1 / 3)).item()
    1.0
    """
    if not callable(fun):
        raise TypeError(f"full_precision takes a function, got {type(fun).__name__}")

    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(EXACT), default_precision(precision_of(None)):
            return fun(*args, **kwargs)

    return functools.wraps(fun, updated=())(exact)


# A part of the key of JAX's trace caches: a function that is traced outside is traced again inside.
_WITHIN: Any = jax.make_user_context(default_value=False)


def within_autocast() -> bool:
    """Whether the operations that are traced now are those of a function under autocast."""
    return _WITHIN.value


class _Settings(NamedTuple):
    policy: Policy | PolicyRules
    lists: OpLists
    output: Output
    enter_custom_vjp: bool


def _run_rewritten(
    closed: Any,
    arrays: list[Any],
    settings: _Settings,
    kernels: Replacements,
    warned: list[str],
) -> list[Any]:
    """Runs the program in mixed precision and returns its results."""
    regions = Regions(settings.policy)
    context = PlanContext(regions, settings.lists, settings.enter_custom_vjp, plan_control, kernels)
    arguments = list(map(argument_state, closed.in_avals))
    # Results are cast at the end, most of them to float32: the last operation may compute in it.
    is_cast = settings.output != "computed"
    results_in = (Reading.EITHER,) * len(closed.out_avals) if is_cast else ()
    program_plan = plan(closed, arguments, context, results_in=results_in)
    for name in settings.lists.unused(context.names):
        warn(
            f"{name!r} is in a list of operations, but is neither a primitive nor a jitted "
            "function that this function calls"
        )
    if isinstance(settings.policy, PolicyRules):
        settings.policy.warn_unused(dict.fromkeys(sorted(regions.paths())), strict=False)
    warn_of_products_left(program_plan, context, warned)
    if context.unscaled and _UNSCALED not in warned:
        warned.append(_UNSCALED)
        warn(_UNSCALED)
    results = run_plan(program_plan, arrays)
    if settings.output == "computed":
        return results
    policy = settings.policy
    default = policy.default if isinstance(policy, PolicyRules) else policy
    output_dtype: Any = None if default is None else default.output_dtype
    out = []
    for x, aval, state in zip(results, closed.out_avals, program_plan.results, strict=True):
        dtype = output_dtype if settings.output == "policy" else aval.dtype
        if state is not None and dtype not in (None, x.dtype):
            x = (open_cast if state.summed else lax.convert_element_type)(x, dtype)
        out.append(x)
    return out


_UNSCALED = (
    "a gradient inside of this function is computed in float16 without a loss scale: that of the "
    "outer loss does not reach it, and numbers smaller than 6e-8 become zero. Give it one of its "
    "own: jaxmp.grad(inner_loss, loss_scale=2.0**14) in place of jax.grad (loss_scale=1.0, if none "
    "is wanted). A gradient that is scaled by hand, or a jax.vjp of numbers around 1, is right as "
    "it is"
)


def _check_policy(policy: Any) -> Policy | PolicyRules:
    checked = policy if isinstance(policy, PolicyRules) else get_policy(policy)
    policies: list[Policy | None] = [checked] if isinstance(checked, Policy) else []
    if isinstance(checked, PolicyRules):
        for pattern, _ in checked.rules:
            if not is_about_paths(pattern):
                raise ValueError(
                    f"autocast knows the names of modules, not the modules: {pattern!r} can match "
                    "nothing. Use a pattern of names, jaxmp.nnx.autocast, or apply_policy"
                )
        policies = [*(policy for _, policy in checked.rules), checked.default]
    for dtype in (policy.compute_dtype for policy in policies if policy is not None):
        if dtype not in HALVES and dtype.itemsize < 4:
            raise ValueError(
                "autocast computes in bfloat16 or float16, got a policy that computes in "
                f"{dtype.name}"
            )
    return checked
