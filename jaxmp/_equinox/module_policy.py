"""Policies on Equinox modules: each module runs in scopes that say its path and its policy.

A module under a policy is an instance of a subclass with the same name, whose `__call__` opens the
scopes; its leaves are the same. Autocast reads the scopes, wherever it is put around the model. A
model that is called outside of any autocast puts one around itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp

from jaxmp._autocast.api import autocast, within_autocast
from jaxmp._equinox.module_tree import (
    is_module,
    map_modules,
    mark_of,
    own_leaves,
    rulings,
    with_mark,
    with_own_leaves,
)
from jaxmp._modules.decisions import has_call, kind_text, module_rules
from jaxmp._modules.marks import Method
from jaxmp._modules.scopes import Scope, in_scope, path_names, policy_names
from jaxmp._modules.summary import Row, Summary, dtype_text
from jaxmp._numerics.dtypes import DType, is_floating
from jaxmp._numerics.tree import cast_floating, leaf_names
from jaxmp._numerics.user_warnings import warn_once
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program.compat import is_traced

ModelT = TypeVar("ModelT")


def apply_policy(
    model: ModelT, rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> ModelT:
    """Puts an Equinox module under rules, which say in which precision each module inside computes.

    Equinox's layers have no `dtype` to compute in: they compute in what their params and inputs
    promote to. Under a policy they run under autocast, each module in the policy that the rules
    give it: products in the compute dtype, norms and softmax in float32. It holds within `vmap`,
    `jit`, `scan` and `checkpoint`.

    Give a model under a policy to `jaxmp.equinox.filter_value_and_grad`, or put `jaxmp.autocast`
    around the function that maps it over a batch. Autocast then sees the batch. Called on its own
    under `jax.vmap`, a model has a bias as large as its activations, and autocast keeps the sum of
    both in float32, as it does for updates of params: that is as exact, and takes more memory.

    Args:
      model: an Equinox module with a `__call__`. It stays as it is.
      rules: rules, a policy, or its name. A module is found by its path of fields, such as
        `layers/0/norm`, by its class, or by a predicate; `jaxmp.PolicyRules` says how.
      strict: whether a rule that matches no module is an error rather than a warning.

    Returns:
      The model under the rules, with the same fields, leaves and paths of leaves, so that
      checkpoints fit both. The floating arrays of each module are cast to the param dtype of its
      policy. Results of the model are cast to the output dtype of its own policy, but not an
      `equinox.nn.State`: running statistics stay float32. Only `__call__` is under the policy, of
      each module, and only that of the model brings autocast: a module that JAX traces outside of
      any gives a warning. Applying again replaces the rules; `remove_policy` takes them off.

    Raises:
      TypeError: if `model` is not an Equinox module, or cannot be called.
      ValueError: if a policy cannot be honoured, or, with `strict`, a rule matches nothing.

    >>> model = eqx.nn.MLP(2, 2, width_size=4, depth=2, key=jax.random.key(0))
    >>> rules = PolicyRules({"layers/2": "float32"}, default="mixed_bfloat16")
    >>> model = apply_policy(model, rules)
    >>> [row.compute for row in summary(model).rows]
    ['bfloat16', 'bfloat16', 'bfloat16', 'float32']
    >>> model(jnp.ones(2)).dtype
    dtype('float32')
    """
    _check_is_equinox(model)
    if not has_call(model):
        raise TypeError(
            f"a policy holds in the __call__ of a module, and {type(model).__name__} has none. Put "
            "the modules inside of it under a policy, with equinox.tree_at, or your function of it "
            "under jaxmp.autocast"
        )
    rules = module_rules(rules)
    plain = remove_policy(model)
    results = rulings(plain, rules)
    rules.warn_unused({path: ruling.module for path, ruling in results.items()}, strict=strict)

    leaves = zip(leaf_names(plain), jax.tree.leaves(plain), strict=True)
    dtypes = tuple((name, x.dtype) for name, x in leaves if is_floating(x))

    def under_policy(path: str, module: Any) -> Any:
        _, decision, family = results[path]
        policy = decision.policy
        # A StateIndex has the first running statistics, which stay float32.
        if policy is not None and not isinstance(module, eqx.nn.StateIndex):
            module = with_own_leaves(module, lambda x: cast_floating(x, policy.param_dtype))
        if not has_call(module):
            return module
        names = policy_names(policy, family)
        scope = Scope(path_names(path), names, type(module))
        # The model has the old dtypes of all leaves inside, for `remove_policy`.
        return with_mark(module, _Mark(scope, names, policy, None if path else dtypes))

    return map_modules(plain, under_policy)


def remove_policy(model: ModelT) -> ModelT:
    """Removes policies and scopes from a model and all modules in it, and restores param dtypes.

    Rounded values stay rounded.

    Args:
      model: an Equinox module, under rules or not. It stays as it is.

    Returns:
      The model without rules.

    Raises:
      TypeError: if `model` is not an Equinox module.

    >>> layer = apply_policy(eqx.nn.Linear(2, 2, key=jax.random.key(0)), "bfloat16")
    >>> layer.weight.dtype.name, remove_policy(layer).weight.dtype.name
    ('bfloat16', 'float32')
    """
    _check_is_equinox(model)

    def plain(_: str, module: Any) -> Any:
        module, mark = with_mark(module, None), mark_of(module)
        # Only the model that was put under the policy has dtypes, those of all leaves in it.
        if mark is None or mark.dtypes is None:
            return module
        dtypes, names = dict(mark.dtypes), iter(leaf_names(module))

        def restore(x: Any) -> Any:
            dtype = dtypes.get(next(names))
            return x if dtype is None else cast_floating(x, dtype)

        return jax.tree.map(restore, module)

    return map_modules(model, plain)


def with_scopes(model: ModelT) -> ModelT:
    """Names the modules of an Equinox model, as linen names its own: by scopes around their calls.

    Then rules of `jaxmp.autocast` find the modules by path, and `audit`, `find_overflow`,
    `sensitivity` and `compare` name them. A model under a policy has names already. Between these
    names are those that Equinox gives its own layers, such as `eqx.nn.Linear`. Layers with names
    are not alike: a model that stacks them when it is called cannot have names.

    Args:
      model: an Equinox module. It stays as it is.

    Returns:
      The model without a policy, and with the same leaves and paths of leaves. `remove_policy`
      takes the names off.

    Raises:
      TypeError: if `model` is not an Equinox module.

    >>> model = with_scopes(eqx.nn.MLP(2, 2, width_size=4, depth=1, key=jax.random.key(0)))
    >>> program = jax.make_jaxpr(lambda x: model(x))(jnp.ones(2))
    >>> print(program.eqns[-1].source_info.name_stack)
    eqx.nn.MLP/layers/1/eqx.nn.Linear
    """

    def with_name(path: str, module: Any) -> Any:
        scope = Scope(path_names(path), (), type(module))
        return with_mark(module, _Mark(scope, scope.path)) if has_call(module) else module

    return map_modules(remove_policy(model), with_name)


def summary(model: Any) -> Summary:
    """Lists the dtypes in which modules compute.

    Args:
      model: an Equinox module, under rules or not.

    Returns:
      A table with a row for each module, to print or to inspect. Without a policy, a module
      computes in what its params and inputs promote to, and the table does not say more.

    Raises:
      TypeError: if `model` is not an Equinox module.

    >>> model = apply_policy(eqx.nn.Linear(2, 3, key=jax.random.key(0)), "mixed_bfloat16")
    >>> summary(model).rows[0]
    Row(path='', type='Linear', param='float32', compute='bfloat16', output='float32', params=9)
    """
    _check_is_equinox(model)
    rows = []
    for path, (module, *_) in rulings(model, PolicyRules()).items():
        own = [x for x in own_leaves(module) if is_floating(x)]
        mark = mark_of(module)
        policy = None if mark is None else mark.policy
        if path and policy is None and not own:  # such as a list, or an activation
            continue
        compute = "" if policy is None else policy.compute_dtype.name
        output = "" if policy is None or mark.dtypes is None else policy.output_dtype.name
        count = sum(x.size for x in own)
        rows.append(Row(path, type(module).__name__, dtype_text(own), compute, output, count))
    return Summary(tuple(rows))


def has_policy(tree: Any) -> bool:
    """Whether a module in a tree was put under a policy."""
    return any(map(_is_under_policy, jax.tree.leaves(tree, is_leaf=_is_under_policy)))


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The scopes that a module runs in, and the changes that a policy has made to it.

    Attributes:
      scope: the scopes.
      key: the names by which marks compare.
      policy: the policy, or None.
      dtypes: for the model that was put under the policy, the dtypes that its floating leaves had
        before, by their paths; None for the modules inside of it.
    """

    # Static, hence part of the structure: `equinox.filter_jit` distinguishes models under different
    # policies. Pickles record these names. Under a policy, layers of one class and policy are
    # equal, whatever their paths: a model may stack them.
    scope: Scope = dataclasses.field(compare=False)
    key: tuple[str, ...]
    policy: Policy | None = None
    dtypes: tuple[tuple[str, DType], ...] | None = None

    def call(self, method: Method, module: Any, args: Any, kwargs: Any) -> Any:
        """Calls a module in its scopes, and the model itself under autocast, if it is not yet."""
        if self.dtypes is None:
            traced = any(map(is_traced, jax.tree.leaves((module, args, kwargs))))
            if traced and self.policy is not None and not within_autocast():
                warn_once(_OUTSIDE.format(type(module).__name__), type(module))
            with in_scope(self.scope):
                return method(module, *args, **kwargs)
        if not within_autocast():
            return _module_call(module, args, kwargs)
        with in_scope(self.scope):
            # Autocast makes no product wider than it was traced, and a rule may ask for float32
            # layers in a 16-bit model. So the model is traced in float32.
            def widen(x: Any) -> Any:
                is_16_bit = is_floating(x) and x.dtype.itemsize == 2
                return cast_floating(x, jnp.float32) if is_16_bit else x

            module, args, kwargs = _all_but_states(widen, (module, args, kwargs))
            out = method(module, *args, **kwargs)
        policy = self.policy
        if policy is None:
            return out
        return _all_but_states(lambda x: cast_floating(x, policy.output_dtype), out)


