"""What a model is, in the sizes that decide its speed: layers, weight matrices, experts, caches.

A `Model` is read from a Hugging Face config.json by `specsim.configs`; nothing here knows a model by name.
All counts are of the whole model; tensor parallelism is applied where operators are priced (`specsim.forward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from specsim.pages import Shown


@dataclass(frozen=True)
class Format:
    """How numbers are stored: `bits` per element, and the bits of scales and zero points spread over the elements."""

    name: str  # bf16, fp16, fp32, fp8, int8, int4, nvfp4, mxfp4
    bits: float
    scale_bits: float = 0.0

    @property
    def in_blocks(self) -> bool:
        """FP8 with a 32-bit scale a block of the matrix, whose products have kernels of their own (MXFP8's groups of 32 along
        a row, 8 bits each, have others)."""
        return self.name == "fp8" and 0 < self.scale_bits < 8 / 32

    @property
    def bytes(self) -> float:
        """Bytes per element, scales included."""
        return (self.bits + self.scale_bits) / 8


BF16 = Format("bf16", 16)
FP32 = Format("fp32", 32)


@dataclass(frozen=True)
class Projection:
    """One weight matrix of `inputs` x `outputs`, or `count` equal ones applied as one kernel each.

    `split` says what tensor parallelism does: "column" cuts the outputs, "row" the inputs (its result needs an
    all-reduce), "none" keeps a copy on each rank. `heads_kv` marks the part of a fused QKV whose heads cannot be
    cut below one: that many outputs belong to K/V heads (`kv_outputs`), with `kv_heads` heads.
    """

    name: str
    inputs: int
    outputs: int
    format: Format = BF16
    split: str = "column"
    bias: bool = False
    count: int = 1
    kv_outputs: int = 0
    kv_heads: int = 0

    @property
    def parameters(self) -> int:
        return self.count * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    @property
    def bytes(self) -> float:
        return self.parameters * self.format.bytes


@dataclass(frozen=True)
class Attention:
    """The part of a mixer that reads a cache or a state.

    kind: "gqa" (K and V of `kv_heads` heads), "mla" (one latent of `kv_lora_rank` + `rope_dim` values a token, the
    same on every rank), "linear" (a fixed state a sequence: Mamba, gated delta net, KDA) or "conv" (short convolution).
    `window` bounds the tokens read (sliding or chunked attention); `sparse_tokens` the tokens that an indexer selects
    (DeepSeek sparse attention), which itself reads `index_bytes` of every token. `compress` tokens share one cache
    entry (DeepSeek-V4): the entries read are those of the compressed history, `sparse_tokens` of them at most, and the
    `window` most recent tokens uncompressed.
    """

    kind: str
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    window: int | None = None
    sparse_tokens: int | None = None
    index_heads: int = 0
    index_dim: int = 0
    state_values: int = 0  # values of recurrent state a sequence and layer, all heads ("linear", "conv")
    shares_kv: bool = False  # reads another layer's cache and keeps none of its own (Gemma-3n and -4)
    head_norms: bool = False  # queries and keys are normed head by head
    compress: int = 1

    @property
    def kv_values(self) -> int:
        """Values of one cache entry in this layer, all KV heads, without the indexer's key."""
        if self.shares_kv or self.kind in ("linear", "conv"):
            return 0
        if self.kind == "mla":
            return self.kv_lora_rank + self.rope_dim
        return self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))

    @property
    def index_bytes(self) -> float:
        """Bytes of the indexer's key of one cache entry, the same on every rank whatever the format of the cache: fp8
        values and an fp32 scale for every 128 of them (SGLang mem_cache, `index_k_with_scale_buffer`)."""
        return self.index_dim * (1 + 4 / 128)

    def kv_bytes(self, value_bytes: float, share: float = 1.0) -> float:
        """Cache bytes that one token adds in this layer on a rank that keeps `share` of the KV values."""
        return (self.kv_values * share * value_bytes + self.index_bytes) / self.compress


@dataclass(frozen=True)
class Experts:
    """Routed experts: `count` of them, `per_token` chosen for each row; `shared` runs for every row."""

    count: int
    per_token: int
    inputs: int  # hidden size, or the latent size that the layer projects to first
    intermediate: int
    format: Format = BF16
    gated: bool = True  # gate, up and down (3 matrices) or up and down (2)
    bias: bool = False
    by_groups: bool = False  # chosen by their group's best score, without a learnt bias, as DeepSeek-V2 does
    router: Projection | None = None
    shared: tuple[Projection, ...] = ()

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def parameters_each(self) -> int:
        biases = (self.matrices - 1) * self.intermediate + self.inputs if self.bias else 0
        return self.matrices * self.inputs * self.intermediate + biases

    @property
    def bytes_each(self) -> float:
        return self.parameters_each * self.format.bytes


