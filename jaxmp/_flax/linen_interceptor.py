"""Runs the methods of linen modules, and of all modules that they call, under rules."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from jaxmp._flax.linen_layers import (
    is_linen_layer,
    linen_takes_dtype,
    params_of_linen,
    round_new_params,
    set_dtypes,
)
from jaxmp._flax.linen_record import ModuleRecord
from jaxmp._flax.linen_transforms import LiftedClasses, check_shared_traces
from jaxmp._flax.module_casts import Casts, ModulePolicy, call_with_casts, casts_around, with_family
from jaxmp._flax.module_checks import check_result, may_refuse, promise_of, refuse, too_wide
from jaxmp._modules.decisions import decide
from jaxmp._numerics.dtypes import DType, is_floating, is_narrow
from jaxmp._policies.policy_rules import Decision, PolicyRules


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
      frames: the modules that are being called, outermost first.
      record: the modules that were called.
      lifted: the classes that transforms made.
    """

    def __init__(
        self, rules: PolicyRules, root: tuple[str, ...], module: Any, strict: bool = False
    ) -> None:
        self.rules, self.root, self.module, self.strict = rules, root, module, strict
        self.frames: list[_Frame] = []
        self.record = ModuleRecord(rules, strict=strict)
        self.lifted = LiftedClasses()

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        if (name.startswith("__") and name != "__call__") or module.scope is None:
            return next_fun(*args, **kwargs)
        if not hasattr(type(module), name):
            # Flax runs a lambda as a method before it calls the class that a transform made.
            self.lifted.add(type(module))
            return next_fun(*args, **kwargs)
        # Flax runs the interceptors of all sessions: the innermost one alone decides.
        owner = _owning_session(module.path)
        if owner is not self:
            if module.path[: len(self.root)] == self.root:
                self.record.others.add(self.path_of(module))
            return self._record_part(self.path_of(module), next_fun(*args, **kwargs))
        # A model that is applied inside of another, like a teacher, is under no rules of it.
        if self.frames and is_other_model(module, self.module):
            with _activate(_Session(PolicyRules(), (), module)):
                return self._record_part(f"{module.name}()", next_fun(*args, **kwargs))
        return self.call(next_fun, args, kwargs, context)

    def _record_part(self, path: str, out: Any) -> Any:
        """Records the dtypes that a module returned to its caller."""
        if self.frames and self.frames[-1].path != path:
            dtypes = {x.dtype for x in jax.tree.leaves(out) if is_floating(x)}
            self.frames[-1].parts.setdefault(path, set()).update(dtypes)
        return out

    def call(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method under the rules."""
        module, path = context.module, self.path_of(context.module)
        caller = self.frames[-1] if self.frames else None
        # A layer of Flax may call a module that its author gave it, which is not inside of it.
        prefix = f"{caller.path}/" if caller and caller.path else ""
        in_layer = caller is not None and caller.is_layer and path.startswith(prefix)
        decision = decide(self.rules, path, module, caller and caller.decision, in_layer=in_layer)
        family = self.record.add(path, module, decision)
        set_dtypes(module, decision, family)
        is_setup = context.method_name == "setup"
        is_cell = isinstance(module, nn.RNNCellBase) or type(module) in self.lifted.scanned
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

        self.frames.append(_Frame(path, decision, is_linen_layer(module), parts))
        try:
            out = call_with_casts(function, call.casts, args, kwargs)
        finally:
            self.frames.pop()
        if creates_params:
            round_new_params(module, decision, before)
        if is_setup:
            return out
        if self.record.float8.enabled:
            self.record.float8.note(path, module, decision, family, params_of_linen(module))
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
            self.record.unreached[path] = list(own)
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

    def report(self, variables: Mapping[str, Any], *, whole: bool, is_init: bool) -> None:
        """Reports what did not follow the rules; runs after the call of the root.

        Raises:
          ValueError: if nn.jit shared a trace between modules with different policies; for a rule
            without effect, if the rules are strict.
        """
        if self.lifted.jitted:
            check_shared_traces(self.record, variables.get("params", {}))
        self.record.warn(self.module, variables, whole=whole, again=is_init)
        if is_init:  # it calls all modules: a rule without effect shows
            self.record.warn_unused(strict=self.strict)


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
    return owner is None or owner.path_of(module) not in owner.record.unreached


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
