"""Loads the program of a command, by its name on the command line."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxmp._numerics.dtypes import suggestion

HOW_TO_NAME = (
    "package.module:factory or path/to/file.py:factory, where factory() returns (fn, args) or "
    "(fn, args, kwargs)"
)


class UsageError(Exception):
    """The command was called wrongly; the text says what to do."""


class NamedProgram(NamedTuple):
    """A function with its arguments, which may be abstract, under the name that the user gave."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_program(name: str) -> NamedProgram:
    """Imports a module, calls its factory, and returns the program that the factory returns.

    A command line has no place for arrays, so that a function of the user makes them.

    Args:
      name: `"package.module:factory"`, found as `python -m` finds modules: in the current folder
        first; or `"path/to/file.py:factory"`, imported as `python file.py` would.

    Returns:
      The program.

    Raises:
      UsageError: if there is no such module or function, if it fails, or if its result is neither
        `(fn, args)` nor `(fn, args, kwargs)`.
    """
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise UsageError(f"{name!r} names no program. Write {HOW_TO_NAME}")
    module = _import_file(place) if place.endswith(".py") else _import_module(place)
    factory = getattr(module, attribute, None)
    if factory is None:
        names = [key for key, value in vars(module).items() if callable(value)]
        near = suggestion(attribute, names)
        raise UsageError(f"{place} has no {attribute!r}.{near} It should be a function: {_RESULT}")
    if not callable(factory):
        raise UsageError(f"{name} is no function but {_type_text(factory)}. Make it one: {_RESULT}")
    result = _call_factory(name, factory)
    is_program = (
        isinstance(result, (tuple, list))
        and len(result) in (2, 3)
        and callable(result[0])
        and isinstance(result[1], (tuple, list))
        and all(isinstance(kwargs, dict) for kwargs in result[2:])
    )
    if not is_program:
        hint = ""
        # The likely mistake: (fn, params, batch).
        if isinstance(result, tuple) and result and callable(result[0]):
            hint = ". The arguments stand in a tuple of their own: (fn, (params, batch))"
        raise UsageError(f"{name}() returned {_type_text(result)}, but {_RESULT}{hint}")
    fn, args, *kwargs = result
    return NamedProgram(name, fn, tuple(args), dict(*kwargs))


def loss_of(program: NamedProgram) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss function, the params and the batch of a program that is a loss.

    Raises:
      UsageError: if its arguments are not params and a batch.
    """
    # The likely mistake: the factory of `audit`, which takes a whole step.
    if program.args and hasattr(program.args[0], "opt_state"):
        raise UsageError(
            f"{program.name}() returns a step and its state, but this command makes its own step. "
            "Write a factory that returns (loss_fn, (params, batch))"
        )
    if len(program.args) != 2:
        raise UsageError(
            f"{program.name}() should return (loss_fn, (params, batch)) here, but it has "
            f"{len(program.args)} arguments. Put what belongs to the batch into one tree"
        )
    # Steps call a loss with params and a batch alone: keyword arguments are bound here.
    fn = functools.partial(program.fn, **program.kwargs) if program.kwargs else program.fn
    return fn, *program.args


_RESULT = "a factory takes no arguments and returns (fn, args) or (fn, args, kwargs)"


def _import_module(name: str) -> types.ModuleType:
    # As `python -m` does; the script of a package has its own folder there instead.
    _search_first(os.getcwd())
    with _users_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that this one imports may be missing too: that is an error of its code.
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise UsageError(
                    f"there is no module {error.name!r}, neither installed nor in {os.getcwd()}"
                ) from error
            raise


def _import_file(path: str) -> types.ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path!r} in {os.getcwd()}")
    _search_first(os.path.dirname(os.path.abspath(path)))
    # Under a name of its own: a file may have the name of an installed package.
    name = f"_program_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
    if spec is None or spec.loader is None:
        raise UsageError(f"{path!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for their module there
    with _users_code(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _users_code(doing: str) -> Iterator[None]:
    """Runs code of the user; its errors are a `UsageError`."""
    # Scripts read `sys.argv` as they are imported, and end the process if they find `--json` there.
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{doing} failed: {type(error).__name__}: {first} (--traceback shows where)"
        ) from error
    finally:
        sys.argv = arguments


def _search_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _call_factory(name: str, factory: Callable[..., Any]) -> Any:
    # A call would fail with a TypeError, which may as well come from inside of the factory.
    try:
        required = [
            parameter.name
            for parameter in inspect.signature(factory).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a callable without a signature that Python knows
        required = []
    if required:
        raise UsageError(
            f"{name} wants arguments ({', '.join(required)}), but {_RESULT}. If it is the function "
            "itself, name a factory that returns it with its arguments: def program(): return "
            f"{name.rpartition(':')[2]}, ({', '.join(required)})"
        )
    with _users_code(f"calling {name}()"):
        return factory()


def _type_text(value: Any) -> str:
    """Returns the type of a value, and of a tuple those of its parts."""
    if isinstance(value, (tuple, list)):
        parts = [type(item).__name__ for item in value[:5]] + ["..."] * (len(value) > 5)
        return f"a {type(value).__name__} ({', '.join(parts)})"
    return f"{'None' if value is None else type(value).__name__}"
