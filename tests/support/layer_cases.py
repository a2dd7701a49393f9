"""Every layer class of linen and nnx, with what a policy makes of it.

A class that Flax exports has a case here, or stands in `WITHOUT_A_CASE` with the reason.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

import jaxmp

NAMESPACES: dict[str, Any] = {"linen": nn, "nnx": nnx, "nnx.bridge": nnx.bridge}

ROWS = jax.ShapeDtypeStruct((2, 4), jnp.float32)
SEQUENCE = jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((2, 4, 4, 4), jnp.float32)
IDS = jax.ShapeDtypeStruct((2, 3), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One layer, a call of it, and the dtypes that a policy brings about.

    Dtypes are "param", "compute" and "output", those of the policy; "input", what the call was
    given; or a dtype's name.

    Attributes:
      api: "linen" or "nnx".
      name: the class, as the namespace of the API has it.
      make: builds the layer from its class; in nnx from its class and `nnx.Rngs`.
      inputs: the arguments of the call, as shapes and dtypes.
      dots: how many dots and convolutions of the call have operands of which dtype.
      float32_gradient: the dots of the gradient that have an operand in float32.
      options: the keyword arguments of the call.
      method: what is called.
      variant: tells cases of one class apart.
      params: whether it has any.
      statistics: whether it keeps statistics.
      inside: what it returns inside a model.
      output: what it returns as the model.
      carry: the dtypes of the carry that it also returns, inside a model and as the model.
      eager: whether it cannot be built without computing.
      not_on_cpus: the dtypes in which no CPU runs it under jit.
      note: what is to be known; where it does not follow the policy, why.
    """

    api: str
    name: str
    make: Callable[..., Any]
    inputs: tuple[Any, ...]
    dots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    float32_gradient: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = "__call__"
    variant: str = ""
    params: bool = True
    statistics: bool = False
    inside: str = "compute"
    output: str = "output"
    carry: tuple[str, str] | None = None
    eager: bool = False
    not_on_cpus: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.api, self.name, self.variant)))

    @property
    def exists(self) -> bool:
        """Whether this Flax has the class."""
        return hasattr(NAMESPACES[self.api], self.name)

    def build(self, **dtypes: Any) -> Any:
        """The layer, with dtypes set by hand if any are given; in nnx without its values."""
        cls = functools.partial(getattr(NAMESPACES[self.api], self.name), **dtypes)
        if self.api == "linen":
            return self.make(cls)
        if self.eager:
            return self.make(cls, nnx.Rngs(0))
        return nnx.eval_shape(lambda: self.make(cls, nnx.Rngs(0)))


def dtype_of(policy: jaxmp.Policy, name: str, given: str = "float32") -> str:
    """The dtype that a case calls "param", "compute", "output", "input" or by its own name."""
    return given if name == "input" else str(getattr(policy, f"{name}_dtype", name))


def dots_of(policy: jaxmp.Policy, dots: Mapping[str, int]) -> dict[str, int]:
    """The dots of a case as `count_dots` would count them under a policy."""
    found: dict[str, int] = {}
    for names, count in dots.items():
        operands = ",".join(dict.fromkeys(dtype_of(policy, name) for name in names.split(",")))
        found[operands] = found.get(operands, 0) + count
    return found


def layer(api: str, name: str, make: Any, *inputs: Any, dots: Any = 0, **options: Any) -> Case:
    """A case whose dots all compute in the compute dtype, unless they are given in full."""
    full = {"compute": dots} if isinstance(dots, int) and dots else dots or {}
    return Case(api=api, name=name, make=make, inputs=inputs, dots=full, **options)


def linen_cell(name: str, dots: int, carries: int = 1, x: Any = ROWS, **fields: Any) -> Case:
    carry = (x, x) if carries == 2 else x
    return layer(
        "linen", name, lambda cls: cls(4, **fields), carry, x, dots=dots, carry=("input", "input")
    )


def nnx_cell(name: str, dots: int, carries: int = 1) -> Case:
    carry = (ROWS, ROWS) if carries == 2 else ROWS
    return layer("nnx", name, _four_to_four, carry, ROWS, dots=dots, carry=("input", "input"))


