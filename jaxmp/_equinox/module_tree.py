"""Finds the modules in an Equinox module, and rebuilds it with others in their place."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax

from jaxmp._modules.decisions import decide, family_of, has_call
from jaxmp._modules.marks import Mark, marked_class
from jaxmp._policies.policy_rules import Decision, PolicyRules


class Ruling(NamedTuple):
    """What rules decide about a module, and the family for which it is left out of float8."""

    module: Any
    decision: Decision
    family: str | None


def rulings(model: Any, rules: PolicyRules) -> dict[str, Ruling]:
    """Returns what rules decide about each module in a model by its path, parents first."""
    results: dict[str, Ruling] = {}
    families: dict[str, str | None] = {}

    def visit(module: Any, path: str, caller: Decision | None, in_layer: bool) -> None:
        decision = decide(rules, path, module, caller, in_layer=in_layer)
        families[path] = family_of(path, module, decision, families)
        results[path] = Ruling(module, decision, families[path])
        # A module without a call is a container: its owner calls the modules in it.
        owner = decision if has_call(module) or caller is None else caller
        in_child_layer = is_equinox_layer(module) or (in_layer and not has_call(module))
        for name in _dynamic(module):
            leaves = jax.tree_util.tree_flatten_with_path(vars(module)[name], is_leaf=is_module)[0]
            for keys, leaf in leaves:
                if is_module(leaf):
                    visit(leaf, _joined_path(path, name, keys), owner, in_child_layer)

    visit(model, "", None, False)
    return results


def is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def is_equinox_layer(module: Any) -> bool:
    """Whether a module is a layer of Equinox, whose inner layers Equinox's own code makes."""
    # The modules in these two are the author's own.
    containers = (eqx.nn.Sequential, eqx.nn.Shared)
    is_own = any(base.__module__.startswith("equinox.nn.") for base in type(module).__mro__)
    return is_own and not isinstance(module, containers)


def own_leaves(module: Any) -> list[Any]:
    """Returns the leaves of a module without those of the modules inside of it."""
    fields = [vars(module)[name] for name in _dynamic(module)]
    return [x for x in jax.tree.leaves(fields, is_leaf=is_module) if not is_module(x)]


def with_own_leaves(module: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a module with its own leaves changed, and the modules inside of it as they are."""
    own = dict(vars(module))
    for name in _dynamic(module):
        own[name] = jax.tree.map(
            lambda x: x if is_module(x) else change(x), own[name], is_leaf=is_module
        )
    return _instance(type(module), own)


def map_modules(model: Any, change: Callable[[str, Any], Any]) -> Any:
    """Returns a model with `change(path, module)` of each of its modules, from the inside out."""

    def rebuild(module: Any, path: str) -> Any:
        def inner(name: str, keys: Any, x: Any) -> Any:
            return rebuild(x, _joined_path(path, name, keys)) if is_module(x) else x

        own = dict(vars(module))
        for name in _dynamic(module):
            function = functools.partial(inner, name)
            own[name] = jax.tree_util.tree_map_with_path(function, own[name], is_leaf=is_module)
        return change(path, _instance(type(module), own))

    return rebuild(model, "")


def mark_of(module: Any) -> Any:
    """Returns what `with_mark` put on a module, or None."""
    return vars(module).get("_jaxmp")


def with_mark(module: Any, mark: Mark | None) -> Any:
    """Returns a module with a mark, a static value; with None, a plain one."""
    # A module has one mark: the class under it is always the author's.
    plain: Any = getattr(type(module), "_jaxmp_plain", type(module))
    own = {name: value for name, value in vars(module).items() if name != "_jaxmp"}
    if mark is None:
        return _instance(plain, own)
    return _instance(_class_with_mark(plain), own | {"_jaxmp": mark})


def _dynamic(module: Any) -> list[str]:
    """Returns the names of the fields with leaves."""
    # A module may have fields that are not set.
    fields = type(module).__dataclass_fields__.values()
    names = [field.name for field in fields if not field.metadata.get("static", False)]
    return [name for name in names if name in vars(module)]


def _joined_path(path: str, name: str, keys: Any) -> str:
    key_text = jax.tree_util.keystr(keys, simple=True, separator="/")
    return "/".join(filter(None, (path, name, key_text)))


def _instance(cls: Any, attributes: dict[str, Any]) -> Any:
    # Equinox unflattens modules like this. They are frozen, and an author's __init__ may take
    # other arguments than the fields.
    instance = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)
    return instance


# Pickles of modules under a policy record this function by its name, with its argument.
@functools.lru_cache(maxsize=512)
def _class_with_mark(cls: Any) -> Any:
    body = {
        "__annotations__": {"_jaxmp": Any},
        # In the structure of the tree, and not among its leaves.
        "_jaxmp": eqx.field(static=True, default=None, repr=False),
        "_jaxmp_plain": cls,
    }
    return marked_class(cls, "_jaxmp", (_class_with_mark, cls), body=body)
