"""Reads the names of modules and scopes from the name stacks of JAX."""

import functools
import re

# The rest of the name of such a scope says why the product in it is left out of float8.
NOT_FLOAT8 = "jaxmp.not_float8:"

_REASON = re.compile(re.escape(NOT_FLOAT8) + r"([^/()]*)")
_WRAPPER = re.compile(r"[A-Za-z_]+\(")
_CALL = re.compile(r"p?jit\([^()]*\)")
# JAX's names for programs that it makes of a module; they are not names of modules.
_NO_MODULE = ("", "rematted_computation", "checkpoint", "eval_jaxpr")


@functools.lru_cache(maxsize=65536)
def names_in(stack: str) -> tuple[str, ...]:
    """Returns the names in the text of a name stack, without JAX's transformations.

    >>> names_in("transpose(jvp(LM))/jvp(LM)/rematted_computation/Block_0/q")
    ('LM', 'Block_0', 'q')
    """
    names: list[str] = []
    plain = _CALL.sub("", without_reason(stack)).replace("while/body", "")
    for scope in plain.split("/"):
        name = _WRAPPER.sub("", scope)
        is_wrapped = name != scope
        if is_wrapped:
            name = name.rstrip(")")
        # JAX repeats the model in the scopes of a checkpoint: "transpose(jvp(LM))/jvp(LM)".
        if name not in _NO_MODULE and not (is_wrapped and names[-1:] == [name]):
            names.append(name)
    return tuple(names)


def why_left_out(stack: str) -> str:
    """Returns why a product is left out of float8, by its scopes; empty if none says so.

    >>> why_left_out("jvp(LM)/jaxmp.not_float8:N = 40 is no multiple of 16/dot_general")
    'N = 40 is no multiple of 16'
    """
    return (_REASON.findall(stack) or [""])[-1]


def without_reason(stack: str) -> str:
    """Returns scopes without the one that says why a product is left out of float8.

    >>> without_reason("transpose(jvp(LM))/jaxmp.not_float8:heads/dot_general")
    'transpose(jvp(LM))/dot_general'
    """
    return _REASON.sub("", stack).replace("//", "/").rstrip("/")
