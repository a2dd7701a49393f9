"""Checks whether modules compute as the rules say, and reports those that do not."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._flax.module_casts import Casts, ModulePolicy, takes_float_dtype
from jaxmp._numerics.dtypes import DType, is_floating
from jaxmp._numerics.user_warnings import first_few, warn_once
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import Decision


@dataclasses.dataclass(frozen=True)
class Promise:
    """The dtypes that a module named by a rule may return, if it computes something itself.

    Attributes:
      path: the path of the module.
      type: the class of the module.
      own_dtype: the `dtype` of the module if a policy cannot set it; otherwise None.
      dtypes: the compute dtype of its policy, then the dtypes that its submodules return.
      strict: whether another dtype is an error; otherwise it is a warning, once.
      by_inputs: whether the policy acts on the module only through casts of its floating inputs.
    """

    # Pickles of nnx models record these names. nnx traces equal modules once, so that promises of
    # equal modules at different places are equal.
    path: str = dataclasses.field(compare=False)
    type: type
    own_dtype: Any = dataclasses.field(compare=False)
    dtypes: tuple[DType, ...]
    strict: bool
    by_inputs: bool


def promise_of(
    region: ModulePolicy,
    casts: Casts,
    path: str,
    module: Any,
    *,
    parts: Sequence[Iterable[DType]],
    has_params: bool,
    strict: bool,
) -> Promise | None:
    """Returns the promise of a module that a rule names and that computes something itself.

    Args:
      region: the module under its policy.
      casts: the casts around the call.
      path: the path of the module.
      module: the module; not a layer of Flax.
      parts: the dtypes that submodules return: in linen those that it calls, in nnx all inside.
      has_params: whether the module has floating params of its own.
      strict: whether another dtype is an error.

    Returns:
      The promise, or None if the rules expect nothing of the result.
    """
    policy, rule = region.decision
    # A model without submodules counts as named by any policy.
    is_named = rule is not None or not (path or parts)
    if policy is None or region.recurrent or not is_named:
        return None
    # A container without params returns the results of its submodules, and a module without a
    # `dtype` whose inputs were not cast only follows its inputs.
    has_dtype = hasattr(module, "dtype") or casts.inputs is not None
    if not has_params and (parts or not has_dtype):
        return None
    dtypes = (policy.compute_dtype, *(dtype for part in parts for dtype in part))
    by_inputs = not has_params and not hasattr(module, "dtype")
    return Promise(path, type(module), own_dtype(module), dtypes, strict, by_inputs)


def check_result(promise: Promise, inputs: PyTree, out: PyTree) -> None:
    """Reports results of a module whose dtype is not the one that its rule says.

    A rule that names a module may have no effect: the module may ignore its `dtype`, have a
    `dtype` with a meaning of its own, or have a dtype written into its code. The dtypes of the
    results show this.

    Args:
      promise: the promise of the module.
      inputs: its arguments, after the input casts.
      out: its result, before the cast to the output dtype.

    Raises:
      ValueError: for an array of another dtype, if the promise is strict.
    """
    if promise.by_inputs and not any(map(is_floating, jax.tree.leaves(inputs))):
        return
    input_ids = {id(x) for x in jax.tree.leaves(inputs)}
    for x in jax.tree.leaves(out):
        # Scalars such as an auxiliary loss are float32 with reason, and some modules return their
        # arguments unchanged.
        if not is_floating(x) or not jnp.ndim(x) or id(x) in input_ids or x.dtype in promise.dtypes:
            continue
        why, own = "its code ignores the 'dtype' that it is given", promise.own_dtype
        if own is not None:
            why = f"its dtype, {own!r}, is no float dtype of JAX's, and stays as it is"
        text = (
            f"{promise.type.__name__} at {promise.path or '(root)'!r} returns {x.dtype}, but a "
            f"rule asks it to compute in {promise.dtypes[0]}: {why}. Cast its inputs and params to "
            "its 'dtype' (None, or a dtype of JAX) where they are used. Do not cast the result, as "
            "the policy does that. Or leave the module alone with the rule "
            f"({promise.path or '/'!r}, None) before the others"
        )
        if promise.strict:
            raise ValueError(text)
        warn_once(text, promise.type)


def own_dtype(module: Any) -> Any:
    """Returns the `dtype` of a module if a policy cannot set it, such as an author's own text.

    >>> import types
    >>> own_dtype(types.SimpleNamespace(dtype="bf16")), own_dtype(types.SimpleNamespace())
    ('bf16', None)
    """
    dtype = getattr(module, "dtype", None)
    return None if takes_float_dtype(dtype) else dtype


def too_wide(policy: Policy, dtypes: Iterable[DType]) -> list[DType]:
    """Returns the param dtypes that would make a product wider than the policy's compute dtype.

    >>> from jaxmp import get_policy
    >>> too_wide(get_policy("mixed_bfloat16"), [jnp.dtype("float32"), jnp.dtype("bfloat16")])
    [dtype('float32')]
    """
    compute = policy.compute_dtype
    return [dtype for dtype in dtypes if dtype != compute and dtype.itemsize >= compute.itemsize]


def may_refuse(decision: Decision, path: str, *, has_children: bool, strict: bool) -> bool:
    """Whether it is an error that a module cannot compute as a rule says.

    For a module without submodules, it is an error if a rule names the module, or if the module is
    the whole model. For a module with submodules it is an error only if a strict rule names it.
    """
    is_named = decision.rule is not None
    # The submodules may follow other rules, and then the rule has an effect.
    return is_named and strict if has_children else is_named or not path


_AUTOCAST = (
    "Autocast of the whole model needs no 'dtype': jaxmp.autocast(model.apply, rules) in linen, "
    "jaxmp.nnx.autocast(model, rules) in nnx"
)


def refuse(path: str, module: Any, policy: Policy, param_dtype: DType) -> NoReturn:
    """Raises ValueError for a module that a rule names and that cannot compute as the rule says."""
    # Its inputs are cast, but its own code combines them with params of another dtype: the product
    # of a bfloat16 input and a float32 param is float32, and nothing would show it.
    has = "no 'dtype' of its own"
    if own_dtype(module) is not None:
        has = f"a 'dtype' that is no float dtype of JAX's, {own_dtype(module)!r}, and none"
    raise ValueError(
        f"{type(module).__name__} at {path or '(root)'!r} cannot compute in "
        f"{policy.compute_dtype}: it has {param_dtype} params, and {has} that "
        "would say to cast them. Give its instances a dtype (in linen a field) and cast params to "
        f"it where they are used, or leave it alone with the rule ({path or '/'!r}, None) before "
        f"the others. {_AUTOCAST}"
    )


def warn_unreached(
    model: Any, unreached: Mapping[str, int], params: int, *, again: bool = True
) -> None:
    """Warns of the share of a model's params that no policy reaches, if it is 1 % or more.

    Args:
      model: the model.
      unreached: the number of elements in the own params of each unreached module, by path.
      params: the number of elements in all params.
      again: whether to repeat a warning that was given for this class before.
    """
    count = sum(unreached.values())
    if not count or count < 0.01 * params:
        return
    largest = sorted(unreached, key=lambda path: -unreached[path])
    names = first_few([f"{path or '(root)'!r} ({unreached[path]:,})" for path in largest], 4)
    warn_once(
        f"the policy does not reach {count / params:.0%} of the params ({count:,} of {params:,}): "
        f"these are own params of {names}. These modules have no 'dtype' for the policy to "
        "set. Unless they cast their params themselves, their products run in the dtype of the "
        "params. Give them a 'dtype' (in linen a field) and cast params to it where they are used, "
        f"or leave them alone with the rule ({largest[0] or '/'!r}, None) before the others. "
        f"{_AUTOCAST}",
        type(model),
        again=again,
    )
