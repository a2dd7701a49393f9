"""Decides the casts around a module's call under a policy, and checks the dtype of the result."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._flax.layer_precision import computes_in_float32, exactly
from jaxmp._numerics.dtypes import DType, is_floating
from jaxmp._numerics.tree import cast_floating, same_structure
from jaxmp._numerics.user_warnings import warn_once
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies, get_rules


class ModulePolicy(NamedTuple):
    """A module's policy, and its place in the model as far as casts depend on it.

    Attributes:
      decision: the decision of the rules for the module.
      caller: the decision for the calling module; None if the call comes from outside the model.
      takes_dtype: whether the module has a `dtype`, and so casts its inputs and params itself.
      recurrent: whether it takes and returns a carry, like recurrent cells.
      by_field: whether its products take their precision from its `precision` alone.
    """

    decision: Decision
    caller: Decision | None
    takes_dtype: bool
    recurrent: bool
    by_field: bool = False


class Casts(NamedTuple):
    """The casts around a call; None means no cast.

    Attributes:
      inputs: the dtype to cast floating arguments to.
      output: the dtype to cast the result to.
      recurrent: whether the call takes and returns a carry, which keeps its dtype.
      exact: the policy whose precision the products in the call are told to ask for.
    """

    inputs: DType | None = None
    output: DType | None = None
    recurrent: bool = False
    exact: Policy | None = None

    def __bool__(self) -> bool:
        return any(self)


def casts_around(region: ModulePolicy) -> Casts:
    """Returns the casts around a call that its policy requires.

    Within a region of one policy, only the layers themselves cast: a cast to the output dtype
    after every layer would double what the backward pass keeps. Results that leave the region are
    cast to the output dtype of its policy. Recurrent cells mix in their float32 carry, and would
    return float32 whatever their dtype. So their outputs are cast, and their carry keeps its
    dtype, as a scan requires.

    >>> from jaxmp import get_policy
    >>> policy = get_policy("mixed_bfloat16")
    >>> by_default = Decision(policy, None)
    >>> casts_around(ModulePolicy(by_default, None, takes_dtype=True, recurrent=False)).output
    dtype('float32')
    >>> casts_around(ModulePolicy(by_default, by_default, takes_dtype=True, recurrent=False)).output
    """
    policy = region.decision.policy
    if policy is None:
        return Casts()
    named = region.decision.rule is not None
    exact = policy if _asks(region) else None
    caller = region.caller and region.caller.policy
    # How a caller multiplies is no reason to cast what it is given.
    if caller is None or caller.with_products(None) != policy.with_products(None):
        inputs = policy.compute_dtype if named and not region.takes_dtype else None
        return Casts(inputs, policy.output_dtype, region.recurrent, exact)
    output = policy.compute_dtype if region.recurrent else None
    return Casts(None, output, region.recurrent, exact)


def _asks(region: ModulePolicy) -> bool:
    """Whether products in a call must be told what they ask for: in float32, and below float32."""
    policy, caller = region.decision.policy, region.caller and region.caller.policy
    if policy is None or computes_in_float32(policy):
        return policy is not None and not region.by_field
    # A TPU refuses what float32 products around the call ask for in a 16-bit `ragged_dot`.
    return caller is not None and computes_in_float32(caller)


def module_rules(rules: Any) -> PolicyRules:
    """Converts a name, a policy or rules to rules for modules.

    Raises:
      ValueError: for `"O1"`, which is about operations.
      TypeError: for anything else.
    """
    if isinstance(rules, str) and rules.strip() == "O1":
        raise ValueError(
            "O1 chooses a dtype for each operation, not for each module: use "
            "jaxmp.autocast(loss_fn, 'O1'), or 'mixed_float16' for modules"
        )
    return get_rules(rules)


def decide(
    rules: PolicyRules, path: str, module: Any, caller: Decision | None, *, in_layer: bool
) -> Decision:
    """Looks up the rules for a module; layers inside a layer of Flax follow the outer layer.

    For example, a rule about an attention layer also holds for its projections, unless a rule
    names these: they are an implementation detail of Flax.

    Args:
      rules: the rules.
      path: the path of the module.
      module: the module.
      caller: the decision for the calling module.
      in_layer: whether the caller is a layer of Flax that contains this module.

    Returns:
      The decision.
    """
    decision = rules.decide(path, module)
    return caller if decision.rule is None and in_layer and caller is not None else decision


def call_with_casts(
    call: Callable[..., Any],
    casts: Casts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_opaque: Callable[[Any], bool] | None = None,
) -> Any:
    """Calls a function with its floating inputs and outputs cast.

    Args:
      call: the function.
      casts: the result of `casts_around`.
      args: its positional arguments; the first is the carry of a recurrent cell.
      kwargs: its keyword arguments.
      is_opaque: whether a pytree must be passed on unchanged.

    Returns:
      The result of the call, cast.
    """

    def cast(tree: PyTree, dtype: DType | None) -> PyTree:
        if dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x if is_opaque and is_opaque(x) else cast_floating(x, dtype),
            tree,
            is_leaf=is_opaque,
        )

    if casts.exact is not None:
        call = exactly(call, casts.exact)
    if not casts.recurrent:
        args, kwargs = cast((args, kwargs), casts.inputs)
        return cast(call(*args, **kwargs), casts.output)
    carry = args[0] if args else kwargs.get("carry")
    out = call(*args, **kwargs)
    if same_structure(out, carry):  # the classes that nn.remat_scan repeats return only a carry
        return _cast_like(out, carry)
    new_carry, out = out
    return _cast_like(new_carry, carry), cast(out, casts.output)


def _cast_like(tree: PyTree, like: PyTree) -> PyTree:
    if not same_structure(tree, like):
        return tree

    def cast_leaf(x: Any, y: Any) -> Any:
        return cast_floating(x, y.dtype) if is_floating(x) and is_floating(y) else x

    return jax.tree.map(cast_leaf, tree, like)


def layer_dtype(dtype: DType, before: Any = None) -> Any:
    """Returns a dtype in the form that the layer had before; `jnp.bfloat16` by default.

    >>> layer_dtype(jnp.dtype("bfloat16")) is jnp.bfloat16
    True
    >>> layer_dtype(jnp.dtype("bfloat16"), "float32")
    'bfloat16'
    """
    if isinstance(before, np.dtype):
        return dtype
    return dtype.name if isinstance(before, str) else getattr(jnp, dtype.name)


def new_instance(make_class: Callable[..., type], *args: Any) -> Any:
    """Makes an empty instance of a class that was made at run time, for pickle to fill.

    >>> new_instance(lambda name: type(name, (), {}), "Dense").__class__.__name__
    'Dense'
    """
    return object.__new__(make_class(*args))


def takes_float_dtype(dtype: Any) -> bool:
    """Whether a layer with this `dtype` computes in floats, or in the dtype of its inputs (None).

    >>> takes_float_dtype(None), takes_float_dtype("bfloat16"), takes_float_dtype(jnp.complex64)
    (True, True, False)
    """
    try:
        return dtype is None or bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def check_computable(rules: PolicyRules) -> None:
    """Raises ValueError for rules whose compute dtype is float8, which no layer supports."""
    for policy in all_policies(rules):
        if policy.compute_dtype.itemsize == 1:
            raise ValueError(
                f"no layer can compute in {policy.compute_dtype} (policy {str(policy)!r}): a "
                "plain cast to float8 loses small values. Use 'mixed_float8', which scales what it "
                "rounds"
            )


@dataclasses.dataclass(frozen=True)
class Promise:
    """The dtypes that a module named by a rule may return, if it computes something itself.

    Promises of equal modules at different places are equal, so that nnx traces them only once.

    Attributes:
      path: the path of the module.
      type: the class of the module.
      own_dtype: the `dtype` of the module if a policy cannot set it; otherwise None.
      dtypes: the compute dtype of its policy, then the dtypes that its submodules return.
      strict: whether another dtype is an error; otherwise it is a warning, once.
      by_inputs: whether the policy acts on the module only through casts of its floating inputs.
    """

    path: str = dataclasses.field(compare=False)
    type: type
    own_dtype: Any = dataclasses.field(compare=False)
    dtypes: tuple[DType, ...]
    strict: bool
    by_inputs: bool


def promised(
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

    A module computes something itself if it has params of its own; or if it calls no other module,
    and has a `dtype` or had its inputs cast. A container without params returns the results of its
    submodules, and a module that only follows its inputs was told no dtype. A model without
    submodules counts as named by any policy.

    Args:
      region: the module under its policy.
      casts: the casts around the call.
      path: the path of the module.
      module: the module; not a layer of Flax.
      parts: the dtypes that each submodule returns, for each submodule that the module calls.
      has_params: whether the module has floating params of its own.
      strict: whether another dtype is an error.

    Returns:
      The promise, or None if the rules expect nothing of the result.
    """
    policy, rule = region.decision
    named = rule is not None or not (path or parts)
    told = hasattr(module, "dtype") or casts.inputs is not None
    if policy is None or region.recurrent or not named:
        return None
    if not has_params and (parts or not told):
        return None
    dtypes = (policy.compute_dtype, *(dtype for part in parts for dtype in part))
    by_inputs = not has_params and not hasattr(module, "dtype")
    return Promise(path, type(module), own_dtype(module), dtypes, strict, by_inputs)


