"""Train steps of a GPT: by hand and with jaxmp, with cuDNN's attention and plain."""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import flax_gpt
import gpt
import handwritten
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from lab.timing import Contender
from stacked_models import Sizes

import jaxmp
from jaxmp._recompute.api import Recompute
from on_device import names
from on_device.recorder import Recorder
from on_device.steps import WITHOUT_TRITON, Case, measure

_BY_HAND_PLAIN = "by hand, bfloat16, plain attention"
_SCALE = 2.0**15  # of losses in float16, at the beginning
# Of the compiler for GPUs; the first lets a product of cuBLAS write into the stack of a loop, where
# it would be copied, and so needs the second.
_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "dynamic slices": {**WITHOUT_TRITON, "xla_gpu_enable_dynamic_slice_fusion": True},
    "cuBLAS": WITHOUT_TRITON,
    "Triton for all products": {"xla_gpu_triton_gemm_any": True},
}


def model(recorder: Recorder) -> gpt.GPT:
    """The model of this run."""
    if recorder.small:
        return gpt.GPT(layers=2, width=64, heads=2, vocab=256, context=32)
    return gpt.GPT(
        layers=24, width=1024, heads=16, vocab=50304, context=1024, attention=attention()
    )


def batch_size(recorder: Recorder) -> int:
    """Sequences of a step."""
    return 2 if recorder.small else 8


