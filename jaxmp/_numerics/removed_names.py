"""Says what to write in place of a public name that this version removed."""

from collections.abc import Callable, Mapping
from typing import NoReturn


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
