"""Policies on linen modules: one set of rules for a whole model, without touching its code."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jmp
from flax import linen as nn

from jaxmp._flax.layer_products import float8_text
from jaxmp._flax.linen_interceptor import is_other_model, is_reached, session
from jaxmp._flax.linen_layers import linen_takes_dtype, params_of_linen
from jaxmp._modules.decisions import kind_text, module_rules
from jaxmp._modules.marks import Method, marked_class
from jaxmp._modules.summary import Row, Summary, dtype_text
from jaxmp._numerics.user_warnings import warn_once
from jaxmp._policies.policy_rules import PolicyRules

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_ClassT = TypeVar("_ClassT", bound=type)


def apply_policy(
    module: _ModuleT, rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> _ModuleT:
    """Puts a linen module under rules, which set the dtype of every layer in it.

    When dtypes are set by hand, layers are easily forgotten, and no shape shows a norm or head in
    the wrong precision. `apply_policy` instead looks up the rules for each module when it is
    called, by its path in the params, also inside `nn.scan`, `nn.remat`, `nn.jit` and similar.

    A module with a `dtype` computes in the compute dtype of its policy. Params are made in
    `param_dtype`: the values of a float32 `init`, rounded. Results of the model are cast to the
    output dtype of its policy. If a module inside it has another policy than its caller, the
    module's results are cast to the output dtype of the module's own policy. A module without a
    `dtype` is left alone, unless a rule names it: then its floating inputs are cast to the compute
    dtype. Batch statistics stay float32. A class within the model that has its own rules
    (`with_policy`) keeps them. A warning reports the share of params that no policy reaches,
    because their module has no `dtype`, when the model is first initialised or applied.

    Args:
      module: a module that is not part of another one yet, or is being assigned in `setup`.
      rules: rules, a policy, or its name.
      strict: whether a rule without effect is an error rather than a warning: a rule that matches
        no module, when the model is initialised; or a rule that names a module which computes in
        another dtype, when the module is called.

    Returns:
      A copy of the module, of a subclass of its class, with the same names and params. Use `init`,
      `apply` with all their options, or make it a part of other modules. The rules do not hold for
      submodules of a bound module (`bind`) that are called directly. Applying again replaces the
      rules; `remove_policy` takes them off.

    Raises:
      TypeError: if `module` is not a linen module.
      ValueError: if the module is bound already, or a policy cannot be honoured; for a single
        module, the latter is raised when it is called.

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
    >>> rules = PolicyRules({"layers_1": "float32"}, default="mixed_bfloat16")
    >>> model = apply_policy(model, rules)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(variables, jnp.ones((1, 3))).dtype.name
    'float32'
    """
    _check_is_linen(module)
    if module.scope is not None:
        raise ValueError(
            f"{type(module).__name__} is bound to its variables or to a parent already. Apply the "
            "policy to the unbound module, or inside of a compact method to the class: "
            "jaxmp.linen.with_policy(rules)(Class)(...)"
        )
    before = _class_before(type(module))
    return _rebuild(module, _under(_plain_class(before), module_rules(rules), strict, before))


def remove_policy(module: _ModuleT) -> _ModuleT:
    """Removes the rules that `apply_policy` put on a module.

    Args:
      module: a module, under rules or not.

    Returns:
      A copy of the module, of the class that it had before. Rules from `with_policy` stay.

    Raises:
      TypeError: if `module` is not a linen module.

    >>> type(remove_policy(apply_policy(nn.Dense(2), "bfloat16"))) is nn.Dense
    True
    """
    _check_is_linen(module)
    return _rebuild(module, _class_before(type(module)))


def with_policy(
    rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> Callable[[_ClassT], _ClassT]:
    """Returns a decorator that puts every module of a class under rules, wherever it is used.

    Args:
      rules: rules with paths that start at the module, a policy, or its name.
      strict: see `apply_policy`.

    Returns:
      The decorator. The class that it returns has the same name, so that params keep their paths.
      Within a model under other rules, the class keeps its own rules. In a subclass, only the
      inherited methods are under the rules: decorate the subclass too. A warning says so if the
      subclass overrides a method.

    Raises:
      TypeError: if it decorates anything but a linen class.

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
    rules = module_rules(rules)

    def decorate(cls: _ClassT) -> _ClassT:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"with_policy decorates classes of linen modules, got {cls!r}. For a module "
                "write jaxmp.linen.apply_policy(module, rules)"
            )
        return _under(_plain_class(cls), rules, strict, None)

    return decorate


