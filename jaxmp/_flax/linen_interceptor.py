"""Runs the methods of linen modules, and of all modules that they call, under rules."""

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jaxtyping import PyTree

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.layer_precision import layer_precision
from jaxmp._flax.layer_products import product_attributes
from jaxmp._flax.module_casts import (
    Casts,
    ModulePolicy,
    call_with_casts,
    casts_around,
    layer_dtype,
    takes_float_dtype,
    with_family,
)
from jaxmp._flax.module_checks import (
    check_result,
    may_refuse,
    promise_of,
    refuse,
    too_wide,
    warn_unreached,
)
from jaxmp._modules.decisions import decide
from jaxmp._numerics.dtypes import DType, at_least_float32, is_floating, is_narrow
from jaxmp._numerics.tree import cast_floating
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import dtypes_of
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler


class _Frame(NamedTuple):
    """A module that is being called; `parts` has the result dtypes of the modules it called."""

    path: str
    decision: Decision
    is_layer: bool
    parts: dict[str, set[DType]]


@dataclasses.dataclass
class _Call:
    """A call in progress; `inputs` are the arguments after their casts, `out` the uncast result."""

    region: ModulePolicy
    casts: Casts
    parts: dict[str, set[DType]]
    creates_params: bool
    inputs: Any = None
    out: Any = None


# Not None, which is a dtype of layers: they follow their inputs.
_MISSING: Any = object()

# Part of the key of every trace cache, since nn.jit would otherwise reuse a trace that was made
# under other rules, or without rules.
_TRACED_UNDER: Any = jax.make_user_context(default_value=None)
_SESSIONS: contextvars.ContextVar[tuple["_Session", ...]] = contextvars.ContextVar(
    "jaxmp_linen", default=()
)