def check_result(promise: Promise, given: PyTree, out: PyTree) -> None:
    """Reports results of a module whose dtype is not the one that its rule says.

    A rule that names a module may have no effect: the module may ignore its `dtype`, have a
    `dtype` with a meaning of its own, or have a dtype written into its code. The dtypes of the
    results show this. Two kinds of results are skipped: scalars, since sums such as an auxiliary
    loss are float32 with reason; and arguments that are returned unchanged.

    Args:
      promise: the promise of the module.
      given: its arguments, after the input casts.
      out: its result, before the cast to the output dtype.

    Raises:
      ValueError: for an array of another dtype, if the promise is strict.
    """
    if promise.by_inputs and not any(map(is_floating, jax.tree.leaves(given))):
        return
    same = {id(x) for x in jax.tree.leaves(given)}
    for x in jax.tree.leaves(out):
        if is_floating(x) and jnp.ndim(x) and id(x) not in same and x.dtype not in promise.dtypes:
            _complain(promise, x.dtype)


def _complain(promise: Promise, dtype: DType) -> None:
    asked, shown = promise.dtypes[0], promise.path or "(root)"
    why = "its code ignores the 'dtype' that it is given"
    if promise.own_dtype is not None:
        why = f"its dtype, {promise.own_dtype!r}, is no float dtype of JAX's, and stays as it is"
    text = (
        f"{promise.type.__name__} at {shown!r} returns {dtype}, but a rule asks it to compute in "
        f"{asked}: {why}. Cast its inputs and params to its 'dtype' (None, or a dtype of JAX) "
        "where they are used. Do not cast the result, as the policy does that. Or leave the module "
        f"alone with the rule ({promise.path or '/'!r}, None) before the others"
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
    the whole model. For a module with submodules, which may follow other rules, it is an error only
    if a strict rule names the module.
    """
    named = decision.rule is not None
    return named and strict if has_children else named or not path


def refuse(path: str, module: Any, policy: Policy, param_dtype: DType) -> NoReturn:
    """Raises ValueError for a module that a rule names and that cannot compute as the rule says.

    Its inputs are cast, but its own code combines them with params of another dtype: the product
    of a bfloat16 input and a float32 param is float32, and nothing would show it.
    """
    has = "no 'dtype' of its own"
    if own_dtype(module) is not None:
        has = f"a 'dtype' that is no float dtype of JAX's, {own_dtype(module)!r}, and none"
    raise ValueError(
        f"{type(module).__name__} at {path or '(root)'!r} cannot compute in "
        f"{policy.compute_dtype}: it has {param_dtype} params, and {has} that "
        "would say to cast them. Give its instances a dtype (in linen a field) and cast params to "
        "it where they are used, or leave it alone with the rule "
        f"({path or '/'!r}, None) before the others"
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
    shown = ", ".join(f"{path or '(root)'!r} ({unreached[path]:,})" for path in largest[:4])
    more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
    warn_once(
        f"the policy does not reach {count / params:.0%} of the params ({count:,} of {params:,}): "
        f"these are own params of {shown}{more}. These modules have no 'dtype' for the policy to "
        "set. Unless they cast their params themselves, their products run in the dtype of the "
        "params. Give them a 'dtype' (in linen a field) and cast params to it where they are used, "
        f"or leave them alone with the rule ({largest[0] or '/'!r}, None) before the others",
        type(model),
        again=again,
    )
