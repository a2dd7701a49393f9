"""Estimates what a program costs on a device that need not be here."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmp._hlo.collectives import read_program
from jaxmp._hlo.parser import Module
from jaxmp._inspect.lines import direction, line_of_frames, path_of_operation
from jaxmp._planning.compile_absent import DoesNotFit, NoCompiler, compile_for
from jaxmp._planning.cost import CostEstimate, KernelCost
from jaxmp._planning.devices import Device, find_device
from jaxmp._planning.roofline import KernelTime, Roofline


def estimate(
    step: Any,
    *args: Any,
    device: Any,
    donate: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CostEstimate:
    """Estimates what a function costs on a device that need not be here.

    A device is dear to wait for, and a program can be read without one: compilers for absent TPUs
    and GPUs come with the extra `aot`. The function is compiled for the device, and the program
    that comes out is read kernel by kernel: the operations of its products, and the bytes that it
    moves through device memory. A kernel takes as long as the one or the other at the rates of the
    data sheet, plus what it takes to launch it: the roofline model (Williams, Waterman and
    Patterson, 2009). For a TPU the compiler's own estimate in cycles stands beside it.

    It is an estimate, and a low one: kernels reach part of these rates. It serves to compare
    programs with each other, and to see what bounds them.

    Args:
      step: a function, jitted or not, such as a train step.
      *args: its arguments: arrays, or abstract ones (`jax.eval_shape`). Nothing runs. Arrays with
        a `NamedSharding` over several devices are sharded likewise over as many absent ones.
      device: a name such as `"h100"` or `"v5e"`, or a device of JAX; `jaxmp.diagnostics.DEVICES`
        has all of them.
      donate: positions of arguments to donate, where the function is not jitted.
      compiler_options: options of XLA.
      **kwargs: keyword arguments of the function.

    Returns:
      The estimate.

    Raises:
      ImportError: if the compiler for the device is not installed.
      ValueError: if there is no such device, no compiler for it, or arguments lie on several
        meshes.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    >>> estimate(lambda x: x @ x, x, device="abacus")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: no data of a device 'abacus'. Known are ...
    """
    target = find_device(device)
    try:
        compiled = compile_for(target, step, args, kwargs, donate=donate, options=compiler_options)
    except NoCompiler as error:
        raise (error.__cause__ or error) from None
    except DoesNotFit as error:
        raise ValueError(str(error)) from error
    return read_cost(compiled.as_text(), target, compiled.memory_analysis())


def read_cost(text: str, device: Device, memory: Any = None) -> CostEstimate:
    """Reads what a compiled program costs.

    Args:
      text: the text of the program.
      device: what it was compiled for.
      memory: what `compiled.memory_analysis()` returns, if it is known.

    Returns:
      The cost.

    >>> import jax
    >>> program = jax.jit(lambda x: x @ x).lower(jax.numpy.ones((64, 64))).compile()
    >>> read_cost(program.as_text(), find_device("h100")).flops
    {'float32': 524288.0}
    """
    module = Module(text)
    roofline = Roofline(module, device)
    rows = tuple(_kernel_row(module, each) for each in roofline.kernels)
    transfers = read_program(text).transfers
    carried: dict[str, int] = {}
    for each in transfers:
        carried[each.kind] = carried.get(each.kind, 0) + each.bytes * each.runs
    return CostEstimate(
        device=device.name,
        devices=module.devices,
        seconds=roofline.seconds,
        flops=roofline.flops,
        bytes=roofline.bytes,
        cycles=sum(row.cycles for row in rows) if device.platform == "tpu" else None,
        collectives=carried,
        arguments=getattr(memory, "argument_size_in_bytes", 0),
        outputs=getattr(memory, "output_size_in_bytes", 0),
        temporaries=getattr(memory, "temp_size_in_bytes", 0),
        aliased=getattr(memory, "alias_size_in_bytes", 0),
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        unseen=tuple(_unseen(roofline, bool(transfers), device)),
    )


def _kernel_row(module: Module, time: KernelTime) -> KernelCost:
    instruction, times = time.kernel
    widest = max(time.products, key=lambda each: each.flops, default=None)
    return KernelCost(
        name=instruction.name,
        line=line_of_frames(module.frames(instruction)),
        path=path_of_operation(instruction.op_name),
        direction=direction(instruction.op_name),
        times=times,
        dtype=widest.dtype if widest else "",
        flops=times * sum(each.flops for each in time.products),
        bytes=times * time.bytes,
        seconds=times * time.seconds,
        cycles=times * time.cycles,
        bound=time.bound,
    )


def _unseen(roofline: Roofline, has_transfers: bool, device: Device) -> list[str]:
    found = [
        "What kernels lose: rates are those of the data sheet, and kernels reach part of them."
    ]
    if has_transfers:
        found.append("The time of transfers between devices. They may run beside other work.")
    if loops := roofline.unknown_loops:
        found.append(
            f"How often while loops of unknown length run ({len(loops)}): once is assumed."
        )
    if roofline.conditionals:
        found.append(f"Which branch conditionals take ({roofline.conditionals}): the slowest.")
    if calls := roofline.unread_calls:
        named = ", ".join(calls)
        found.append(f"What kernels from elsewhere compute: of {named} only the bytes count.")
    if device.platform == "tpu":
        found.append(
            "What vector units take for numbers in near memory: only products and device memory "
            "count. The compiler's cycles have it."
        )
    return found