class _Session:
    """A call of a module under rules from outside, with all calls that follow from it.

    Attributes:
      rules: the rules.
      root: the path of the module in its own model.
      module: the module.
      strict: whether it is an error if a module does not follow its rule.
      calls: the modules that are being called, outermost first.
      modules: every module that was called, by its path from the root.
      others: the paths of modules that have rules of their own.
      used: the rules that decided something.
      jitted: whether nn.jit made the class of any called module.
      scanned: the classes that nn.scan repeats.
      unreached: the names of params that no policy reaches, by the path of their module.
      float8: which layers are in float8.
    """

    def __init__(
        self, rules: PolicyRules, root: tuple[str, ...], module: Any, strict: bool = False
    ) -> None:
        self.rules, self.root, self.module, self.strict = rules, root, module, strict
        self.calls: list[_Frame] = []
        self.modules: dict[str, nn.Module] = {}
        self.others: set[str] = set()
        self.used: set[int | None] = set()
        self.jitted = False
        self.scanned: set[type] = set()
        self.unreached: dict[str, list[str]] = {}
        self.float8 = Float8Layers(rules, strict=strict)

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        if (name.startswith("__") and name != "__call__") or module.scope is None:
            return next_fun(*args, **kwargs)
        if not hasattr(type(module), name):
            # Flax runs a lambda as a method before it calls the class that a transform made.
            cls, inner, *_ = type(module).__mro__
            self.jitted |= cls.__name__.startswith("Jit")
            # nn.scan may repeat a class that another transform made, such as nn.remat.
            if cls.__name__.startswith(("Scan", "Remat_scan")) or cls in self.scanned:
                self.scanned.add(inner)
            return next_fun(*args, **kwargs)
        # Flax runs the interceptors of all sessions: the innermost one alone decides.
        owner = _owning_session(module.path)
        if owner is not self:
            if module.path[: len(self.root)] == self.root:
                self.others.add(self.path_of(module))
            return self._record_part(self.path_of(module), next_fun(*args, **kwargs))
        # A model that is applied inside of another, like a teacher, is under no rules of it.
        if self.calls and is_other_model(module, self.module):
            with _activate(_Session(PolicyRules(), (), module)):
                return self._record_part(f"{module.name}()", next_fun(*args, **kwargs))
        return self.call(next_fun, args, kwargs, context)

    def _record_part(self, path: str, out: Any) -> Any:
        """Records the dtypes that a module returned to its caller."""
        if self.calls and self.calls[-1].path != path:
            dtypes = {x.dtype for x in jax.tree.leaves(out) if is_floating(x)}
            self.calls[-1].parts.setdefault(path, set()).update(dtypes)
        return out

    def call(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method under the rules."""
        module, path = context.module, self.path_of(context.module)
        caller = self.calls[-1] if self.calls else None
        # A layer of Flax may call a module that its author gave it, which is not inside of it.
        prefix = f"{caller.path}/" if caller and caller.path else ""
        in_layer = caller is not None and caller.is_layer and path.startswith(prefix)
        decision = decide(self.rules, path, module, caller and caller.decision, in_layer=in_layer)
        self.modules.setdefault(path, module)
        self.used.add(decision.rule)
        family = self.float8.family(path, module, decision)
        _set_dtypes(module, decision, family)
        is_setup = context.method_name == "setup"
        is_cell = isinstance(module, nn.RNNCellBase) or type(module) in self.scanned
        region = ModulePolicy(
            decision,
            caller and caller.decision,
            takes_dtype=linen_takes_dtype(module),
            recurrent=is_cell and context.method_name == "__call__",
        )
        creates_params = module.is_mutable_collection("params")
        # Where params are mutable outside of init, those that are there keep their dtype.
        has_params = creates_params and not module.is_initializing()
        before = frozenset(module.variables.get("params", {})) if has_params else frozenset()
        # The caller may be another method of the same module.
        within = caller is not None and caller.path == path
        parts = caller.parts if caller is not None and within else {}
        casts = with_family(casts_around(region), decision.policy, family)
        call = _Call(region, Casts() if is_setup else casts, parts, creates_params)

        def function(*args: Any, **kwargs: Any) -> Any:
            call.inputs, call.out = (args, kwargs), next_fun(*args, **kwargs)
            return call.out

        self.calls.append(_Frame(path, decision, _is_flax_layer(module), parts))
        try:
            out = call_with_casts(function, call.casts, args, kwargs)
        finally:
            self.calls.pop()
        if creates_params:
            _round_new_params(module, decision, before)
        if is_setup:
            return out
        if self.float8.enabled:
            self.float8.note(path, module, decision, params_of_linen(module))
        if not within:
            self._check(module, call)
        return self._record_part(path, out)

    def _check(self, module: nn.Module, call: _Call) -> None:
        """Reports a module that did not compute as the rules say; runs after its call."""
        decision = call.region.decision
        policy = decision.policy
        # Flax's own layers without a dtype, such as PReLU, follow their inputs.
        if policy is None or module.__module__.startswith("flax."):
            return
        path, own = self.path_of(module), params_of_linen(module)
        dtypes: set[DType] = {x.dtype for x in jax.tree.leaves(own) if is_floating(x)}
        if not call.region.takes_dtype and (wider := too_wide(policy, dtypes)):
            has_children = len(own) < len(module.variables.get("params", {}))
            if may_refuse(decision, path, has_children=has_children, strict=self.strict):
                refuse(path, module, policy, wider[0])
            self.unreached[path] = list(own)
            return
        # Init has not rounded all params yet, so they are wider than they will be in apply.
        if call.creates_params and is_narrow(policy.param_dtype):
            return
        promise = promise_of(
            call.region,
            call.casts,
            path,
            module,
            parts=tuple(call.parts.values()),
            has_params=bool(dtypes),
            strict=self.strict,
        )
        if promise is not None:
            check_result(promise, call.inputs, call.out)

    def path_of(self, module: nn.Module) -> str:
        """Returns the path of a module from the root."""
        return "/".join(module.path[len(self.root) :])

    def warn_unused(self, *, strict: bool) -> None:
        """Warns of rules that decided nothing; runs after an initialisation."""
        self.rules.warn_unused(self.modules, used=self.used, strict=strict)

    def warn(self, variables: Mapping[str, Any], *, whole: bool, again: bool) -> None:
        """Warns of params that no policy reaches, and of the fault of the CPU compiler."""
        warn_of_cpu_compiler(dtypes_of(self.rules), variables)
        params = variables.get("params", {})
        # A cached trace of nn.jit shows no layers, and nor does a branch that is not taken.
        whole = whole and self.float8.enabled and not self._modules_without_call(params, "")
        self.float8.warn(self.module, whole=whole, again=again)
        if not self.unreached:
            return
        counts = {
            path: sum(_size(_subtree(params, f"{path}/{name}")) for name in names)
            for path, names in self.unreached.items()
        }
        warn_unreached(self.module, counts, _size(params), again=again)

    def check_traces(self, variables: Mapping[str, Any]) -> None:
        """Raises ValueError if nn.jit shared a trace between modules with different policies."""
        if not self.jitted:
            return
        params = variables.get("params", {})
        for other in self._modules_without_call(params, ""):
            for path, module in list(self.modules.items()):
                twin, suffix = self._twin(path, other, params)
                if twin and self._ruling(path, module) != self._ruling(f"{other}{suffix}", module):
                    raise ValueError(
                        f"{other!r} was traced as one with {twin!r}: nn.jit traces modules of one "
                        f"class only once. But the rules give {path!r} another policy than "
                        f"'{other}{suffix}', or leave one of them out of 8 bits. Give both the "
                        "same policy, or use nn.remat or no transform in place of nn.jit"
                    )

    def _ruling(self, path: str, module: nn.Module) -> Any:
        decision = self.rules.decide(path, module)
        layers = Float8Layers(self.rules, strict=False)
        return decision.policy, layers.family(path, module, decision)

    def _modules_without_call(self, params: Any, path: str) -> list[str]:
        """Returns the topmost modules with params whose calls came from a cached trace."""
        paths: list[str] = []
        for name, value in params.items():
            inner = f"{path}/{name}" if path else name
            if inner in self.others or not isinstance(value, Mapping):
                continue
            if inner in self.modules or any(key.startswith(f"{inner}/") for key in self.modules):
                paths += self._modules_without_call(value, inner)
            else:
                paths.append(inner)
        return paths

    def _twin(self, path: str, other: str, params: Any) -> tuple[str, str]:
        """Finds the module around `path` whose params have the same shapes as another module.

        Returns:
          The path of that module, and the rest of `path`; empty if there is none.
        """
        # A cached trace does not say which module it was made of. Modules of one class with params
        # of the same shapes share it.
        shapes = _shapes(params, other)
        names = path.split("/")
        for i in range(1, len(names) + 1):
            twin = "/".join(names[:i])
            if _shapes(params, twin) == shapes:
                return twin, "".join(f"/{name}" for name in names[i:])
        return "", ""


def _subtree(params: Any, path: str) -> Any:
    for name in path.strip("/").split("/"):
        params = params.get(name) if isinstance(params, Mapping) else None
    return params


def _size(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree) if is_floating(x))


def _shapes(params: Any, path: str) -> Any:
    leaves, treedef = jax.tree.flatten(_subtree(params, path))
    return [(jax.numpy.shape(x), x.dtype) for x in leaves], treedef


def is_other_model(module: nn.Module, root: nn.Module) -> bool:
    """Whether a module is applied as a separate model inside of another, like a teacher."""
    mine, theirs = type(root), type(module)
    related = issubclass(mine, theirs) or issubclass(theirs, mine)
    alone = module.path == () and not isinstance(module.parent, nn.Module)
    return alone and not related


def _owning_session(path: tuple[str, ...]) -> _Session | None:
    """Returns the innermost session whose root contains a path."""
    for active in reversed(_SESSIONS.get()):
        if path[: len(active.root)] == active.root:
            return active
    return None


def is_reached(module: nn.Module) -> bool:
    """Whether the policy of a called module reaches its params; true without a policy."""
    owner = _owning_session(module.path)
    return owner is None or owner.path_of(module) not in owner.unreached


@contextlib.contextmanager
def _activate(new: _Session) -> Iterator[None]:
    sessions = (*_SESSIONS.get(), new)
    token = _SESSIONS.set(sessions)
    try:
        with _TRACED_UNDER(tuple((active.rules, active.strict) for active in sessions)):
            yield
    finally:
        _SESSIONS.reset(token)


@contextlib.contextmanager
def session(
    rules: PolicyRules,
    root: tuple[str, ...],
    module: nn.Module,
    *,
    strict: bool,
    at_the_root: bool = False,
) -> Iterator[_Session | None]:
    """Puts the calls of modules below `root` under rules.

    `at_the_root` means that a model is being initialised or applied.

    Yields the session, or None if these rules hold here already.
    """
    for last in _SESSIONS.get()[-1:]:
        # A model gets its own session, even inside of another model under the same rules.
        is_same = last.module is module if at_the_root else True
        if is_same and last.root == root and last.rules == rules:
            yield None
            return
    new = _Session(rules, root, module, strict)
    with nn.intercept_methods(new.intercept), _activate(new):
        yield new


def linen_takes_dtype(module: nn.Module) -> bool:
    fields = {field.name for field in dataclasses.fields(module)}
    return "dtype" in fields and takes_float_dtype(getattr(module, "dtype", None))


def _is_flax_layer(module: nn.Module) -> bool:
    """Whether this module is a layer of Flax, whose inner layers Flax's own code makes."""
    # An author's module has `nn.Module` of Flax among its bases, but declares its `dtype` itself.
    return linen_takes_dtype(module) and any(
        base.__module__.startswith("flax.") and "dtype" in inspect.get_annotations(base)
        for base in type(module).__mro__
    )


def _set_dtypes(module: nn.Module, decision: Decision, family: str | None) -> None:
    """Sets the dtypes of a bound module."""
    # Flax binds a copy of the module for each init or apply, so the author's module stays as it is.
    policy = decision.policy
    if policy is None:
        return
    if linen_takes_dtype(module):
        # These two make the weight of their inner layer, and that layer casts the weight itself.
        makes_weights = isinstance(module, (nn.SpectralNorm, nn.WeightNorm))
        weight_dtype = at_least_float32(policy.param_dtype)
        dtype = weight_dtype if makes_weights else policy.compute_dtype
        dtype = layer_dtype(dtype, module.dtype)
        object.__setattr__(module, "dtype", dtype)
        if any(field.name == "precision" for field in dataclasses.fields(module)):
            object.__setattr__(module, "precision", layer_precision(module, policy))
        for name, value in product_attributes(module, policy, family).items():
            object.__setattr__(module, name, value)
    before = getattr(module, "param_dtype", _MISSING)
    if takes_float_dtype(before):
        # Params are drawn in float32 and rounded by _round_new_params. So all policies start from
        # the same values, batch statistics that follow param_dtype stay float32, and no
        # initializer gets a dtype that its linear algebra does not support.
        dtype = at_least_float32(policy.param_dtype)
        object.__setattr__(module, "param_dtype", layer_dtype(dtype, before))


def _round_new_params(module: nn.Module, decision: Decision, before: frozenset[str]) -> None:
    """Rounds the params that a call created, but not those that existed before."""
    if decision.policy is None:
        return
    for name, value in params_of_linen(module).items():
        if name not in before:
            value = cast_floating(value, decision.policy.param_dtype)
            module.put_variable("params", name, value)


def params_of_linen(module: nn.Module) -> dict[str, PyTree]:
    """Returns the own params of a module, without the params of its submodules."""
    params = module.variables.get("params", {})
    reserved: Any = module.scope.reservations  # type: ignore[union-attr]
    return {name: value for name, value in params.items() if "params" in reserved.get(name, ())}
