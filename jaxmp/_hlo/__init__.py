"""Reads what the compilers of JAX print of a compiled program."""

from jaxmp._hlo._collectives import KINDS, Program, Transfer, read_program
from jaxmp._hlo._text import Frame

__all__ = ["KINDS", "Frame", "Program", "Transfer", "read_program"]