_OUTSIDE = (
    "a {} of a model under a policy is called outside of autocast, where no policy holds: only a "
    "call of the model itself brings autocast. Differentiate with "
    "jaxmp.equinox.filter_value_and_grad, or put jaxmp.autocast(fun, jaxmp.PolicyRules()) around "
    "the function that calls it"
)


# Empty rules: operations outside of modules under a policy stay as they were traced.
@functools.partial(autocast, policy=PolicyRules())
def _module_call(module: Any, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _is_under_policy(x: Any) -> bool:
    mark = mark_of(x) if is_module(x) else None
    return mark is not None and mark.dtypes is not None


def _all_but_states(change: Callable[[Any], Any], tree: Any) -> Any:
    """Changes the leaves of a tree, except those in an `equinox.nn.State`."""

    def is_state(x: Any) -> bool:
        return isinstance(x, eqx.nn.State)

    return jax.tree.map(lambda x: x if is_state(x) else change(x), tree, is_leaf=is_state)


def _check_is_equinox(model: Any) -> None:
    if is_module(model):
        return
    bases = (model if isinstance(model, type) else type(model)).__mro__
    hint = ""
    if isinstance(model, type) and issubclass(model, eqx.Module):
        hint = ". Make a module of it first"
    elif any(base.__module__.startswith("flax.") for base in bases):
        hint = ". For modules of Flax use jaxmp.linen or jaxmp.nnx"
    elif callable(model):
        hint = ". For a function use jaxmp.autocast"
    raise TypeError(f"jaxmp.equinox works on Equinox modules, got {kind_text(model)}{hint}")
