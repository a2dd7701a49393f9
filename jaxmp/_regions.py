"""What a policy means for one call of one module: which casts go around it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._dtypes import DType, is_floating
from jaxmp._policy import Policy
from jaxmp._rules import Decision, PolicyRules
from jaxmp._tree import cast_floating, same_structure
from jaxmp.rules import all_policies, get_rules


class Region(NamedTuple):
    """A module under a policy, as the rules and its place in the model have it.

    Attributes:
      decision: what the rules say about it.
      caller: what they say about the module that calls it; None if that is outside of the model.
      takes_dtype: whether the module has a `dtype`, and so casts its inputs and params itself.
      recurrent: whether it is called with a carry and returns one, as recurrent cells are.
    """

    decision: Decision
    caller: Decision | None
    takes_dtype: bool
    recurrent: bool


class Casts(NamedTuple):
    """The casts around a call; None means no cast.

    Attributes:
      inputs: to which dtype the floating arguments are cast.
      output: to which dtype the result is.
      recurrent: the call takes and returns a carry, which keeps the dtype that it came in.
    """

    inputs: DType | None = None
    output: DType | None = None
    recurrent: bool = False

    def __bool__(self) -> bool:
        return any(self)


def casts_around(region: Region) -> Casts:
    """The casts that make a call do what its policy says.

    Within a region of one policy nothing is cast but by the layers themselves: a cast to the
    output dtype after every layer would double what the backward pass keeps. What leaves the
    region is cast to the output dtype of its policy. Recurrent cells mix in their float32 carry
    and would return float32 whatever their dtype: their outputs are cast, and their carry keeps
    its dtype, as a scan over them needs.

    >>> from jaxmp import get_policy
    >>> policy = get_policy("mixed_bfloat16")
    >>> by_default = Decision(policy, None)
    >>> casts_around(Region(by_default, None, takes_dtype=True, recurrent=False)).output
    dtype('float32')
    >>> casts_around(Region(by_default, by_default, takes_dtype=True, recurrent=False)).output
    """
    policy = region.decision.policy
    if policy is None:
        return Casts()
    if region.caller is None or region.caller.policy != policy:
        named = region.decision.rule is not None
        inputs = policy.compute_dtype if named and not region.takes_dtype else None
        return Casts(inputs, policy.output_dtype, region.recurrent)
    return Casts(None, policy.compute_dtype if region.recurrent else None, region.recurrent)


def module_rules(rules: Any) -> PolicyRules:
    """The rules that a name, a policy or rules stand for, if modules can be put under them.

    Raises:
      ValueError: for `"O1"`, which is about operations.
      TypeError: for what is no policy.
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
    """What the rules say about a module: layers inside a layer of Flax follow it.

    The projections inside of an attention are how Flax has built it, and a rule about the
    attention means them too, unless a rule names them.

    Args:
      rules: the rules.
      path: where the module is.
      module: the module.
      caller: what was decided about the module that calls it.
      in_layer: whether that is a layer of Flax, with this module inside of it.

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
      call: what to call.
      casts: from `casts_around`.
      args: its positional arguments; the first is the carry of a recurrent cell.
      kwargs: its keyword arguments.
      is_opaque: true for objects that are pytrees but must be handed on as they are.

    Returns:
      What the call returns, cast.
    """

    def cast(tree: PyTree, dtype: DType | None) -> PyTree:
        if dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x if is_opaque and is_opaque(x) else cast_floating(x, dtype),
            tree,
            is_leaf=is_opaque,
        )

    if not casts.recurrent:
        args, kwargs = cast((args, kwargs), casts.inputs)
        return cast(call(*args, **kwargs), casts.output)
    carry = args[0] if args else kwargs.get("carry")
    new_carry, out = call(*args, **kwargs)
    return _cast_like(new_carry, carry), cast(out, casts.output)


def _cast_like(tree: PyTree, like: PyTree) -> PyTree:
    if not same_structure(tree, like):
        return tree

    def cast_leaf(x: Any, y: Any) -> Any:
        return cast_floating(x, y.dtype) if is_floating(x) and is_floating(y) else x

    return jax.tree.map(cast_leaf, tree, like)


def layer_dtype(dtype: DType, before: Any = None) -> Any:
    """A dtype as people write it for a layer: `jnp.bfloat16`, or in the form that it had before.

    >>> layer_dtype(jnp.dtype("bfloat16")) is jnp.bfloat16
    True
    >>> layer_dtype(jnp.dtype("bfloat16"), "float32")
    'bfloat16'
    """
    if isinstance(before, np.dtype):
        return dtype
    return dtype.name if isinstance(before, str) else getattr(jnp, dtype.name)


def new_instance(make_class: Callable[..., type], *args: Any) -> Any:
    """An empty instance of a class that was made at run time, for pickle to fill.

    >>> new_instance(lambda name: type(name, (), {}), "Dense").__class__.__name__
    'Dense'
    """
    return object.__new__(make_class(*args))


def takes_float_dtype(dtype: Any) -> bool:
    """Whether a layer with this `dtype` computes in floats, or in what its inputs have.

    >>> takes_float_dtype(None), takes_float_dtype("bfloat16"), takes_float_dtype(jnp.complex64)
    (True, True, False)
    """
    try:
        return dtype is None or bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def check_computable(rules: PolicyRules) -> None:
    """Raises ValueError for rules that compute in float8, which no layer can yet."""
    for policy in all_policies(rules):
        if policy.compute_dtype.itemsize == 1:
            raise ValueError(
                f"no layer can compute in {policy.compute_dtype} yet (policy {str(policy)!r}): a "
                "plain cast to float8 loses small values. Use 'mixed_bfloat16'"
            )


def check_honoured(
    path: str, module: Any, policy: Policy, param_dtypes: set[DType], *, has_children: bool
) -> None:
    """Raises unless a module without a dtype of its own can compute as its policy says.

    Its inputs are cast, but its own code mixes them with params of another dtype: the product
    of a bfloat16 input and a float32 param is float32, and nothing would show it.

    Args:
      path: where the module is.
      module: the module, which has no `dtype`.
      policy: the policy that was named for it.
      param_dtypes: the dtypes of the params that are its own.
      has_children: whether it has modules in it, which follow rules of their own.

    Raises:
      ValueError: if the params are wider than the compute dtype, and nothing but them computes.
    """
    wider = [
        dtype
        for dtype in param_dtypes
        if jnp.promote_types(dtype, policy.compute_dtype) != policy.compute_dtype
    ]
    if wider and not has_children:
        raise ValueError(
            f"{type(module).__name__} at {path or '(root)'!r} cannot compute in "
            f"{policy.compute_dtype}: it has {wider[0]} params, and no 'dtype' of its own that "
            "would say to cast them. Give its instances a dtype (in linen a field) and cast params "
            "to it where they are used, or leave it alone with the rule "
            f"({path or '/'!r}, None) before the others"
        )