def _four_to_four(cls: Any, rngs: nnx.Rngs) -> Any:
    return cls(4, 4, rngs=rngs)


linen = functools.partial(layer, "linen")
in_nnx = functools.partial(layer, "nnx")

BATCH_NORM = {"statistics": True, "options": {"use_running_average": False}}
RUNNING = {
    "statistics": True,
    "options": {"use_running_average": True},
    "variant": "running average",
}
RNN = {"note": "With `LSTMCell`; dots of one step."}
BIDIRECTIONAL = {"note": "With `GRUCell`; dots of one step."}
SPECTRAL_NORM = {
    "dots": {"compute": 1, "float32,param": 3, "float32": 1},
    "float32_gradient": {"float32": 6},
    "statistics": True,
    "options": {"update_stats": True},
    "note": "Power iteration multiplies the weight by float32 statistics.",
}
SOFTMAX = {
    "dots": {"compute": 5, "compute,float32": 1},
    "float32_gradient": {"compute,float32": 1, "float32,compute": 1, "float32": 1},
    "variant": "force_fp32_for_softmax",
    "note": "The softmax returns float32: its dot with the values is mixed.",
}
NNX_ATTENTION = {
    "dots": 6,
    "float32_gradient": {"float32,compute": 2},
    "not_on_cpus": ("float16",),
    "note": "Two dots of the gradient have a float32 operand. No float16 under `jit` on CPUs. "
    "To decode, give `init_cache` the compute dtype.",
}

