"""Runs the methods of linen modules under rules, wherever a call leads."""

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jaxtyping import PyTree

from jaxmp._dtypes import DType, at_least_float32, is_floating
from jaxmp._regions import (
    Casts,
    Region,
    call_with_casts,
    casts_around,
    check_honoured,
    layer_dtype,
    takes_float_dtype,
)
from jaxmp._rules import Decision, PolicyRules
from jaxmp._tree import cast_floating


class _Frame(NamedTuple):
    """A module that is being called."""

    path: str
    decision: Decision
    is_layer: bool


_MISSING: Any = object()

# Part of the key of every cache of traces, since nn.jit would otherwise hand a model the trace
# that it made under other rules, or under none.
_TRACED_UNDER: Any = jax.make_user_context(default_value=None)
_SESSIONS: contextvars.ContextVar[tuple["_Session", ...]] = contextvars.ContextVar(
    "jaxmp_linen", default=()
)


class _Session:
    """One call of a module under rules, from outside of it, with all calls that follow from it."""

    def __init__(self, rules: PolicyRules, root: tuple[str, ...]) -> None:
        self.rules, self.root = rules, root
        self.calls: list[_Frame] = []
        self.seen: dict[str, nn.Module] = {}

    def owns(self, module: nn.Module) -> bool:
        """Whether the module lies in this session's root, and in that of no inner session."""
        path = module.path
        for session in reversed(_SESSIONS.get()):
            if path[: len(session.root)] == session.root:
                return session is self
        return False

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        # Flax also runs lambdas as methods, to see whether a setup is valid.
        is_method = hasattr(type(module), context.method_name)
        if module.scope is None or not is_method or not self.owns(module):
            return next_fun(*args, **kwargs)
        path = "/".join(module.path[len(self.root) :])
        frame = _Frame(path, self.decide(path, module), _is_flax_layer(module))
        self.seen.setdefault(path, module)
        is_call = context.method_name != "setup"
        region = Region(
            frame.decision,
            entered=not self.calls or self.calls[-1].decision.rule != frame.decision.rule,
            takes_dtype=takes_dtype(module),
            recurrent=isinstance(module, nn.RNNCellBase) and context.method_name == "__call__",
        )
        _set_dtypes(module, frame.decision)
        casts = casts_around(region) if is_call else Casts()
        self.calls.append(frame)
        try:
            out = call_with_casts(next_fun, casts, args, kwargs)
        finally:
            self.calls.pop()
        if is_call:
            _finish(module, path, region)
        return out

    def decide(self, path: str, module: nn.Module) -> Decision:
        """What the rules say; layers inside a layer of Flax follow it, unless a rule names them."""
        decision = self.rules.decide(path, module)
        if decision.rule is None and self.calls:
            caller = self.calls[-1]
            if caller.is_layer and (not caller.path or path.startswith(caller.path + "/")):
                return caller.decision
        return decision

    def finish(self, variables: Mapping[str, Any], *, strict: bool) -> None:
        """After an initialisation: tells of rules that match nothing, or cannot be kept apart."""
        self.rules.warn_unused(self.seen, strict=strict)
        params = variables.get("params", {})
        for unseen in self._unseen(params, ""):
            for path, module in list(self.seen.items()):
                twin, rest = self._twin(path, unseen, params)
                if twin and self.rules.decide(path, module).policy != (
                    self.rules.decide(f"{unseen}{rest}", module).policy
                ):
                    raise ValueError(
                        f"{unseen!r} was traced as one with {twin!r}, as nn.jit does with modules "
                        f"of one class, but the rules give {path!r} another policy than "
                        f"'{unseen}{rest}'. Give both the same policy, or use nn.remat or no "
                        "transform in place of nn.jit"
                    )

    def _unseen(self, params: Any, path: str) -> list[str]:
        """The topmost modules with params whose calls were not seen: traced before, and cached."""
        found: list[str] = []
        for name, value in params.items():
            inner = f"{path}/{name}" if path else name
            if isinstance(value, Mapping) and inner not in self.seen:
                below = any(seen.startswith(inner + "/") for seen in self.seen)
                found += self._unseen(value, inner) if below else [inner]
            elif isinstance(value, Mapping):
                found += self._unseen(value, inner)
        return found

    def _twin(self, path: str, unseen: str, params: Any) -> tuple[str, str]:
        """The seen module that `path` is in, if its params have the shapes of an unseen one's."""
        shapes = _shapes(params, unseen)
        names = path.split("/")
        for i in range(1, len(names) + 1):
            twin = "/".join(names[:i])
            if _shapes(params, twin) == shapes:
                return twin, "".join(f"/{name}" for name in names[i:])
        return "", ""


