"""The parts of a run, in the order of their worth."""

import dataclasses

from tables import Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
      name: what `--only` takes; `on_device/<name>.py` has `run(recorder)`.
      title: the heading of its table.
      seconds: its share of the budget. What it leaves over goes to those after it.
      columns: of its table.
      notes: what its numbers rest on, one sentence each.
      platforms: of JAX in its process, where they are not those of the device.
      needs: a module without which it is skipped.
    """

    name: str
    title: str
    seconds: int
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    platforms: str | None = None
    needs: str | None = None


_NAME = Column("contender", "contender")
_TIME = (
    Column("count", "steps", "d"),
    Column("median_ms", "median ms", ".2f"),
    Column("min_ms", "min", ".2f"),
    Column("max_ms", "max", ".2f"),
)
_OVER = (Column("baseline", "baseline"), Column("time_over", "time over it", ".3f"))
_BYTES = (
    Column("peak", "allocator's peak, GiB"),
    Column("planned_gib", "compiled peak, GiB", ".2f"),
    Column("peak_over", "compiled peak over baseline", ".3f"),
)
_REMARK = Column("remark", "")
_STEP_NOTES = (
    "Times: one step at a time, waited for, in two rounds in which the contenders take turns; the "
    "first step of a turn is not timed. Least, median and greatest of all.",
    "The allocator's peak is its high-water mark, less what other contenders' batches take. The "
    "mark cannot be set back: in the first round contenders run from the smallest compiled peak to "
    "the largest, and of one that does not raise the mark it is a bound.",
    "Compiled peak: argument + output + temp - alias of `memory_analysis()`.",
)
_TRAINING = "Each step clips by the global norm, then AdamW, and returns loss and gradient norm."

PARTS = (
    Part(
        name="ceilings",
        title="What the device can do",
        seconds=30,
        columns=(
            _NAME,
            Column("median_ms", "median ms", ".3f"),
            Column("teraflops", "TFLOP/s", ".1f"),
            Column("gigabytes_per_second", "GB/s", ".0f"),
            Column("share_of_sheet", "of the data sheet", ".1%"),
            _REMARK,
        ),
        notes=("A copy counts the bytes that it reads and those that it writes.",),
    ),
    Part(
        name="right",
        title="Is it right?",
        seconds=120,
        columns=(
            _NAME,
            Column("outcome", "outcome"),
            Column("seconds_taken", "s", ".1f"),
            _REMARK,
        ),
        notes=("The tests of the mark `device`: `pytest -m device` runs them anywhere.",),
    ),
    Part(
        name="gpt",
        title="A train step of a GPT",
        seconds=160,
        columns=(
            _NAME,
            Column("attention", "attention"),
            *_TIME,
            Column("tokens_per_second", "tokens/s", ",.0f"),
            Column("share_of_peak", "MFU", ".1%"),
            *_OVER,
            *_BYTES,
            Column("loss", "last loss", ".3f"),
            _REMARK,
        ),
        notes=(
            "24 layers of width 1,024 in a scan, 50,304 tokens, 8 sequences of 1,024: 355 M params "
            "(small: 2 layers of width 64).",
            _TRAINING,
            *_STEP_NOTES,
            "MFU: floating-point operations that the model needs (`gpt.FLOPS`), over the device's "
            "dense peak in bfloat16, also for float32 contenders.",
            "'by hand' in 16 bits casts the params with jmp inside the loss, and tests gradients "
            "in float16 alone. jaxmp's steps test all gradients, and can skip.",
        ),
    ),
    Part(
        name="torch_gpt",
        title="The same GPT in PyTorch",
        seconds=90,
        columns=(
            _NAME,
            Column("attention", "attention"),
            *_TIME,
            Column("tokens_per_second", "tokens/s", ",.0f"),
            Column("share_of_peak", "MFU", ".1%"),
            *_OVER,
            Column("peak", "allocator's peak, GiB"),
            Column("loss", "last loss", ".3f"),
            _REMARK,
        ),
        notes=(
            "`torch.autocast`, fused AdamW, `scaled_dot_product_attention`. Compiled: each block "
            "and the head by `torch.compile`, as torchtitan does, with its defaults, where XLA "
            "tries which kernels are fastest. Float32 attention of JAX's rows is plain.",
            "PyTorch has the device to itself after JAX's process has ended: the two do not take "
            "turns. The baseline is JAX's row of that name.",
            "'the same model' compares loss and gradients of both, in float32, from the same "
            "params.",
        ),
        platforms="cpu",
        needs="torch",
    ),
    Part(
        name="optimizer",
        title="The optimizer's step alone",
        seconds=45,
        columns=(
            _NAME,
            *_TIME,
            Column("bytes_per_param", "bytes a param", ".1f"),
            Column("gigabytes_per_second", "GB/s", ".0f"),
            Column("share_of_copy", "of a copy", ".1%"),
            *_OVER,
            *_BYTES,
            _REMARK,
        ),
        notes=(
            "AdamW on the params of the GPT, with float32 gradients.",
            "Five steps for each time, as for the copy.",
            "Bytes a param: state read and written once, gradients read once. No step can move "
            "fewer; what moves more has a smaller share of a copy.",
            *_STEP_NOTES,
        ),
    ),
    Part(
        name="float8",
        title="Float8: a train step of width 4,096, and layers",
        seconds=75,
        columns=(
            _NAME,
            *_TIME,
            Column("teraflops", "TFLOP/s", ".0f"),
            *_OVER,
            Column("float8 calls", "float8 calls", "d"),
            Column("speedup", "speedup", ".2f"),
            Column("estimated", "estimated for an H100", ".2f"),
            *_BYTES,
            Column("loss", "last loss", ".3f"),
            _REMARK,
        ),
        notes=(
            "The GPT has 4 layers of width 4,096, 32,768 tokens, 8 sequences of 1,024: 0.94 B "
            "params. A layer is a product of x[M, K] and w[K, N] with both gradients, that of w in "
            "float32; M x K x N is in its name. Products of layers are cuBLAS's, as where a name "
            "says so; else XLA chooses. Float8 calls are those to cuBLAS in the compiled program.",
            "Layers run ten times for each time.",
            "The estimates are those of docs/float8.md.",
            *_STEP_NOTES,
        ),
    ),
    Part(
        name="vision",
        title="Train steps of ViT-B/16 and ResNet-50",
        seconds=60,
        columns=(
            _NAME,
            *_TIME,
            Column("images_per_second", "images/s", ",.0f"),
            *_OVER,
            *_BYTES,
            Column("loss", "last loss", ".3f"),
            _REMARK,
        ),
        notes=(
            "Batches of 128 images of 224 x 224 (small: 2 of 32 x 32).",
            _TRAINING,
            *_STEP_NOTES,
        ),
    ),
    Part(
        name="plans",
        title="Memory, planned and measured",
        seconds=45,
        columns=(
            _NAME,
            Column("plan_gib", "plan, GiB", ".2f"),
            Column("planned_gib", "compiled here, GiB", ".2f"),
            Column("peak", "allocator's peak, GiB"),
            Column("plan_off", "plan, off by", "+.1%"),
            _REMARK,
        ),
        notes=(
            "`memory_plan` of the GPT's steps, for this device (an H100 on a CPU), beside peaks.",
        ),
    ),
)
