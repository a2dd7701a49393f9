"""Policies on linen modules: one set of rules for a whole model, without touching its code."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jmp
from flax import linen as nn

from jaxmp._linen_session import is_foreign, is_reached, own_params, session, takes_dtype
from jaxmp._regions import check_computable, module_rules, new_instance
from jaxmp._rules import PolicyRules
from jaxmp._summary import Row, Summary, dtype_text
from jaxmp._warnings import warn_once

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_ClassT = TypeVar("_ClassT", bound=type)


def apply_policy(
    module: _ModuleT, rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> _ModuleT:
    """A linen module under rules: every layer in it computes in the dtype that they say.

    Layers set by hand are easily forgotten, and a norm or head in the wrong precision shows in no
    shape. Here the rules are looked up for each module as it is called, by the path that it has in
    the tree of params, inside `nn.scan`, `nn.remat`, `nn.jit` and the like too.

    A module with a `dtype` computes in the compute dtype of its policy, params are made in
    `param_dtype` (the values of a float32 `init`, rounded), and what leaves the model, or leaves a
    part of it under one rule for a part under another, is cast to the output dtype of its policy.
    A module without a `dtype` is left alone, unless a rule names it: then its floating inputs are
    cast to the compute dtype. Batch statistics stay float32. Where a class within the model has
    rules of its own (`with_policy`), those hold for it. Params that no policy reaches, since
    their module has no `dtype`, are told of in a warning with their share, when the model is first
    initialised or applied.

    Args:
      module: a module that is no part of another one yet, or is being assigned in `setup`.
      rules: rules, a policy, or its name.
      strict: whether a rule that does nothing is an error rather than a warning: one that matches
        no module, when the model is initialised; or one that names a module that computes in
        another dtype, when that is called.

    Returns:
      A copy of the module, of a subclass of its class, with the same names and params. Use `init`,
      `apply` with all their options, or make it a part of other modules. What is fetched from
      `bind` and called by itself is not under the rules. Applying again replaces the rules;
      `remove_policy` takes them off.

    Raises:
      TypeError: if `module` is no linen module.
      ValueError: if it is bound already, or a policy cannot be honoured; the latter for a single
        module when it is called.

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
    >>> rules = PolicyRules({"layers_1": "float32"}, default="mixed_bfloat16")
    >>> model = apply_policy(model, rules)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(variables, jnp.ones((1, 3))).dtype.name
    'float32'
    """
    if not isinstance(module, nn.Module):
        raise TypeError(_not_a_module(module))
    if module.scope is not None:
        raise ValueError(
            f"{type(module).__name__} is bound to its variables or to a parent already. Apply the "
            "policy to the unbound module, or inside of a compact method to the class: "
            "jaxmp.linen.with_policy(rules)(Class)(...)"
        )
    before = _before(type(module))
    return _rebuild(module, _under(_plain(before), _checked(rules), strict, before))


def remove_policy(module: _ModuleT) -> _ModuleT:
    """The module without the rules that `apply_policy` put on it.

    Args:
      module: a module, under rules or not.

    Returns:
      A copy of the class that it had before. What `with_policy` decorates a class with stays.

    Raises:
      TypeError: if `module` is no linen module.

    >>> type(remove_policy(apply_policy(nn.Dense(2), "bfloat16"))) is nn.Dense
    True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(_not_a_module(module))
    return _rebuild(module, _before(type(module)))


def with_policy(
    rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> Callable[[_ClassT], _ClassT]:
    """A decorator that puts every module of a class under rules, wherever it is used.

    Args:
      rules: rules with paths that start at the module, a policy, or its name.
      strict: see `apply_policy`.

    Returns:
      The decorator. The class that it returns has the same name, so that params keep their paths.
      Within a model under other rules, the class keeps its own. Of a subclass only the inherited
      methods are under the rules: decorate it too. If it overrides one, a warning says so.

    Raises:
      TypeError: if it decorates something else than a linen class.

    >>> import jax.numpy as jnp
    >>> @with_policy("mixed_bfloat16")
    ... class Encoder(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(2)(nn.Dense(8)(x))
    >>> encoder = Encoder()
    >>> variables = encoder.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> encoder.apply(variables, jnp.ones((1, 3))).dtype.name
    'float32'
    """
    checked = _checked(rules)

    def decorate(cls: _ClassT) -> _ClassT:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"with_policy decorates classes of linen modules, got {cls!r}. For a module "
                "write jaxmp.linen.apply_policy(module, rules)"
            )
        return _under(_plain(cls), checked, strict, None)

    return decorate


