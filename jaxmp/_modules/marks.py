"""Makes the classes of modules under policies and scopes, and pickles their instances.

Such a class is a subclass with the same name. Its methods ask a mark, an object in the attribute
`_jaxmp` or the like, how to call what the author wrote.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxmp._modules.scopes import new_instance


@dataclasses.dataclass(frozen=True)
class Method:
    """What the author wrote, called as `method(module, *args, **kwargs)`."""

    name: str
    under: type

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the class below the marked one."""
        # A method that was bound under a mark may be called after the mark is taken off.
        below = super(self.under, module) if isinstance(module, self.under) else module
        return getattr(below, self.name)(*args, **kwargs)


@runtime_checkable
class Mark(Protocol):
    """What says how the methods of a module are called."""

    def call(self, method: Method, module: Any, args: Any, kwargs: Any) -> Any:
        """Calls the method, with what belongs around it."""
        ...


def marked_class(
    cls: Any,
    attribute: str,
    remake: tuple[Any, ...],
    *,
    names: Iterable[str] = ("__call__",),
    base: type | None = None,
    body: Mapping[str, Any] = types.MappingProxyType({}),
    decorate: Callable[[Any], Any] = lambda method: method,
    **keywords: Any,
) -> Any:
    """Makes a subclass with the same name whose methods ask a mark how to call the author's.

    Args:
      cls: the author's class.
      attribute: where the mark is: on the instance, or else on the class that is made. Without one,
        as in a new instance, methods are the author's.
      remake: a function and its arguments that make this class again. Pickles record them.
      names: the methods.
      base: a class to put before `cls`.
      body: more attributes of the class.
      decorate: what else to do to each function of the class.
      **keywords: of the class, for its metaclass.

    Returns:
      The class.
    """

    def asking(name: str) -> Any:
        @functools.wraps(getattr(cls, name))
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            mark = vars(self).get(attribute) or vars(marked).get(attribute)
            method = Method(name, marked)
            if mark is None:
                return method(self, *args, **kwargs)
            return mark.call(method, self, args, kwargs)

        return decorate(call)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(marked, self).__reduce_ex__(protocol)
        # Subclasses, and classes with a way of their own, are as without a mark.
        makes = reduced[0]
        by_default = makes is new_instance or getattr(makes, "__module__", "") == "copyreg"
        if type(self) is not marked or not by_default:
            return reduced
        # Pickle finds classes by name, and most often finds the author's.
        found: Any = sys.modules.get(cls.__module__)
        for part in cls.__qualname__.split("."):
            found = getattr(found, part, None)
        return reduced if found is marked else (new_instance, remake, *reduced[2:])

    content: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": decorate(reduce_ex),
        **{name: asking(name) for name in names},
        **body,
    }
    bases = (cls,) if base is None else (base, cls)
    marked: Any = types.new_class(
        cls.__name__, bases, keywords, lambda space: space.update(content)
    )
    return marked
