"""The GPT of `gpt.py` in PyTorch: its train step on the same device, from the same params.

JAX runs on the CPU in this process. There it makes params and tokens, and says what loss and
gradients of a small model are, so that a model that differs shows.

Compiled contenders compile by region, as torchtitan does: the blocks share one compilation, and the
head has another, which takes seconds where the whole model would take minutes.
"""

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

import gpt
import jax
import numpy as np
import torch
from jaxtyping import PyTree
from tables import Row
from torch import Tensor, nn
from torch.nn import functional as F

from jaxmp._tools.planning.devices import find_device
from on_device import gpt as jax_part, names
from on_device.recorder import Recorder

SAME = "the same model"

_WARM_UP = 3  # steps that are not timed
_TOLERANCE = 1e-4  # float32 leaves 2e-6, exact GELU 8e-4, another epsilon 3e-3
_INITIAL_SCALE = 2.0**15


class Norm(nn.Module):
    """RMS norm in float32; the result has the dtype of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # Of one dtype, so that there is a fused kernel; autocast leaves float32 alone.
        return F.rms_norm(x.float(), self.weight.shape, self.weight, eps=1e-6).to(x.dtype)


class Block(nn.Module):
    """Attention, then an MLP, each after a norm; the names are those of `gpt.GPT.init`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = Norm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    def _attend(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))


class Head(nn.Module):
    """The last norm, logits from the embedding, and the mean cross-entropy in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), embedding).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """The model of `gpt.GPT`. Its params are not initialised: `load` sets them.

    `residual` is the dtype of the residual stream. Autocast leaves it in float32, the dtype of the
    embedding; JAX's steps cast the embedding too.
    """

    def __init__(self, size: gpt.GPT, residual: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.residual = residual
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.position = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.head = Head(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens of shape [batch, context+1]."""
        x = (self.embedding(tokens[:, :-1]) + self.position).to(self.residual)
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.embedding.weight, tokens[:, 1:])

    def load(self, params: PyTree) -> None:
        """Sets the params to those of `gpt.GPT`, as NumPy arrays."""
        with torch.no_grad():
            for weight, array in self.pairs(params):
                # There first: a GPU transposes faster.
                weight.copy_(torch.from_numpy(array).to(weight.device))

    def pairs(self, tree: PyTree) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Each param with its part of a tree like JAX's params: stacked blocks, [in, out]."""
        yield self.embedding.weight, tree["embedding"]
        yield self.position, tree["position"]
        for i, block in enumerate(self.blocks):
            for name, stack in tree["blocks"].items():
                yield getattr(block, name).weight, stack[i].T
        yield self.head.norm.weight, tree["norm_out"]

    def compile_by_region(self) -> None:
        """Compiles each block, for all of which one compilation serves, and the head."""
        for region in (*self.blocks, self.head):
            region.compile(fullgraph=True, dynamic=False)


@dataclasses.dataclass(frozen=True)
class _Contender:
    """A way to train in PyTorch.

    Attributes:
      name: what the table calls it.
      baseline: the row of JAX's that computes alike.
      dtype: of autocast; without one, float32 throughout.
      residual: the dtype of the residual stream.
      compiled: whether regions are compiled.
      precision: of float32 products: "high" allows TF32.
      slowness: how many times longer than the one before it takes, roughly.
    """

    name: str
    baseline: str
    dtype: torch.dtype | None = None
    residual: torch.dtype = torch.float32
    compiled: bool = True
    precision: str = "highest"
    slowness: float = 1.0

    @property
    def facts(self) -> Row:
        """The entries of its row that are known before."""
        return {"contender": self.name, "baseline": self.baseline}


# In the order of the table; the eager one runs first.
_CONTENDERS = (
    _Contender(names.TORCH, names.BY_HAND, torch.bfloat16),
    _Contender("autocast bfloat16, eager", names.BY_HAND, torch.bfloat16, compiled=False),
    _Contender(
        names.TORCH_16_BIT_RESIDUALS,
        names.BY_HAND,
        torch.bfloat16,
        residual=torch.bfloat16,
    ),
    _Contender("float32 (TF32), compiled", names.BY_HAND_TF32, precision="high"),
    _Contender("float32, compiled", names.BY_HAND_FLOAT32, slowness=2.0),
    _Contender("autocast float16, compiled", names.BY_HAND_FLOAT16, torch.float16),
)


