"""Says how to install what an adapter needs."""

import importlib


def require(package: str, why: str) -> None:
    """Imports an optional package, which is an extra of the same name.

    Args:
      package: its name.
      why: the beginning of the error: what needs it.

    Raises:
      ModuleNotFoundError: if it is not installed. A package that fails to import raises its own
        error.

    >>> require("flux", "jaxmp.linen needs")
    Traceback (most recent call last):
    ModuleNotFoundError: jaxmp.linen needs flux, which is not installed: pip install "jaxmp[flux]"
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        # The package is there, and a package that it imports is not: its own error says so.
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f'{why} {package}, which is not installed: pip install "jaxmp[{package}]"',
            name=package,
        ) from None