LINEN = [
    linen("Dense", lambda cls: cls(4), ROWS, dots=1),
    linen("DenseGeneral", lambda cls: cls((2, 4), axis=(-2, -1)), SEQUENCE, dots=1),
    linen("Einsum", lambda cls: cls((4, 4), "btd,de->bte"), SEQUENCE, dots=1),
    linen("Conv", lambda cls: cls(4, (3, 3)), IMAGE, dots=1),
    linen("ConvLocal", lambda cls: cls(4, (3, 3)), IMAGE, dots=2),
    linen("ConvTranspose", lambda cls: cls(4, (3, 3)), IMAGE, dots=1),
    linen("Embed", lambda cls: cls(5, 4), IDS),
    linen("Embed", lambda cls: cls(5, 4), ROWS, dots=1, method="attend", variant="attend"),
    linen("BatchNorm", lambda cls: cls(), IMAGE, **BATCH_NORM),
    linen("BatchNorm", lambda cls: cls(), IMAGE, **RUNNING),
    linen("LayerNorm", lambda cls: cls(), IMAGE),
    linen("RMSNorm", lambda cls: cls(), IMAGE),
    linen("GroupNorm", lambda cls: cls(num_groups=2), IMAGE),
    linen("InstanceNorm", lambda cls: cls(), IMAGE),
    linen("SpectralNorm", lambda cls: cls(nn.Dense(4)), ROWS, **SPECTRAL_NORM),
    linen("WeightNorm", lambda cls: cls(nn.Dense(4)), ROWS, dots=1),
    linen("MultiHeadDotProductAttention", lambda cls: cls(2), SEQUENCE, dots=6),
    linen("MultiHeadAttention", lambda cls: cls(2), SEQUENCE, dots=6),
    linen(
        "MultiHeadAttention",
        lambda cls: cls(2, normalize_qk=True),
        SEQUENCE,
        dots=6,
        variant="normalize_qk",
    ),
    linen(
        "MultiHeadAttention", lambda cls: cls(2, force_fp32_for_softmax=True), SEQUENCE, **SOFTMAX
    ),
    linen("SelfAttention", lambda cls: cls(2), SEQUENCE, dots=6),
    linen_cell("SimpleCell", 2),
    linen_cell("LSTMCell", 8, carries=2),
    linen_cell("OptimizedLSTMCell", 2, carries=2),
    linen_cell("GRUCell", 6),
    linen_cell("MGUCell", 4),
    linen_cell("ConvLSTMCell", 2, carries=2, x=IMAGE, kernel_size=(3, 3)),
    linen("RNN", lambda cls: cls(nn.LSTMCell(4)), SEQUENCE, dots=8, **RNN),
    linen(
        "RNN",
        lambda cls: cls(nn.LSTMCell(4), return_carry=True),
        SEQUENCE,
        dots=8,
        variant="return_carry",
        carry=("float32", "output"),
        **RNN,
    ),
    linen(
        "Bidirectional",
        lambda cls: cls(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
        SEQUENCE,
        dots=12,
        **BIDIRECTIONAL,
    ),
    linen(
        "PReLU",
        lambda cls: cls(),
        ROWS,
        inside="input",
        note="It has no `dtype`, and computes in that of its input.",
    ),
]

NNX = [
    in_nnx("Linear", _four_to_four, ROWS, dots=1),
    in_nnx(
        "LinearGeneral",
        lambda cls, rngs: cls((4, 4), (2, 4), axis=(-2, -1), rngs=rngs),
        SEQUENCE,
        dots=1,
    ),
    in_nnx("Einsum", lambda cls, r: cls("btd,de->bte", (4, 4), (4,), rngs=r), SEQUENCE, dots=1),
    in_nnx("Conv", lambda cls, rngs: cls(4, 4, (3, 3), rngs=rngs), IMAGE, dots=1),
    in_nnx("ConvTranspose", lambda cls, rngs: cls(4, 4, (3, 3), rngs=rngs), IMAGE, dots=1),
    in_nnx("Embed", lambda cls, rngs: cls(5, 4, rngs=rngs), IDS),
    in_nnx(
        "Embed",
        lambda cls, rngs: cls(5, 4, rngs=rngs),
        ROWS,
        dots=1,
        method="attend",
        variant="attend",
        output="compute",
        note="In nnx only `__call__` casts what leaves the model.",
    ),
    in_nnx("BatchNorm", lambda cls, rngs: cls(4, rngs=rngs), IMAGE, **BATCH_NORM),
    in_nnx("BatchNorm", lambda cls, rngs: cls(4, rngs=rngs), IMAGE, **RUNNING),
    in_nnx("LayerNorm", lambda cls, rngs: cls(4, rngs=rngs), IMAGE),
    in_nnx("RMSNorm", lambda cls, rngs: cls(4, rngs=rngs), IMAGE),
    in_nnx("GroupNorm", lambda cls, rngs: cls(4, num_groups=2, rngs=rngs), IMAGE),
    in_nnx("InstanceNorm", lambda cls, rngs: cls(4, rngs=rngs), IMAGE),
    in_nnx(
        "SpectralNorm",
        lambda cls, rngs: cls(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
        ROWS,
        **SPECTRAL_NORM,
    ),
    in_nnx(
        "WeightNorm",
        lambda cls, rngs: cls(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
        ROWS,
        dots=1,
        # Flax 0.12.8 keeps the scales as bare arrays, of which it knows no abstract form.
        eager=True,
    ),
    in_nnx(
        "MultiHeadAttention",
        lambda cls, rngs: cls(2, 4, decode=False, rngs=rngs),
        SEQUENCE,
        **NNX_ATTENTION,
    ),
    in_nnx(
        "MultiHeadAttention",
        lambda cls, rngs: cls(2, 4, decode=False, normalize_qk=True, rngs=rngs),
        SEQUENCE,
        variant="normalize_qk",
        **NNX_ATTENTION,
    ),
    nnx_cell("SimpleCell", 2),
    nnx_cell("LSTMCell", 8, carries=2),
    nnx_cell("OptimizedLSTMCell", 2, carries=2),
    nnx_cell("GRUCell", 2),
    in_nnx("RNN", lambda cls, rngs: cls(nnx.LSTMCell(4, 4, rngs=rngs)), SEQUENCE, dots=8, **RNN),
    in_nnx(
        "RNN",
        lambda cls, rngs: cls(nnx.LSTMCell(4, 4, rngs=rngs), return_carry=True),
        SEQUENCE,
        dots=8,
        variant="return_carry",
        carry=("param", "output"),
        **RNN,
    ),
    in_nnx(
        "Bidirectional",
        lambda cls, rngs: cls(
            nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))
        ),
        SEQUENCE,
        dots=4,
        **BIDIRECTIONAL,
    ),
    in_nnx("LoRA", lambda cls, rngs: cls(4, 2, 4, rngs=rngs), ROWS, dots=2),
    in_nnx(
        "LoRA",
        lambda cls, rngs: cls(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
        ROWS,
        dots=3,
        variant="base_module",
    ),
    in_nnx("LoRALinear", lambda cls, rngs: cls(4, 4, lora_rank=2, rngs=rngs), ROWS, dots=3),
    in_nnx("PReLU", lambda cls, rngs: cls(), ROWS),
    in_nnx(
        "RoPE",
        lambda cls, rngs: cls(embedding_size=4, max_seq_len=8),
        SEQUENCE,
        params=False,
        inside="float32",
        note="It has no `dtype`, and float32 tables.",
    ),
]
CASES = [case for case in LINEN + NNX if case.exists]

_ABSTRACT = "a base class"
_CONTAINER = "has no params or products of its own: what is in it follows the rules"
_FLOAT8 = "multiplies in float8, whatever the policy"
_BRIDGE = "holds a module of the other API: put that one under a policy"
WITHOUT_A_CASE = {
    "linen.Module": _ABSTRACT,
    "linen.RNNCellBase": _ABSTRACT,
    "linen.Sequential": _CONTAINER,
    "linen.Dropout": "has no params, and returns the dtype of its input",
    "linen.Fp8DirectDotGeneralOp": _FLOAT8,
    "linen.Fp8DotGeneral": _FLOAT8,
    "linen.Fp8DotGeneralOp": _FLOAT8,
    "linen.Fp8Einsum": _FLOAT8,
    "linen.NANOOFp8DotGeneralOp": _FLOAT8,
    "nnx.Module": _ABSTRACT,
    "nnx.RNNCellBase": _ABSTRACT,
    "nnx.Dict": _CONTAINER,
    "nnx.List": _CONTAINER,
    "nnx.Sequential": _CONTAINER,
    "nnx.Dropout": "has no params, and returns the dtype of its input",
    "nnx.bridge.Module": _ABSTRACT,
    "nnx.bridge.ToLinen": _BRIDGE,
    "nnx.bridge.ToNNX": _BRIDGE,
}


def exported_layers(namespaces: Mapping[str, Any]) -> set[str]:
    """The names of all classes of modules that namespaces export."""
    return {
        f"{prefix}.{name}"
        for prefix, namespace in namespaces.items()
        for name, value in vars(namespace).items()
        if isinstance(value, type) and issubclass(value, (nn.Module, nnx.Module))
    }


def table_lines(cases: list[Case]) -> list[str]:
    """The table of docs/flax.md, a line for each case, or for two that differ in the API only."""
    apis: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        name = f"`{case.name}`" + (f", {case.variant}" if case.variant else "")
        dots = [f"{count} {operands}" for operands, count in case.dots.items()]
        cells = (
            name,
            ", ".join([*["param"] * case.params, *["statistics float32"] * case.statistics]),
            "; ".join(dots).replace(",", " by "),
            case.inside + (f", carry {case.carry[0]}" if case.carry else ""),
            case.output + (f", carry {case.carry[1]}" if case.carry else ""),
            case.note,
        )
        apis.setdefault(cells, []).append(case.api)
    header = ["layer", "API", "parameters", "dots", "output inside the model"]
    rows = [
        [*header, "output of the model", "notes"],
        ["---"] * 7,
        *([cells[0], ", ".join(found), *cells[1:]] for cells, found in apis.items()),
    ]
    return ["| " + " | ".join(row) + " |" for row in rows]


def is_of_another_flax(line: str) -> bool:
    """Whether a line of the table is about a class that this Flax does not have."""
    name, apis = line.split("`")[1], line.split("|")[2].split(",")
    return not any(hasattr(NAMESPACES[api.strip()], name) for api in apis)
