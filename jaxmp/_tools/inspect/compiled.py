"""Compiles a program to a text that shows what its collectives carry."""

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
      text: the text of the program.
      origin: the kind of program, in words.
      meshes: the meshes of the arguments and results, as far as JAX knows.
    """

    text: str
    origin: str
    meshes: tuple[Any, ...]


def source_of(program: Any, args: Any, kwargs: Any) -> Source:
    """Returns the text of a program, which may be in any form that `collectives` takes.

    Raises:
      TypeError: if `program` is none of these.
      ValueError: for arguments without a function, a program that was compiled for CPUs, or a text
        that is not a compiled program.
    """
    is_compiled = hasattr(program, "as_text") and hasattr(program, "input_shardings")
    is_lowered = hasattr(program, "as_text") and hasattr(program, "compile")
    if (isinstance(program, str) or is_compiled or is_lowered) and (args or kwargs):
        raise ValueError(
            f"arguments go with a function; this {type(program).__name__} was made for arguments "
            "of its own already. Leave them out"
        )
    if isinstance(program, str):
        if "ENTRY" in program or "HloModule" in program:
            return Source(program, "given program", ())
        # StableHLO: the partitioner has not run yet.
        if program.lstrip().startswith(("module", "#")):
            raise ValueError(
                "this text is of a program before it is compiled: it does not have the collectives "
                "of sharded arrays yet. Give the object that `lower` returns, not its text"
            )
        raise ValueError(
            "this text is not of a compiled program. Give the text that `compiled.as_text()` "
            "returns"
        )
    if is_compiled:
        if _platform(program) == "cpu":
            raise ValueError(_ON_CPU)
        return _source_of_compiled(program)
    if is_lowered:
        return _compile(program)
    if not callable(program) and not hasattr(program, "lower"):
        raise TypeError(
            "give a function and its arguments, what its `lower` or `compile` returns, or the text "
            f"of a compiled program, got {type(program).__name__}"
        )
    if hasattr(program, "lower"):  # a jitted function knows its static arguments
        return _compile(program.lower(*args, **kwargs))
    arrays, call = closed_over(program, args, kwargs)
    return _compile(jax.jit(call).lower(arrays))


def closed_over(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Closes a function over its arguments that are not arrays.

    Returns:
      The list of all leaves of the arguments, with None for those that are not arrays; and a
      function of such a list.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        filled = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fn(*args, **kwargs)

    return arrays, call


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _compile(lowered: Any) -> Source:
    """Compiles a lowered program; on CPUs, reads the program after partitioning instead."""
    # The backend is a guess: a step may be lowered for devices other than the default ones.
    if jax.default_backend() != "cpu":
        compiled = lowered.compile()
        return (
            _source_of_compiled(compiled)
            if _platform(compiled) != "cpu"
            else _partitioned(lowered)[0]
        )
    source, platform = _partitioned(lowered)  # compiles only once in the likely case of CPUs
    return source if platform == "cpu" else _source_of_compiled(lowered.compile())


def _source_of_compiled(compiled: Any) -> Source:
    return Source(compiled.as_text(), "compiled program", _meshes(compiled))


def _partitioned(lowered: Any) -> tuple[Source, str]:
    """Compiles a program and returns its dump after partitioning, with the platform."""
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as folder:
        compiled = lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
                # The compiled program itself is discarded.
                "xla_backend_optimization_level": 0,
                # The all-reduce-promotion pass aborts the process for 16-bit sums in a partly
                # manual shard_map. The second name changes the key of JAX's cache on disk: XLA
                # would not dump a cached program.
                "xla_disable_hlo_passes": f"all-reduce-promotion,jaxmp-{uuid.uuid4().hex}",
            }
        )
        platform = _platform(compiled)
        if platform != "cpu":
            return Source("", "", ()), platform
        # With a single device or pmap, nothing is partitioned.
        for pattern in ("*after_spmd-partitioning*.txt", "*before_optimizations.txt"):
            for path in sorted(pathlib.Path(folder).glob(pattern), reverse=True):
                text = path.read_text()
                return Source(text, "program after partitioning", _meshes(compiled)), platform
    raise RuntimeError(
        "XLA wrote no program after partitioning. Options in XLA_FLAGS may prevent it: unset them"
    )


def _shardings(compiled: Any) -> Iterator[Any]:
    yield from jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _platform(compiled: Any) -> str:
    # A program without arguments and results has no devices.
    for sharding in _shardings(compiled):
        for device in getattr(sharding, "device_set", ()):
            return str(device.platform)
    return ""


def _meshes(compiled: Any) -> tuple[Any, ...]:
    # Without repetitions: arguments and results of a step share one or two.
    candidates = [getattr(sharding, "mesh", None) for sharding in _shardings(compiled)]
    meshes = [mesh for mesh in candidates if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty]
    return tuple(dict.fromkeys(meshes))
