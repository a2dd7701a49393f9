"""Six models of plain JAX functions, whose layers are stacked and run in a scan or one by one.

The values that a backward pass keeps depend on the kinds of layers, so one model would tell little.
There are two language models, a mixture of experts, a recurrent model, and two image models. Each
is float32 throughout, for autocast to lower, or has the casts of mixed bfloat16 written out:
operands of products and what flows between layers in bfloat16; norms, softmaxes and losses in
float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

Block = Callable[[Any, Any], tuple[Any, Any]]

_PATCH = 16  # pixels of a patch on each side, and
_COLORS = 3  # numbers of a pixel
_EXPERTS = 8
_ROOM = 1.25  # of an expert, over what it would need if all got equally many tokens
_GROUP = 4  # heads of queries that share keys and values
_CAP_SCORES, _CAP_LOGITS = 50.0, 30.0
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a model is.

    Attributes:
      layers: how many blocks there are.
      width: numbers of a token, or channels of an image.
      batch: sequences or images.
      length: tokens of a sequence, patches of an image, or pixels on each side of it.
      heads: of attention, which share the width.
      classes: tokens of the vocabulary, or kinds of images.
    """

    layers: int
    width: int
    batch: int
    length: int
    heads: int = 8
    classes: int = 1024


@dataclasses.dataclass(frozen=True)
class Model:
    """What the models share.

    Attributes:
      sizes: how large it is.
      scan: whether the blocks run in a loop; if not, one by one.
      by_hand: whether the casts to bfloat16 are written out; if not, all is float32.
      checkpoint: what each block keeps, as a policy of `jax.checkpoint`; None for no checkpoint.
    """

    sizes: Sizes
    scan: bool = True
    by_hand: bool = False
    checkpoint: Callable[..., Any] | None = None

    def params(self) -> PyTree:
        """float32 params; those of the blocks are stacked along the first dimension."""
        raise NotImplementedError

    def batch(self) -> PyTree:
        """What the loss is computed from: tokens, or images with their kinds."""
        shape = self.sizes.batch, self.sizes.length + 1
        return jax.random.randint(jax.random.key(1), shape, 0, self.sizes.classes)

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy, in float32."""
        raise NotImplementedError

    def low(self, x: Array) -> Array:
        """An operand in the dtype of products."""
        return x.astype(jnp.bfloat16) if self.by_hand else x

    def dot(self, equation: str, a: Array, b: Array) -> Array:
        """A product whose operands and result have the dtype of products."""
        return jnp.einsum(equation, self.low(a), self.low(b))

    def softmax(self, scores: Array) -> Array:
        """Weights that add up to one, computed in float32."""
        return self.low(jax.nn.softmax(_wide(scores)))

    def repeat(self, block: Block, carry: Any, each: PyTree) -> tuple[Any, Any]:
        """Runs a block for each element along the first dimension of its second argument."""
        if self.checkpoint is not None:
            block = jax.checkpoint(block, policy=self.checkpoint, prevent_cse=not self.scan)
        if self.scan:
            return jax.lax.scan(block, carry, each)
        results = []
        for i in range(jax.tree.leaves(each)[0].shape[0]):
            carry, result = block(carry, jax.tree.map(lambda leaf, i=i: leaf[i], each))
            results.append(result)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


class GPT(Model):
    """Blocks of attention and an MLP behind a LayerNorm each, with tied embeddings."""

    causal = True  # of the class: a token sees those before it

    def params(self) -> PyTree:
        """As in every model."""
        s, normal = self.sizes, _normals()
        return {
            "embedding": normal(s.classes, s.width, scale=0.02),
            "position": normal(s.length, s.width, scale=0.02),
            "blocks": self.block_params(normal),
            "norm": jnp.ones(s.width),
        }

    def block_params(self, normal: Callable[..., Array]) -> dict[str, Array]:
        """Those of the blocks."""
        n, d = self.sizes.layers, self.sizes.width
        norms = {"norm_attention": jnp.ones((n, d)), "norm_mlp": jnp.ones((n, d))}
        attention = {"qkv": normal(n, d, 3 * d), "out": normal(n, d, d)}
        return norms | attention | self.mlp_params(normal, n, d)

    def mlp_params(self, normal: Callable[..., Array], n: int, d: int) -> dict[str, Array]:
        """Those of the second half of each block."""
        bias = jnp.zeros((n, 4 * d))
        return {"up": normal(n, d, 4 * d), "bias": bias, "down": normal(n, 4 * d, d)}

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of each next token."""
        x = self.low(params["embedding"][batch[:, :-1]] + params["position"])
        x, _ = self.repeat(self.block, x, params["blocks"])
        logits = self.dot("btd,vd->btv", self.norm(x, params["norm"]), params["embedding"])
        return _cross_entropy(logits, batch[:, 1:])

    def block(self, x: Array, w: PyTree) -> tuple[Array, None]:
        """One layer."""
        x = x + self.attend(self.norm(x, w["norm_attention"]), w)
        return x + self.mlp(self.norm(x, w["norm_mlp"]), w), None

    def norm(self, x: Array, scale: Array) -> Array:
        """A LayerNorm."""
        x = _wide(x)
        centered = x - x.mean(-1, keepdims=True)
        return self.low(centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + _EPSILON) * scale)

    def attend(self, x: Array, w: PyTree) -> Array:
        """Attention of several heads."""
        batch, length, width = x.shape
        head = width // self.sizes.heads
        qkv = self.dot("btd,de->bte", x, w["qkv"]).reshape(batch, length, -1, head)
        q, k, v = jnp.split(qkv, 3, axis=2)
        scores = _wide(self.dot("bqhd,bkhd->bhqk", q, k)) * head**-0.5
        if self.causal:
            scores = jnp.where(_causal(length), scores, -1e30)
        mixed = self.dot("bhqk,bkhd->bqhd", self.softmax(scores), v)
        return self.dot("btd,de->bte", mixed.reshape(x.shape), w["out"])

    def mlp(self, x: Array, w: PyTree) -> Array:
        """Two layers with a gelu between them."""
        hidden = self.dot("btd,de->bte", x, w["up"]) + self.low(w["bias"])
        return self.dot("btd,de->bte", jax.nn.gelu(hidden), w["down"])