def summary(module: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Summary:
    """Which module computes in which dtype, found by tracing `init`; nothing is computed.

    Args:
      module: a module, under rules or not.
      rngs: as for `init`; an abstract key will do.
      *args: example inputs, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the module.

    Returns:
      A table with a row for each module that was called, to print or to look into. Its dtypes
      are those found: of the params, of the layer's `dtype`, and of what it returned.

    >>> import jax.numpy as jnp
    >>> model = apply_policy(nn.Dense(4), "mixed_bfloat16")
    >>> summary(model, jax.random.key(0), jnp.ones((1, 3))).rows[0]
    Row(path='', type='Dense', param='float32', compute='bfloat16', output='float32', params=16)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(_not_a_module(module))
    found: dict[str, Row] = {}
    foreign: list[nn.Module] = []

    def record(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called, path = context.module, "/".join(context.module.path)
        is_call = context.method_name != "setup" and hasattr(type(called), context.method_name)
        if found and is_foreign(called, module):
            foreign.append(called)
            try:
                return next_fun(*args, **kwargs)
            finally:
                foreign.pop()
        first = is_call and path not in found and not foreign
        if first:
            found[path] = Row(path, type(called).__name__, "", "", "", 0)
        out = next_fun(*args, **kwargs)
        if first:
            own = [x for x in jax.tree.leaves(own_params(called)) if hasattr(x, "dtype")]
            found[path] = Row(
                path=path,
                type=type(called).__name__,
                param=dtype_text(own),
                compute=_compute_text(called),
                output=dtype_text([x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]),
                params=sum(x.size for x in own),
                reached=is_reached(called),
            )
        return out

    leaves, treedef = jax.tree.flatten((rngs, args, kwargs))
    arrays = [x if hasattr(x, "dtype") else None for x in leaves]

    def init(arrays: list[Any]) -> Any:
        filled = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        rngs, args, kwargs = jax.tree.unflatten(treedef, filled)
        return module.init(rngs, *args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(init, arrays)
    return Summary(tuple(found.values()))


class _Applied(NamedTuple):
    """What a class made by `_under` remembers."""

    plain: type
    before: type | None


@functools.lru_cache(maxsize=512)
def _under(cls: Any, rules: PolicyRules, strict: bool, before: Any) -> Any:
    """A subclass with the same name whose methods run under rules.

    `before` is the class that a module gets back when they are removed; None for a decorated
    class, which keeps them.
    """
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_jaxmp": _Applied(cls, before),
    }

    def at_the_root(name: str) -> Any:
        @functools.wraps(getattr(cls, name))
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = getattr(super(under, self), name)
            if "_jaxmp" not in vars(type(self)):
                return call(*args, **kwargs)  # a subclass: only the methods that it inherits
            with session(rules, (), self, strict=strict, at_the_root=True) as active:
                out = call(*args, **kwargs)
            if active is not None:
                variables = {"init": out, "apply": args[0] if args else kwargs.get("variables")}
                active.check_traces(found := variables[name] if name in variables else out[1])
                active.warn(found, again=name != "apply")
                if name != "apply":
                    active.warn_unused(strict=strict)
            return out

        return method

    def wherever_it_is(name: str) -> Any:
        @functools.wraps(getattr(cls, name))
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = getattr(super(under, self), name)
            if self.scope is None:
                return call(*args, **kwargs)
            with session(rules, self.path, self, strict=strict) as active:
                out = call(*args, **kwargs)
            if active is not None and name == "__call__":
                active.check_traces(self.variables)
                active.warn(self.variables, again=self.is_initializing())
                if self.is_initializing():
                    active.warn_unused(strict=strict)
            return out

        return method

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = super(under, self).__reduce_ex__(protocol)
        # Pickle finds classes by name: that of a decorated class is this one, else the plain one.
        found: Any = sys.modules.get(cls.__module__)
        for name in cls.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is type(self):
            return reduced
        return (new_instance, (_under, cls, rules, strict, before), *reduced[2:])

    body["__reduce_ex__"] = nn.nowrap(reduce_ex)
    body |= {name: nn.nowrap(at_the_root(name)) for name in ("init_with_output", "init", "apply")}
    body |= {name: nn.nowrap(wherever_it_is(name)) for name in _method_names(cls)}
    # What a decorator returns takes the place of the class, in a registry of its author's too.
    hook: type = _Hinting if before is None else _Quiet
    under = type(cls)(cls.__name__, (cls,) if issubclass(cls, hook) else (hook, cls), body)
    return under


class _Quiet:
    """Makes a class under rules without the hook of its author, which may keep a registry."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_jaxmp" in vars(cls):
            nn.Module.__init_subclass__.__func__(cls, **kwargs)  # type: ignore[attr-defined]
        else:
            super().__init_subclass__(**kwargs)


class _Hinting:
    """Makes a decorated class tell of a subclass that overrides methods, and is not decorated."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        classes = type(self).__mro__
        decorated = next(i for i, cls in enumerate(classes) if "_jaxmp" in vars(cls))
        # What a transform of Flax makes of a class, as nn.remat does, calls the methods of that.
        theirs = [cls for cls in classes[:decorated] if not cls.__module__.startswith("flax.")]
        methods = {"__call__", *_method_names(classes[decorated])}
        lost = sorted(name for name in methods if any(name in vars(cls) for cls in theirs))
        if lost:
            name = type(self).__name__
            warn_once(
                f"{name} is a subclass of {classes[decorated].__name__}, which with_policy puts "
                f"under rules, and overrides {', '.join(lost)}: what it overrides is not under "
                f"them. Decorate {name} too",
                type(self),
            )


def _method_names(cls: type) -> list[str]:
    """The methods that people call: not setup, which the others call, and no hooks of Python."""
    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    fields = {field.name for field in dataclasses.fields(cls)}
    return sorted(
        {
            name
            for base in own
            for name, value in vars(base).items()
            if inspect.isfunction(value)
            and not hasattr(value, "nowrap")
            and (name == "__call__" or not name.startswith("__"))
            and name != "setup"
            and name not in fields
        }
    )


def _plain(cls: Any) -> Any:
    return vars(cls)["_jaxmp"].plain if "_jaxmp" in vars(cls) else cls


def _before(cls: Any) -> Any:
    applied = vars(cls).get("_jaxmp")
    return cls if applied is None or applied.before is None else applied.before


def _rebuild(module: Any, cls: Any) -> Any:
    values = {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.init and field.name != "parent"
    }
    # In a setup method, a module knows its parent before it has a name.
    return cls(**values, parent=module.parent)


def _checked(rules: str | jmp.Policy | PolicyRules) -> PolicyRules:
    checked = module_rules(rules)
    check_computable(checked)
    return checked


def _compute_text(module: nn.Module) -> str:
    if not takes_dtype(module):
        return ""
    dtype = getattr(module, "dtype", None)
    return "from inputs" if dtype is None else jax.numpy.dtype(dtype).name


def _not_a_module(given: Any) -> str:
    what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    hint = ""
    if isinstance(given, type) and issubclass(given, nn.Module):
        hint = ". Make a module of it, or decorate it with jaxmp.linen.with_policy(rules)"
    elif type(given).__module__.startswith("flax.nnx") or any(
        base.__module__.startswith("flax.nnx") for base in type(given).__mro__
    ):
        hint = ". For an nnx module use jaxmp.nnx"
    return f"jaxmp.linen works on linen modules, got {what}{hint}"
