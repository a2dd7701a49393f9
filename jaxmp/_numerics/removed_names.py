"""Says what to write in place of public names that this version removed or renamed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from jaxmp._numerics.user_warnings import warn

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def without(module: str, instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module that lost names.

    Args:
      module: the public name of the module.
      instead: what to write in place of each name.

    >>> without("jaxmp.numbers", {"half": "jnp.float16"})("half")
    Traceback (most recent call last):
    AttributeError: jaxmp.numbers.half was removed in version 0.2. Instead: jnp.float16
    """

    def getattr_of_module(name: str) -> NoReturn:
        if name in instead:
            raise AttributeError(
                f"{module}.{name} was removed in version 0.2. Instead: {instead[name]}"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module


def takes_old_options(**renamed: str) -> Callable[[_FunctionT], _FunctionT]:
    """Returns a decorator for a function that takes its options by their old names, with a warning.

    Args:
      **renamed: the names now, by the old ones.

    >>> takes_old_options(size="length")(lambda *, length: length)(length=3)
    3
    """

    def decorate(function: _FunctionT) -> _FunctionT:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in renamed.keys() & options.keys():
                new = renamed[old]
                if new in options:
                    raise TypeError(f"{old}= is the old name of {new}=: give {new}= alone")
                warn(f"{old}= is {new}= now: the next version takes only that", DeprecationWarning)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate
