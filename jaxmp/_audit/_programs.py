"""Gets the text of a compiled program that shows what its collectives carry."""

import pathlib
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

_ON_CPU = (
    "XLA widens collectives of 16 bits for CPUs, so a program compiled for them does not show what "
    "its collectives carry elsewhere. Give the function with its arguments, or "
    "`jax.jit(fn).lower(*args)`: then the program is read as it is right after partitioning"
)


class Source(NamedTuple):
    """A program as text.

    Attributes:
      text: of the program.
      origin: what the text is of, in words.
      meshes: those that arguments and results are sharded over, as far as JAX knows.
    """

    text: str
    origin: str
    meshes: tuple[Any, ...]


def source_of(program: Any, args: Any, kwargs: Any) -> Source:
    """The text of a program, compiled if it is not yet.

    Args:
      program: a function, what `lower` and `compile` of a jitted one give, or the text itself.
      args: the arguments of a function.
      kwargs: its keyword arguments.

    Returns:
      The text, and what is known about it.

    Raises:
      TypeError: for something else.
      ValueError: for arguments to what needs none, a program compiled for CPUs, or a text that is
        none of a compiled program.
    """
    is_compiled = hasattr(program, "as_text") and hasattr(program, "input_shardings")
    is_lowered = hasattr(program, "as_text") and hasattr(program, "compile")
    if (isinstance(program, str) or is_compiled or is_lowered) and (args or kwargs):
        raise ValueError(
            f"arguments go with a function; this {type(program).__name__} was made for its own"
        )
    if isinstance(program, str):
        return Source(_checked_text(program), "given program", ())
    if is_compiled:
        if _platform(program) == "cpu":
            raise ValueError(_ON_CPU)
        return _compiled(program)
    if is_lowered:
        return _compile(program)
    if not callable(program) and not hasattr(program, "lower"):
        raise TypeError(
            "give a function and its arguments, what its `lower` or `compile` returns, or the text "
            f"of a compiled program, got {type(program).__name__}"
        )
    return _compile(_lower(program, args, kwargs))


def _checked_text(text: str) -> str:
    if "ENTRY" in text or "HloModule" in text:
        return text
    if text.lstrip().startswith(("module", "#")):
        raise ValueError(
            "this text is of a program before it is compiled, where the collectives of sharded "
            "arrays do not exist yet: give what `lower` returns itself"
        )
    raise ValueError("this text is not of a compiled program, as `compiled.as_text()` has it")


def _lower(fn: Any, args: Any, kwargs: Any) -> Any:
    if hasattr(fn, "lower"):  # it is jitted, and knows what is static
        return fn.lower(*args, **kwargs)
    arrays, call = closed_over(fn, args, kwargs)
    return jax.jit(call).lower(arrays)


def closed_over(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays among arguments, and the function of these alone.

    Args:
      fn: a function.
      args: its arguments.
      kwargs: its keyword arguments.

    Returns:
      A list with None for each argument that is no array, and a function of such a list.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        filled = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fn(*args, **kwargs)

    return arrays, call


def is_array(leaf: Any) -> bool:
    """Whether it has a shape and a dtype."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _compile(lowered: Any) -> Source:
    """Compiles what is lowered, and for CPUs reads what the partitioner made of it."""
    if jax.default_backend() != "cpu":
        compiled = lowered.compile()
        return _compiled(compiled) if _platform(compiled) != "cpu" else _partitioned(lowered)[0]
    source, platform = _partitioned(lowered)  # likely for CPUs, and compiled once then
    return source if platform == "cpu" else _compiled(lowered.compile())


def _compiled(compiled: Any) -> Source:
    return Source(compiled.as_text(), "compiled program", _meshes(compiled))


def _partitioned(lowered: Any) -> tuple[Source, str]:
    """Compiles with a dump of the program after partitioning."""
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as folder:
        compiled = lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
                # What is compiled is thrown away.
                "xla_backend_optimization_level": 0,
                # This pass aborts the process for 16-bit sums in a partly manual shard_map. The
                # other name makes the key new under which JAX caches programs on disk: a program
                # from there would be dumped nowhere.
                "xla_disable_hlo_passes": f"all-reduce-promotion,jaxmp-{uuid.uuid4().hex}",
            }
        )
        platform = _platform(compiled)
        if platform != "cpu":
            return Source("", "", ()), platform
        # Where there is only one device, or pmap, nothing is partitioned.
        for pattern in ("*after_spmd-partitioning*.txt", "*before_optimizations.txt"):
            for path in sorted(pathlib.Path(folder).glob(pattern), reverse=True):
                text = path.read_text()
                return Source(text, "program after partitioning", _meshes(compiled)), platform
    raise RuntimeError("XLA wrote no program after partitioning; is XLA_FLAGS in its way?")


def _shardings(compiled: Any) -> Iterator[Any]:
    yield from jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _platform(compiled: Any) -> str:
    for sharding in _shardings(compiled):
        for device in getattr(sharding, "device_set", ()):
            return str(device.platform)
    return ""


def _meshes(compiled: Any) -> tuple[Any, ...]:
    """The meshes of a program, each once."""
    found = [getattr(sharding, "mesh", None) for sharding in _shardings(compiled)]
    meshes = [mesh for mesh in found if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty]
    return tuple(dict.fromkeys(meshes))
