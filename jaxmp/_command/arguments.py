"""Reads arguments that several commands have."""

import argparse

from jaxmp._planning.devices import Device, find_device


def device_argument(text: str) -> Device:
    """Reads the name of a device.

    Raises:
      ArgumentTypeError: if the table of devices does not have it.

    >>> device_argument("h100").name
    'h100'
    """
    try:
        return find_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_argument(text: str) -> float:
    """Reads a positive number.

    Raises:
      ArgumentTypeError: for anything else.

    >>> positive_argument("1e-2")
    0.01
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number