class Gemma(Model):
    """As Gemma 2: RMSNorm, rotated queries and keys, shared keys, gated MLP, capped by tanh."""

    def params(self) -> PyTree:
        """As in every model."""
        s, normal = self.sizes, _normals()
        n, d = s.layers, s.width
        shared = 2 * (s.heads // _GROUP) * (d // s.heads)
        blocks = {
            "norm_attention": jnp.zeros((n, d)),
            "q": normal(n, d, d),
            "kv": normal(n, d, shared),
            "out": normal(n, d, d),
            "norm_mlp": jnp.zeros((n, d)),
            "gate": normal(n, d, 4 * d),
            "up": normal(n, d, 4 * d),
            "down": normal(n, 4 * d, d),
        }
        embedding = normal(s.classes, d, scale=0.02)
        return {"embedding": embedding, "blocks": blocks, "norm": jnp.zeros(d)}

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of each next token."""
        x = self.low(params["embedding"][batch[:, :-1]] * self.sizes.width**0.5)
        x, _ = self.repeat(self._block, x, params["blocks"])
        logits = self.dot("btd,vd->btv", self._norm(x, params["norm"]), params["embedding"])
        return _cross_entropy(_capped(_wide(logits), _CAP_LOGITS), batch[:, 1:])

    def _block(self, x: Array, w: PyTree) -> tuple[Array, None]:
        x = x + self._attend(self._norm(x, w["norm_attention"]), w)
        h = self._norm(x, w["norm_mlp"])
        gate = jax.nn.gelu(self.dot("btd,de->bte", h, w["gate"]))
        gated = gate * self.dot("btd,de->bte", h, w["up"])
        return x + self.dot("btd,de->bte", gated, w["down"]), None

    def _norm(self, x: Array, scale: Array) -> Array:
        x = _wide(x)
        mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
        return self.low(x * jax.lax.rsqrt(mean_square + _EPSILON) * (1 + scale))

    def _attend(self, x: Array, w: PyTree) -> Array:
        batch, length, width = x.shape
        head, groups = width // self.sizes.heads, self.sizes.heads // _GROUP
        q = self.dot("btd,de->bte", x, w["q"]).reshape(batch, length, groups * _GROUP, head)
        kv = self.dot("btd,de->bte", x, w["kv"]).reshape(batch, length, 2, groups, head)
        q, k = self.low(_rotated(q)), self.low(_rotated(kv[:, :, 0]))
        q = q.reshape(batch, length, groups, _GROUP, head)
        scores = _wide(self.dot("bqghd,bkgd->bghqk", q, k)) * head**-0.5
        scores = jnp.where(_causal(length), _capped(scores, _CAP_SCORES), -1e30)
        mixed = self.dot("bghqk,bkgd->bqghd", self.softmax(scores), kv[:, :, 1])
        return self.dot("btd,de->bte", mixed.reshape(x.shape), w["out"])


class ViT(GPT):
    """A transformer that sees patches of images, and no mask."""

    causal = False

    def params(self) -> PyTree:
        """As in every model."""
        s, normal = self.sizes, _normals()
        return {
            "patches": normal(_PATCH * _PATCH * _COLORS, s.width),
            "position": normal(s.length, s.width, scale=0.02),
            "blocks": self.block_params(normal),
            "norm": jnp.ones(s.width),
            "head": normal(s.width, s.classes),
        }

    def batch(self) -> PyTree:
        """Images and their kinds."""
        return _images(self.sizes, _PATCH * math.isqrt(self.sizes.length))

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of the kinds of images."""
        images, kinds = batch
        side = math.isqrt(self.sizes.length)
        patches = images.reshape(-1, side, _PATCH, side, _PATCH * _COLORS).swapaxes(2, 3)
        patches = patches.reshape(-1, side * side, _PATCH * _PATCH * _COLORS)
        x = self.dot("btp,pd->btd", patches, params["patches"]) + self.low(params["position"])
        x, _ = self.repeat(self.block, x, params["blocks"])
        mean = _wide(self.norm(x, params["norm"])).mean(1)
        return _cross_entropy(self.dot("bd,dc->bc", mean, params["head"]), kinds)


class ResNet(Model):
    """Equal blocks of two convolutions, each with a batch norm."""

    def params(self) -> PyTree:
        """As in every model."""
        s, normal = self.sizes, _normals()
        n, c = s.layers, s.width
        blocks = {
            "kernels": normal(n, 2, 3, 3, c, c, scale=(9 * c) ** -0.5),
            "scales": jnp.ones((n, 2, c)),
            "biases": jnp.zeros((n, 2, c)),
        }
        stem = normal(3, 3, _COLORS, c, scale=(9 * _COLORS) ** -0.5)
        return {"stem": stem, "blocks": blocks, "head": normal(c, s.classes)}

    def batch(self) -> PyTree:
        """Images and their kinds."""
        return _images(self.sizes, self.sizes.length)

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of the kinds of images."""
        images, kinds = batch
        x, _ = self.repeat(self._block, self._convolve(images, params["stem"]), params["blocks"])
        return _cross_entropy(self.dot("bc,ck->bk", _wide(x).mean((1, 2)), params["head"]), kinds)

    def _block(self, x: Array, w: PyTree) -> tuple[Array, None]:
        h = jax.nn.relu(self._norm(self._convolve(x, w["kernels"][0]), w, 0))
        h = self._norm(self._convolve(h, w["kernels"][1]), w, 1)
        return jax.nn.relu(x + h), None

    def _convolve(self, x: Array, kernel: Array) -> Array:
        layout = ("NHWC", "HWIO", "NHWC")
        operands = self.low(x), self.low(kernel)
        return jax.lax.conv_general_dilated(*operands, (1, 1), "SAME", dimension_numbers=layout)

    def _norm(self, x: Array, w: PyTree, which: int) -> Array:
        x = _wide(x)
        mean = x.mean((0, 1, 2))
        variance = jnp.mean(x**2, (0, 1, 2)) - mean**2
        normal = (x - mean) * jax.lax.rsqrt(variance + _EPSILON)
        return self.low(normal * w["scales"][which] + w["biases"][which])


class LSTM(Model):
    """Two recurrent layers or more; the loop is that over time, and does not stack params."""

    def params(self) -> PyTree:
        """As in every model."""
        s, normal = self.sizes, _normals()
        gates = s.width, 4 * s.width
        return {
            "embedding": normal(s.classes, s.width, scale=1.0),
            "layers": [
                {"in": normal(*gates), "state": normal(*gates), "bias": jnp.zeros(gates[1])}
                for _ in range(s.layers)
            ],
            "head": normal(s.width, s.classes),
        }

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of each next token."""
        weights = jax.tree.map(self.low, params["layers"])

        def step(states: Any, x: Array) -> tuple[Any, Array]:
            after = []
            for w, (h, cell) in zip(weights, states, strict=True):
                x, cell = self._cell(x, h, cell, w)
                after.append((x, cell))
            return after, x

        zeros = jnp.zeros((self.sizes.batch, self.sizes.width))
        states = [(self.low(zeros), zeros) for _ in weights]
        inputs = self.low(params["embedding"][batch[:, :-1].T])
        _, outputs = self.repeat(step, states, inputs)
        return _cross_entropy(self.dot("tbd,dv->tbv", outputs, params["head"]), batch[:, 1:].T)

    def _cell(self, x: Array, h: Array, cell: Array, w: PyTree) -> tuple[Array, Array]:
        gates = self.dot("bd,de->be", x, w["in"]) + self.dot("bd,de->be", h, w["state"])
        new, into, forget, out = jnp.split(gates + w["bias"], 4, axis=-1)
        added = _wide(jax.nn.sigmoid(into) * jnp.tanh(new))
        cell = _wide(jax.nn.sigmoid(forget + 1)) * cell + added
        return jax.nn.sigmoid(out) * self.low(jnp.tanh(cell)), cell


class MoE(GPT):
    """A GPT in which each token goes to the MLP of one expert, if that has room for it."""

    def mlp_params(self, normal: Callable[..., Array], n: int, d: int) -> dict[str, Array]:
        """Those of the second half of each block."""
        experts = {"up": normal(n, _EXPERTS, d, 4 * d), "down": normal(n, _EXPERTS, 4 * d, d)}
        return {"router": normal(n, d, _EXPERTS), **experts}

    def loss(self, params: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The mean cross-entropy of each next token, and a little for experts that are crowded."""
        x = self.low(params["embedding"][batch[:, :-1]] + params["position"])
        (x, crowding), _ = self.repeat(self._layer, (x, jnp.zeros(())), params["blocks"])
        logits = self.dot("btd,vd->btv", self.norm(x, params["norm"]), params["embedding"])
        return _cross_entropy(logits, batch[:, 1:]) + 0.01 * crowding / self.sizes.layers

    def _layer(self, carry: tuple[Array, Array], w: PyTree) -> tuple[tuple[Array, Array], None]:
        x, crowding = carry
        x = x + self.attend(self.norm(x, w["norm_attention"]), w)
        mixed, crowded = self._switch(self.norm(x, w["norm_mlp"]), w)
        return (x + mixed, crowding + crowded), None

    def _switch(self, x: Array, w: PyTree) -> tuple[Array, Array]:
        room = math.ceil(_ROOM * x.shape[1] / _EXPERTS)
        shares = jax.nn.softmax(jnp.einsum("btd,de->bte", _wide(x), w["router"]))
        chosen = jax.nn.one_hot(shares.argmax(-1), _EXPERTS, dtype=jnp.int32)
        place = jnp.sum(chosen * jnp.cumsum(chosen, axis=1), -1) - 1  # none beyond the room
        seat = jax.nn.one_hot(place, room)
        sent = jnp.einsum("bte,bts->btes", chosen.astype(jnp.float32), seat)
        back = sent * jnp.max(shares, -1)[..., None, None]
        into = self.dot("btes,btd->besd", sent, x)
        hidden = jax.nn.gelu(self.dot("besd,edf->besf", into, w["up"]))
        out = self.dot("besf,efd->besd", hidden, w["down"])
        shared = chosen.astype(jnp.float32).mean((0, 1))
        crowded = _EXPERTS * jnp.sum(shared * shares.mean((0, 1)))
        return self.dot("btes,besd->btd", back, out), crowded


MODELS: dict[str, type[Model]] = {
    **{"gpt": GPT, "gemma": Gemma, "vit": ViT, "resnet": ResNet, "lstm": LSTM, "moe": MoE}
}


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _causal(length: int) -> Array:
    return jnp.tril(jnp.ones((length, length), bool))


def _capped(x: Array, cap: float) -> Array:
    return cap * jnp.tanh(x / cap)


def _cross_entropy(logits: Array, targets: Array) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(_wide(logits), targets).mean()


def _rotated(x: Array) -> Array:
    """Turned by angles that grow with the position, in float32."""
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    left, right = jnp.split(_wide(x), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _images(sizes: Sizes, side: int) -> tuple[Array, Array]:
    images = jax.random.normal(jax.random.key(1), (sizes.batch, side, side, _COLORS))
    return images, jax.random.randint(jax.random.key(2), (sizes.batch,), 0, sizes.classes)


def _normals() -> Callable[..., Array]:
    """Makes random params, each from a key of its own."""
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def normal(*shape: int, scale: float | None = None) -> Array:
        scale = shape[-2] ** -0.5 if scale is None else scale
        return scale * jax.random.normal(next(keys), shape)

    return normal
