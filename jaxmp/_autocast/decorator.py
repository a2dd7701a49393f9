"""`@autocast("mixed_bfloat16")`: the policy alone makes a decorator of `autocast`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jmp

from jaxmp._policies.policy_rules import PolicyRules

AutocastT = TypeVar("AutocastT", bound=Callable[..., Any])


def policy_may_come_first(autocast: AutocastT) -> AutocastT:
    """Lets a function `autocast(fun, policy, **options)` be called as `autocast(policy)(fun)`."""

    @functools.wraps(autocast)
    def either(fun: Any, policy: Any = None, **options: Any) -> Any:
        is_policy = isinstance(fun, (str, jmp.Policy, PolicyRules))
        if is_policy and policy is None:
            return AutocastDecorator(functools.partial(autocast, policy=fun, **options))
        if is_policy or policy is None:
            raise TypeError(
                "autocast takes a function and then a policy: jaxmp.autocast(loss_fn, "
                f"'mixed_bfloat16'), or a policy alone as a decorator; got {type(fun).__name__} "
                f"and {type(policy).__name__}"
            )
        return autocast(fun, policy, **options)

    return either  # type: ignore[return-value]  # of the same signature


class AutocastDecorator:
    """Puts a function under `autocast`. It is no context manager.

    Args:
      of_function: `autocast`, for which only the function is missing.
    """

    def __init__(self, of_function: Callable[..., Any]) -> None:
        self._of_function = of_function

    def __call__(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function under autocast."""
        return self._of_function(fun)

    def __enter__(self) -> None:
        raise TypeError(
            "autocast rewrites functions, and is no context manager, as operations of JAX are not "
            "called one by one. Write jaxmp.autocast(loss_fn, 'mixed_bfloat16')(params, batch), or "
            "@jaxmp.autocast('mixed_bfloat16') above the function"
        )

    def __exit__(self, *_: object) -> None:
        """Needed for Python to call `__enter__`."""