def run(recorder: Recorder) -> None:
    """Records a row for the control, and one for each contender."""
    size, batch = jax_part.model(recorder), jax_part.batch_size(recorder)
    rounds, steps = 2, 2 if recorder.small else 10  # as JAX's contenders
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # Small work: on a busy machine threads would only wait for each other.
        torch.set_num_threads(1)
    for where in dict.fromkeys(("cpu", device.type)):
        name = SAME if where == "cpu" else f"{SAME}, on the device"
        try:
            recorder.record(contender=name, **same_model(torch.device(where)))
        except Exception as error:
            traceback.print_exc()
            recorder.record_failure(name, error)
    for contender in _CONTENDERS:
        # Until another takes its place; the process may be ended at any time.
        recorder.record_late(**contender.facts)
    params = jax.tree.map(np.array, jax.jit(size.init)())
    tokens = _tokens(size, batch).to(device)
    patience = {True: 25.0, False: 10.0}  # a guess of what compiled and eager contenders take
    # A compilation may take all the time there is, so what needs none comes first.
    for contender in sorted(_CONTENDERS, key=lambda contender: contender.compiled):
        if recorder.seconds_left() < contender.slowness * patience[contender.compiled]:
            continue
        began = time.perf_counter()
        try:
            if contender.compiled:
                _start_compiler(device)
                began = time.perf_counter()
            row = _measure(contender, size, params, tokens, recorder, rounds * steps)
            # Of the step whose loss JAX's row has, the last of a turn.
            loss = row["losses"][: steps + 1][-1]
            rates = _rates(size.flops(batch), batch * size.context, row, device)
            recorder.record(**contender.facts, **row, **rates, loss=loss)
        except Exception as error:
            traceback.print_exc()
            recorder.record_failure(error=error, **contender.facts)
        patience[contender.compiled] = time.perf_counter() - began


def same_model(device: torch.device) -> Row:
    """Loss and gradients of both frameworks, in float32, from the same params of a small model."""
    size = gpt.GPT(layers=2, width=48, heads=3, vocab=97, context=24)
    params, tokens = _test_params(size), _tokens(size, 2)
    model = GPT(size).to(device)
    model.load(params)
    loss = model(tokens.to(device))
    loss.backward()
    loss_jax, grads = jax.jit(jax.value_and_grad(size.loss))(params, tokens.numpy())
    grads = jax.tree.map(np.asarray, grads)
    # Not Python's max, which can pass over NaN.
    distance = float(
        np.max(
            [
                np.linalg.norm(weight.grad.cpu().numpy() - grad) / np.linalg.norm(grad)
                for weight, grad in model.pairs(grads)
            ]
        )
    )
    ok = distance < _TOLERANCE and abs(loss.item() / float(loss_jax) - 1) < _TOLERANCE
    return {
        "loss_torch": loss.item(),
        "loss_jax": float(loss_jax),
        "gradient_distance": distance,
        "ok": ok,
        "remark": f"{'agrees' if ok else 'DIFFERS'}: gradients are {distance:.1e} apart",
    }