def summary(module: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Summary:
    """Lists the dtypes in which modules compute, by tracing `init`; nothing is computed.

    Args:
      module: a module, under rules or not.
      rngs: as for `init`; an abstract key is enough.
      *args: example inputs, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the module.

    Returns:
      A table with a row for each module that was called, to print or to inspect. Its dtypes are
      those found in the trace: of the params, of the layer's `dtype`, and of the results.

    >>> import jax.numpy as jnp
    >>> model = apply_policy(nn.Dense(4), "mixed_bfloat16")
    >>> summary(model, jax.random.key(0), jnp.ones((1, 3))).rows[0]
    Row(path='', type='Dense', param='float32', compute='bfloat16', output='float32', params=16)
    """
    _check_is_linen(module)
    rows: dict[str, Row] = {}
    foreign: list[nn.Module] = []

    def record(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        part, path = context.module, "/".join(context.module.path)
        is_call = context.method_name != "setup" and hasattr(type(part), context.method_name)
        # A model that is applied inside of this one, like a teacher, has paths of its own.
        if rows and is_other_model(part, module):
            foreign.append(part)
            try:
                return next_fun(*args, **kwargs)
            finally:
                foreign.pop()
        is_first = is_call and path not in rows and not foreign
        # The row keeps its place before those of the modules inside.
        if is_first:
            rows[path] = Row(path, type(part).__name__, "", "", "", 0)
        out = next_fun(*args, **kwargs)
        if is_first:
            own = [x for x in jax.tree.leaves(params_of_linen(part)) if hasattr(x, "dtype")]
            rows[path] = Row(
                path=path,
                type=type(part).__name__,
                param=dtype_text(own),
                compute=_compute_text(part),
                output=dtype_text([x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]),
                params=sum(x.size for x in own),
                reached=is_reached(part),
            )
        return out

    # Flags among the arguments stay Python values: the module may branch on them.
    leaves, treedef = jax.tree.flatten((rngs, args, kwargs))
    arrays = [x if hasattr(x, "dtype") else None for x in leaves]

    def init(arrays: list[Any]) -> Any:
        values = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        rngs, args, kwargs = jax.tree.unflatten(treedef, values)
        return module.init(rngs, *args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(init, arrays)
    return Summary(tuple(rows.values()))


class _ClassRules(NamedTuple):
    """The mark of a class under rules, on the class itself: Flax makes copies of instances.

    Attributes:
      plain: the class without rules.
      before: the class that a module gets back when its rules are removed; None for a decorated
        class, which keeps its rules.
      rules: the rules.
      strict: whether a rule without effect is an error.
    """

    plain: type
    before: type | None
    rules: PolicyRules
    strict: bool

    def call(self, method: Method, module: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method under the rules, unless an unbound module has no path for them."""
        is_root = method.name in _ROOT_METHODS
        # A subclass of a decorated class has the rules in the methods that it inherits alone.
        if is_root and "_jaxmp" in vars(type(module)):
            return self._call_root(method, module, args, kwargs)
        if is_root or module.scope is None:
            return method(module, *args, **kwargs)
        with session(self.rules, module.path, module, strict=self.strict) as active:
            out = method(module, *args, **kwargs)
        if active is not None and method.name == "__call__":
            active.report(module.variables, whole=True, is_init=module.is_initializing())
        return out

    def _call_root(self, method: Method, module: Any, args: Any, kwargs: Any) -> Any:
        with session(self.rules, (), module, strict=self.strict, at_the_root=True) as active:
            out = method(module, *args, **kwargs)
        if active is not None:
            variables: Any = args[0] if args else kwargs.get("variables")
            is_init = method.name != "apply"
            if is_init:
                variables = out if method.name == "init" else out[1]
            active.report(variables, whole=not kwargs.get("method"), is_init=is_init)
        return out


_ROOT_METHODS = ("init_with_output", "init", "apply")


# Pickles of modules under rules record this function by its name, with its arguments.
@functools.lru_cache(maxsize=512)
def _under(cls: Any, rules: PolicyRules, strict: bool, before: Any) -> Any:
    # A decorated class replaces the original one, also in a registry that its author keeps.
    hook: type = _OverrideHint if before is None else _NoHook
    under = marked_class(
        cls,
        "_jaxmp",
        (_under, cls, rules, strict, before),
        names=(*_ROOT_METHODS, *_method_names(cls)),
        base=None if issubclass(cls, hook) else hook,
        body={"_jaxmp": _ClassRules(cls, before, rules, strict)},
        # Flax would wrap these as methods of the module, and intercept each call twice.
        decorate=nn.nowrap,
    )
    # Flax makes an `__init__` for each class. The author may have wrapped that of the first, to set
    # more than the fields, as diffusers' `flax_register_to_config` does.
    under.__init__ = (before or cls).__init__
    return under


class _NoHook:
    """A base of classes under rules that skips the author's `__init_subclass__`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The author's hook may keep a registry, and this class has the name of another.
        if "_jaxmp" in vars(cls):
            nn.Module.__init_subclass__.__func__(cls, **kwargs)  # type: ignore[attr-defined]
        else:
            super().__init_subclass__(**kwargs)


class _OverrideHint:
    """A base of decorated classes that warns if an undecorated subclass overrides methods."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        classes = type(self).__mro__
        decorated = next(i for i, cls in enumerate(classes) if "_jaxmp" in vars(cls))
        # Classes that Flax's transforms make, such as nn.remat, call the original methods.
        theirs = [cls for cls in classes[:decorated] if not cls.__module__.startswith("flax.")]
        methods = {"__call__", *_method_names(classes[decorated])}
        overrides = sorted(name for name in methods if any(name in vars(cls) for cls in theirs))
        if overrides:
            name = type(self).__name__
            warn_once(
                f"{name} is a subclass of {classes[decorated].__name__}, which with_policy puts "
                f"under rules, and overrides {', '.join(overrides)}: these methods are not under "
                f"the rules. Decorate {name} too",
                type(self),
            )


def _method_names(cls: type) -> list[str]:
    """Returns the names of methods that users call: without setup and Python's special methods."""
    # A field may hold a function, which is not a method.
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


def _plain_class(cls: Any) -> Any:
    return vars(cls)["_jaxmp"].plain if "_jaxmp" in vars(cls) else cls


def _class_before(cls: Any) -> Any:
    # `apply_policy` on a decorated class replaces its rules, and `remove_policy` restores them.
    mark = vars(cls).get("_jaxmp")
    return cls if mark is None or mark.before is None else mark.before


def _rebuild(module: Any, cls: Any) -> Any:
    # A field that `init` does not take is computed again, as by the author's `__post_init__`.
    values = {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.init and field.name != "parent"
    }
    # In a setup method, a module has a parent before it has a name.
    copy = cls(**values, parent=module.parent)
    for name in vars(module).keys() - vars(copy).keys():
        # Attributes that were set from outside stay. A cached property is that of the old module.
        if not hasattr(type(module), name):
            object.__setattr__(copy, name, vars(module)[name])
    return copy


def _compute_text(module: nn.Module) -> str:
    if not linen_takes_dtype(module):
        return ""
    dtype = getattr(module, "dtype", None)
    text = "from inputs" if dtype is None else jax.numpy.dtype(dtype).name
    return text + float8_text(module, params_of_linen(module).get("kernel"))


def _check_is_linen(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    hint = ""
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = ". Make a module of it, or decorate it with jaxmp.linen.with_policy(rules)"
    elif any(base.__module__.startswith("flax.nnx") for base in type(model).__mro__):
        hint = ". For an nnx module use jaxmp.nnx"
    raise TypeError(f"jaxmp.linen works on linen modules, got {kind_text(model)}{hint}")
