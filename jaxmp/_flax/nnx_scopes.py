"""Names the operations of nnx modules by scopes, since nnx has no name stack of its own.

A module under a scope becomes an instance of a subclass with the same name. Its methods run in
`jax.named_scope`s for its path and for its policy. Operations keep these scopes through jit, scan,
remat and differentiation.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.nnx_modules import first_paths, is_flax_layer, is_node, modules, modules_with_paths
from jaxmp._modules.decisions import decide
from jaxmp._modules.marks import marked_class
from jaxmp._modules.scopes import Scope, path_names, policy_names
from jaxmp._policies.policy_rules import Decision, PolicyRules

ModelT = TypeVar("ModelT")


@contextlib.contextmanager
def open_scopes(tree: Any, rules: PolicyRules) -> Iterator[None]:
    """Makes the modules of a tree run in scopes for their policies, as long as this is open.

    Raises:
      ValueError: if a module is at two places for which the rules have different policies.
    """
    roots = _root_modules(tree)
    scoped_modules: list[Any] = []
    try:
        for root in roots:
            for module, scope in _module_scopes(root, rules):
                scoped_modules.append(module)
                _enter(module, scope)
        yield
    finally:
        # A copy that the function puts into one of these modules has the scopes too.
        for inner in [inner for module in scoped_modules for inner in modules(module)]:
            if (scope := vars(inner).get("_jaxmp_scope")) is not None:
                object.__setattr__(inner, "__class__", scope.plain)
                object.__delattr__(inner, "_jaxmp_scope")


def with_scopes(model: ModelT) -> ModelT:
    """Names the modules of an nnx model, as linen names its own: by scopes around their methods.

    Then rules of `jaxmp.autocast` find the modules by path, and `audit`, `find_overflow`,
    `sensitivity` and `compare` name them, also in a loss that merges the model:
    `graphdef, params = nnx.split(jaxmp.nnx.with_scopes(model))`.

    Args:
      model: an nnx module. It is changed in place: its modules become instances of subclasses with
        the same names.

    Returns:
      The model.

    Raises:
      TypeError: if `model` is not an nnx module.

    >>> model = with_scopes(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    >>> program = jax.make_jaxpr(model)(jax.numpy.ones((1, 2)))
    >>> program.eqns[-1].source_info.name_stack
    NameStack(stack=(Scope(name='layers'), Scope(name='0')))
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"with_scopes takes an nnx module, got {type(model).__name__}")
    for path, module in first_paths(model).values():
        if "_jaxmp_scope" not in vars(module):
            _enter(module, Scope(path_names(path), (), type(module)))
    return model


def with_plain_params(loss_fn: Callable[..., Any], model: Any) -> tuple[Callable[..., Any], Any]:
    """Returns a loss of plain params for `loss_fn(model, *args, **kwargs)`, and the params.

    The model stays as it is. In the new loss its modules are named by scopes.
    """
    graphdef, *states = nnx.split(with_scopes(nnx.clone(model)), nnx.Param, ...)
    params, others = states

    @functools.wraps(loss_fn)
    def of_params(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(nnx.merge(graphdef, params, others, copy=True), *args, **kwargs)

    return of_params, params


def warn_unused_rules(tree: Any, rules: PolicyRules) -> None:
    """Warns of rules that decide nothing about the modules in a tree."""
    roots = _root_modules(tree)
    by_path = {path: module for root in roots for path, module, _ in modules_with_paths(root)}
    rules.warn_unused(by_path, strict=False)


def _root_modules(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=is_node)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _module_scopes(root: Any, rules: PolicyRules) -> list[tuple[Any, Scope]]:
    decisions: dict[str, Decision] = {}
    layers: set[str] = set()
    float8 = Float8Layers(rules, strict=False)
    scopes: dict[int, tuple[Any, Scope, str]] = {}
    for path, module, parent in modules_with_paths(root):
        caller = None if parent is None else decisions[parent]
        decision = decide(rules, path, module, caller, in_layer=parent in layers)
        decisions[path] = decision
        layers |= {path} if is_flax_layer(module) else set()
        policy = decision.policy
        family = float8.family(path, module, decision)
        scope = Scope(path_names(path), policy_names(policy, family), type(module))
        _, first, first_path = scopes.setdefault(id(module), (module, scope, path))
        if decisions[first_path].policy != policy:
            raise ValueError(
                f"{type(module).__name__} is one module at two places, {first_path!r} and "
                f"{path!r}, and the rules give them different policies. Give both the same policy"
            )
        if family is not None:  # left out at one place, it is left out at all
            first = dataclasses.replace(first, policies=scope.policies)
            scopes[id(module)] = module, first, first_path
    return [(module, scope) for module, scope, _ in scopes.values()]


def _enter(module: Any, scope: Scope) -> None:
    cls: Any = type(module)
    cls = _scoped_class(cls, not jax.tree_util.all_leaves([module]))
    # nnx's own __setattr__ would add the name to the module's list of attributes for good.
    object.__setattr__(module, "_jaxmp_scope", scope)
    object.__setattr__(module, "__class__", cls)


@functools.lru_cache(maxsize=512)
def _scoped_class(cls: Any, is_pytree: bool) -> Any:
    # Public methods and `__call__`, but not those of `nnx.Module`.
    own = [base for base in cls.__mro__ if base not in nnx.Module.__mro__]
    names = [
        name
        for name in dict.fromkeys(name for base in own for name in vars(base))
        if inspect.isfunction(inspect.getattr_static(cls, name))
        and (name == "__call__" or not name.startswith("_"))
    ]
    remake = (_scoped_class, cls, is_pytree)
    return marked_class(cls, "_jaxmp_scope", remake, names=names, pytree=is_pytree)