def _test_params(size: gpt.GPT) -> PyTree:
    """Params at which details count: epsilon beside small embeddings, GELU and softmax bent."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, like: Any) -> np.ndarray:
        noise = rng.standard_normal(like.shape, dtype=np.float32)
        if "norm" in jax.tree_util.keystr(path):
            return 1 + np.float32(0.1) * noise
        return noise * np.float32(2 / like.shape[1] ** 0.5 if like.ndim == 3 else 0.02)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(size.init))


def _tokens(size: gpt.GPT, batch: int) -> Tensor:
    shape = (batch, size.context + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, size.vocab)
    return torch.from_numpy(np.array(tokens, np.int64))


class _Trainer:
    """A model with its optimizer. A step clips, updates, and returns loss and gradient norm."""

    def __init__(
        self, contender: _Contender, size: gpt.GPT, params: PyTree, tokens: Tensor
    ) -> None:
        self.contender = contender
        self.device = tokens.device
        self.tokens = tokens
        # No other switch of TF32: PyTorch refuses a mix of the old and the new ones.
        torch.set_float32_matmul_precision(contender.precision)
        with tokens.device:
            self.model = GPT(size, contender.residual)
        self.model.load(params)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=3e-4,
            weight_decay=0.1,
            fused=True if self.device.type == "cuda" else None,
        )
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=_INITIAL_SCALE,
            enabled=contender.dtype == torch.float16,
        )
        if contender.compiled:
            self.model.compile_by_region()

    def step(self) -> tuple[Tensor, Tensor]:
        dtype = self.contender.dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            loss = self.model(self.tokens)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Before the next forward pass, so that gradients are not beside its activations.
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm


def _measure(
    contender: _Contender,
    size: gpt.GPT,
    params: PyTree,
    tokens: Tensor,
    recorder: Recorder,
    count: int,
) -> Row:
    """Times so many steps, or fewer where time runs out; each is waited for."""
    cuda = tokens.device.type == "cuda"
    _free(cuda)
    trainer = _Trainer(contender, size, params, tokens)
    seconds: list[float] = []
    row: Row = {"losses": [], "norms": []}
    if cuda:
        row["params_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    while len(seconds) < _WARM_UP + count:
        if cuda and len(seconds) == _WARM_UP:
            # A compiled step that tries kernels may take more than others do.
            row["warm_up_peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if len(seconds) > _WARM_UP + 2 and recorder.seconds_left() < 2 + 2 * seconds[-1]:
            break
        began = time.perf_counter()
        loss, norm = trainer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        row["losses"].append(loss.item())
        row["norms"].append(norm.item())
    if cuda:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    timed = seconds[_WARM_UP:]
    median = statistics.median(timed)
    row |= {"median_ms": 1e3 * median, "min_ms": 1e3 * min(timed), "max_ms": 1e3 * max(timed)}
    row |= {"count": len(timed), "seconds": timed, "warm_up_seconds": seconds[:_WARM_UP]}
    row["attention"] = _attention_kernel(size, tokens, contender.dtype)
    if contender.compiled:
        row |= {"compile_seconds": seconds[0] - median, "graphs": _graphs()}
    if trainer.scaler.is_enabled():
        row["loss_scale"] = trainer.scaler.get_scale()
    if not np.isfinite(row["losses"]).all():
        row["remark"] = "a loss is not finite"
    return row


def _rates(flops: float, tokens: int, row: Row, device: torch.device) -> Row:
    seconds = row["median_ms"] / 1e3
    rates: Row = {"tokens_per_second": tokens / seconds, "teraflops": flops / seconds / 1e12}
    if device.type == "cpu":
        return rates
    try:
        peak = find_device(torch.cuda.get_device_name(device)).peaks.of("bfloat16")
    except ValueError:  # a device without a data sheet here
        return rates
    return rates | {"share_of_peak": flops / seconds / peak}


def _graphs() -> int:
    """How many programs there are: two, one of all blocks and one of the head."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _start_compiler(device: torch.device) -> None:
    """Compiles a sum, so that no contender waits for what the first compilation loads."""
    x = torch.ones(8, device=device, requires_grad=True)
    torch.compile(lambda x: x.exp().sum())(x).backward()


def _attention_kernel(size: gpt.GPT, tokens: Tensor, dtype: torch.dtype | None) -> str | None:
    """The kernel that PyTorch chooses for attention; None if it does not say."""
    shape = (len(tokens), size.heads, size.context, size.width // size.heads)
    q = torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)
    try:
        choice = torch._fused_sdp_choice(q, q, q, is_causal=True)  # there is no public name
        return str(nn.attention.SDPBackend(choice).name)
    except Exception:
        return None


def _free(cuda: bool) -> None:
    """Gives back what an earlier contender held: compiled code refers to its modules."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