def _shapes(params: Any, path: str) -> Any:
    for name in path.split("/"):
        params = params.get(name) if isinstance(params, Mapping) else None
    leaves, treedef = jax.tree.flatten(params)
    return [(jax.numpy.shape(x), x.dtype) for x in leaves], treedef


@contextlib.contextmanager
def session(rules: PolicyRules, root: tuple[str, ...]) -> Iterator[_Session | None]:
    """Puts the calls of modules below `root` under rules.

    Yields the session, or None if these rules hold here already.
    """
    active = _SESSIONS.get()
    if active and active[-1].root == root and active[-1].rules == rules:
        yield None
        return
    new = _Session(rules, root)
    token = _SESSIONS.set((*active, new))
    try:
        with (
            nn.intercept_methods(new.intercept),
            _TRACED_UNDER(tuple(s.rules for s in (*active, new))),
        ):
            yield new
    finally:
        _SESSIONS.reset(token)


def takes_dtype(module: nn.Module) -> bool:
    fields = {field.name for field in dataclasses.fields(module)}
    return "dtype" in fields and takes_float_dtype(getattr(module, "dtype", None))


def _is_flax_layer(module: nn.Module) -> bool:
    """Whether Flax's own code is what puts this module together from layers."""
    return takes_dtype(module) and any(
        base.__module__.startswith("flax.") and "dtype" in inspect.get_annotations(base)
        for base in type(module).__mro__
    )


def _set_dtypes(module: nn.Module, decision: Decision) -> None:
    """Sets the dtypes of a bound module, a copy that lives for this call of init or apply."""
    policy = decision.policy
    if policy is None:
        return
    if takes_dtype(module):
        dtype = layer_dtype(policy.compute_dtype, module.dtype)
        object.__setattr__(module, "dtype", dtype)
    before = getattr(module, "param_dtype", _MISSING)
    if takes_float_dtype(before):
        # Params are drawn in float32 and rounded by _finish: so all policies start from the same
        # values, batch statistics that follow param_dtype stay float32, and no initializer is
        # asked for a dtype that its linear algebra lacks.
        dtype = at_least_float32(policy.param_dtype)
        object.__setattr__(module, "param_dtype", layer_dtype(dtype, before))


def _finish(module: nn.Module, path: str, region: Region) -> None:
    """After a call: rounds new params, and refuses what cannot compute as it was told."""
    policy, rule = region.decision
    if policy is None:
        return
    alone = rule is not None or not path
    if not module.is_initializing() and (region.takes_dtype or not alone):
        return
    own = own_params(module)
    if module.is_initializing():
        for name, value in own.items():
            module.put_variable("params", name, cast_floating(value, policy.param_dtype))
        own = own_params(module)
    # Flax's own layers without a dtype, such as PReLU, follow their inputs.
    if alone and not region.takes_dtype and not type(module).__module__.startswith("flax."):
        dtypes: set[DType] = {x.dtype for x in jax.tree.leaves(own) if is_floating(x)}
        has_children = len(own) < len(module.variables.get("params", {}))
        check_honoured(path, module, policy, dtypes, has_children=has_children)


def own_params(module: nn.Module) -> dict[str, PyTree]:
    params = module.variables.get("params", {})
    return {name: value for name, value in params.items() if not isinstance(value, Mapping)}