@dataclass(frozen=True)
class Layer:
    """One decoder layer: a mixer (attention or recurrent), then a dense feed-forward or experts; either may be absent.

    `norms` counts normalisation kernels over a whole row that the architecture demands (input, post-attention, ...), as an
    engine with fused add-norm runs them. `kind` is the label shown to people, such as "mla+moe".
    """

    kind: str
    attention: Attention | None = None
    mixer: tuple[Projection, ...] = ()  # projections around the attention: qkv, o, low-rank parts, gates
    ffn: tuple[Projection, ...] = ()  # dense feed-forward
    experts: Experts | None = None
    norms: int = 2
    norm_parameters: int = 0
    other_parameters: int = 0  # small tensors: convolutions, sinks, A_log, dt_bias, per-layer gates

    @property
    def allreduces(self) -> int:
        """Sums over ranks that tensor parallelism needs: one after the mixer, one after the feed-forward."""
        return int(bool(self.mixer)) + int(bool(self.ffn) or self.experts is not None)

    def projections(self) -> Iterator[Projection]:
        """Every dense matrix of the layer: mixer, feed-forward, router, shared experts (not the routed ones)."""
        yield from self.mixer
        yield from self.ffn
        if self.experts is not None:
            if self.experts.router is not None:
                yield self.experts.router
            yield from self.experts.shared

    @property
    def parameters(self) -> int:
        routed = self.experts.count * self.experts.parameters_each if self.experts else 0
        return routed + sum(p.parameters for p in self.projections()) + self.norm_parameters + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        idle = (self.experts.count - self.experts.per_token) * self.experts.parameters_each if self.experts else 0
        return self.parameters - idle


@dataclass(frozen=True)
class DraftShape:
    """What makes a model a drafter. `kind`: "eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "domino", "model".

    `fc` joins hidden states of the target (EAGLE: once a draft extend for EAGLE-3, every step for EAGLE and MTP);
    `target_hidden` is the width of the target that it was trained for (0 = its own); `block` the tokens that a
    block drafter emits in one pass; `token_heads` small matrices that run once for each drafted token after the pass
    (DSpark's Markov head, Domino's recurrence).
    """

    kind: str
    fc: Projection | None = None
    target_hidden: int = 0
    block: int = 0
    token_heads: tuple[Projection, ...] = ()


@dataclass(frozen=True, repr=False)
class Model(Shown):
    """A whole model: sizes in elements, parameters as counts, `other_bytes` in bytes. `layers` is run-length encoded:
    (layer, how many), in the order of first appearance."""

    page_from = "specsim.model_text"

    name: str
    architecture: str
    hidden: int
    vocab: int
    layers: tuple[tuple[Layer, int], ...]
    head: Projection  # lm_head; for a reduced draft vocabulary its outputs are the reduced size
    tied: bool = False  # the head shares the embedding's memory
    embedding_format: Format = BF16
    activation: Format = BF16  # of hidden states, so of all-reduce messages
    kv_format: Format = BF16
    max_context: int = 0
    final_norm_parameters: int = 0
    other_parameters: int = 0  # vision tower and the like: in memory and in the total, not in a decode step
    other_bytes: float = 0.0
    embedding_parameters: int | None = None  # None: vocab x hidden; 0 for a drafter that borrows the target's
    mtp_layers: tuple[tuple[Layer, int], ...] = ()  # built-in next-token-prediction layers, not in total_parameters
    draft: DraftShape | None = None
    quantisation: str = "none"  # as the config says it, for people
    warnings: tuple[str, ...] = field(default=(), compare=False)
    source: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.architecture, self.source))

    def draft_projections(self) -> tuple[Projection, ...]:
        """The matrices that a drafter has beside layers, embedding and head: fc and those run for each token."""
        if self.draft is None:
            return ()
        return (*((self.draft.fc,) if self.draft.fc else ()), *self.draft.token_heads)

    @property
    def num_layers(self) -> int:
        return sum(n for _, n in self.layers)

    @property
    def _embedding(self) -> int:
        return self.vocab * self.hidden if self.embedding_parameters is None else self.embedding_parameters

    @property
    def total_parameters(self) -> int:
        fc = sum(p.parameters for p in self.draft_projections())
        head = 0 if self.tied else self.head.parameters
        return (
            sum(n * layer.parameters for layer, n in self.layers)
            + self._embedding
            + head
            + self.final_norm_parameters
            + self.other_parameters
            + fc
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, embedding and head counted as model cards do; other_parameters left out."""
        idle = sum(n * (layer.parameters - layer.active_parameters) for layer, n in self.layers)
        return self.total_parameters - idle - self.other_parameters

    @property
    def active_parameters_without_embedding(self) -> int:
        """As `active_parameters` without the input embedding, of which a token reads one row: some cards count so."""
        return self.active_parameters - (0 if self.tied else self._embedding)

    @property
    def active_parameters_in_layers(self) -> int:
        """As `active_parameters` without embedding and head: other cards count so."""
        return self.active_parameters - self._embedding - (0 if self.tied else self.head.parameters)

    @cached_property
    def experts(self) -> Experts | None:
        """The routed experts of the layer kind with most of them, or None for a dense model."""
        kinds = [layer.experts for layer, _ in self.layers if layer.experts]
        return max(kinds, key=lambda e: e.count, default=None)

    @property
    def weight_bytes(self) -> float:
        """All weights in memory (one copy)."""
        layers = sum(
            n * (sum(p.bytes for p in layer.projections()) + (layer.experts.count * layer.experts.bytes_each if layer.experts else 0)
                 + 2 * (layer.norm_parameters + layer.other_parameters))
            for layer, n in self.layers
        )  # fmt: skip
        head = 0 if self.tied else self.head.bytes
        fc = sum(p.bytes for p in self.draft_projections())
        norms = 2 * self.final_norm_parameters
        return layers + self._embedding * self.embedding_format.bytes + head + fc + norms + self.other_bytes

    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache that one token adds, all layers, before it is cut over ranks."""
        width = self.kv_format.bytes
        return sum(n * layer.attention.kv_bytes(width) for layer, n in self.layers if layer.attention)
