"""Scopes that name the path and the policy of a module, in libraries without a name stack."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmp._autocast.regions import policy_scope
from jaxmp._policies.policy import Policy
from jaxmp._program.scopes import NOT_FLOAT8

_PATH: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("jaxmp_path", default=())


@dataclasses.dataclass(frozen=True)
class Scope:
    """The path and the policy of a module.

    Attributes:
      path: the names from the root to the module.
      policies: the names of the scopes for its policy, and for why it is left out of float8.
      plain: the class of the module without scopes.
    """

    # Pickles of Equinox modules record the class and these names.
    path: tuple[str, ...]
    policies: tuple[str, ...]
    plain: Any

    def call(self, method: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method of a module in these scopes: a mark, as in `marks.py`."""
        with in_scope(self):
            return method(module, *args, **kwargs)


def path_names(path: str) -> tuple[str, ...]:
    """Returns the names in a path.

    >>> path_names("decoder/head"), path_names("")
    (('decoder', 'head'), ())
    """
    return tuple(path.split("/")) if path else ()


def policy_names(policy: Policy | None, family: str | None) -> tuple[str, ...]:
    """Returns the scopes that tell autocast a policy, and the family that is left out of float8."""
    if policy is None or policy.products is None or family is None:
        return (policy_scope(policy),)
    # Audits read the family as the reason.
    return (policy_scope(policy.with_products(None)), NOT_FLOAT8 + family)


@contextlib.contextmanager
def in_scope(scope: Scope) -> Iterator[None]:
    """Opens the scopes of a module, without the names that are open already."""
    # A caller's scopes are open around this one. A module of another model, such as a teacher, is
    # not below them.
    outer = _PATH.get()
    names = scope.path[len(outer) :] if scope.path[: len(outer)] == outer else scope.path
    with contextlib.ExitStack() as scopes:
        for name in (*names, *scope.policies):
            scopes.enter_context(jax.named_scope(name))
        token = _PATH.set(scope.path)
        try:
            yield
        finally:
            _PATH.reset(token)


def new_instance(make_class: Callable[..., type], *args: Any) -> Any:
    """Makes an empty instance of a class that was made at run time, for pickle to fill.

    Pickles record this function by its name.

    >>> new_instance(lambda name: type(name, (), {}), "Dense").__class__.__name__
    'Dense'
    """
    return object.__new__(make_class(*args))