def attention() -> gpt.Attention:
    """The fastest that the device has."""
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def optimizer() -> optax.GradientTransformation:
    """What all contenders train with."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))


def with_jaxmp(
    loss: handwritten.LossFn,
    init: handwritten.Init,
    policy: str,
    *,
    model_casts: bool = False,
    recompute: Recompute = "never",
    gradients: Literal["buffered", "released"] = "buffered",
    **storage: Any,
) -> handwritten.Steps:
    """How to train under a policy; `storage` is for the optimizer."""
    if policy == "mixed_float16":
        storage["loss_scale"] = jaxmp.DynamicLossScale(init_scale=_SCALE)
    tx = jaxmp.mixed_precision(optimizer(), policy, **storage)
    policy = "none" if model_casts else policy
    # The benchmark jits and donates every step itself.
    step = jaxmp.make_train_step(
        loss, policy, donate=False, recompute=recompute, gradients=gradients
    )
    return handwritten.Steps(lambda: jaxmp.TrainState.create(params=init(), tx=tx), step)


def steps_by_hand(
    loss: handwritten.LossFn, init: handwritten.Init, dtype: str
) -> handwritten.Steps:
    """How to train with casts inside the loss."""
    options: dict[str, Any] = {"metrics": handwritten.loss_and_norm}
    if dtype == "float32":
        return handwritten.plain(loss, optimizer(), init, **options)
    options["policy"] = f"params=float32,compute={dtype},output=float32"
    if dtype == "float16":
        options["initial_scale"] = _SCALE
        return handwritten.with_jmp_loss_scale(loss, optimizer(), init, **options)
    return handwritten.with_jmp(loss, optimizer(), init, **options)


def run(recorder: Recorder) -> None:
    """Records a row for each contender."""
    measure(recorder, cases(model(recorder), batch_size(recorder)))


def cases(size: gpt.GPT, sequences: int) -> list[Case]:
    """The contenders, the most worthwhile first."""
    tokens = jax.random.randint(jax.random.key(1), (sequences, size.context + 1), 0, size.vocab)
    init = jax.jit(size.init)
    plain = dataclasses.replace(size, attention="xla")

    def case(contender: Contender, gpu_options: Any = _NO_FLAGS, **facts: str) -> Case:
        items, flops = sequences * size.context, size.flops(sequences)
        counted: dict[str, Any] = {"items": items, "unit": "tokens", "flops": flops}
        return Case(contender, tokens, facts, **counted, gpu_options=gpu_options)

    def by_hand(name: str, model: gpt.GPT, dtype: str, precision: str | None = None) -> Contender:
        return Contender(name, *steps_by_hand(model.loss, init, dtype), precision)

    def mixed(
        name: str, model: gpt.GPT, policy: str = "mixed_bfloat16", **options: Any
    ) -> Contender:
        return Contender(name, *with_jaxmp(model.loss, init, policy, **options))

    def as_it_comes(name: str, model: gpt.GPT = size, **options: Any) -> Contender:
        return mixed(f"{names.DEFAULT}{name}", model, **{"recompute": "loops", **options})

    half = size.computing_in("float16")
    single = dataclasses.replace(size, one_by_one=True)
    two, four = (dataclasses.replace(size, unroll=n) for n in (2, min(4, size.layers)))
    int8 = functools.partial(jaxmp.recompute, mode="loops", codes="int8")
    blocks = dataclasses.replace(size, remat=True)
    small_state: dict[str, Any] = {"master": "remainder", "moments": "int8"}
    fused = {"attention": size.attention, "baseline": names.BY_HAND}
    unfused = {"attention": "plain", "baseline": _BY_HAND_PLAIN}
    recomputed = mixed(names.RECOMPUTED_PLAIN, plain, recompute="auto")
    return [
        case(by_hand(names.BY_HAND, size, "bfloat16"), attention=size.attention),
        case(mixed(names.AUTOCAST, size), **fused),
        case(mixed(names.RECOMPUTED, size, recompute="auto"), **fused),
        case(as_it_comes(""), **fused),
        case(mixed("jaxmp, one by one, recompute always", single, recompute="always"), **fused),
        case(mixed("jaxmp, autocast, one by one", single), **fused),
        case(by_hand("by hand, bfloat16, one by one", single, "bfloat16"), **fused),
        *(case(as_it_comes(f", {name}"), flags, **fused) for name, flags in _FLAGS.items()),
        case(as_it_comes(", unroll 2", two), **fused),
        case(as_it_comes(", unroll 4", four), **fused),
        case(as_it_comes(", codes int8", recompute=int8), **fused),
        case(as_it_comes(", released gradients", gradients="released"), **fused),
        case(mixed(names.SMALL_STATE, size, "bfloat16", **small_state), **fused),
        case(mixed("jaxmp, float16", half, "mixed_float16"), **fused),
        case(by_hand(_BY_HAND_PLAIN, plain, "bfloat16"), attention="plain"),
        case(mixed("jaxmp, autocast, plain attention", plain), **unfused),
        case(recomputed, **unfused),
        case(by_hand(names.BY_HAND_TF32, plain, "float32", "tensorfloat32"), **unfused),
        case(by_hand(names.BY_HAND_FLOAT32, plain, "float32", "highest"), **unfused),
        case(_linen(size, sequences), **unfused, remark="a GPT of linen's layers"),
        case(mixed("jaxmp, recompute always", size, recompute="always"), **fused),
        case(by_hand("by hand, blocks checkpointed", blocks, "bfloat16"), **fused),
        case(mixed("jaxmp, blocks checkpointed", blocks), **fused),
        case(by_hand(names.BY_HAND_FLOAT16, half, "float16"), **fused),
        case(mixed("jaxmp, float8", size, "mixed_float8"), **fused),
    ]


def _linen(size: gpt.GPT, sequences: int) -> Contender:
    sizes = Sizes(size.layers, size.width, sequences, size.context, size.heads, size.vocab)
    module = flax_gpt.linen_module(sizes, scan=True)
    inputs = jnp.zeros((1, size.context), jnp.int32)

    @jax.jit
    def init() -> PyTree:
        return module.init(jax.random.key(0), inputs)

    loss, _ = flax_gpt.linen_program(sizes, scan=True)
    steps = with_jaxmp(loss, init, "mixed_bfloat16", model_casts=True)
    return Contender("jaxmp, linen under a policy", *steps)
