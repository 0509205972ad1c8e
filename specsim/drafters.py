"""Reading the config.json of a drafter: EAGLE, EAGLE-3, P-EAGLE, MTP heads, and the block drafters.

What a drafter shares with its target is not counted as its own: the embedding (`embedding_parameters` 0) and, where
the checkpoint has none, the head (`tied`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specsim.families import Builder, Plan
from specsim.keys import Keys
from specsim.models import DraftShape, Layer, Projection
from specsim.patterns import layer_count


@dataclass(frozen=True)
class Drafter:
    """What makes the model that is being read a drafter: its layers, shape, and what it borrows from the target."""

    shape: DraftShape
    layers: list[Layer]
    head_outputs: int
    borrows_embedding: bool = True
    borrows_head: bool = False
    norms: int = 1  # norms outside the layers


def draft_kind(config: Keys, text: Keys) -> str:
    """The kind of drafter that a config describes, "" for an ordinary model."""
    first = config.first("architectures")
    name = f"{first} {config.text('speculators_model_type')} {config.text('model_type')}".lower()
    projector = text.nested("dflash_config")
    for kind in ("dspark", "domino", "dflash"):
        if kind in name or (projector and projector.text("projector_type") == kind):
            return kind
    if projector is not None:
        return "dflash"
    if "peagle" in name or "p-eagle" in name:
        return "peagle"
    if "eagle3" in name or "eagle-3" in name or text.has("draft_vocab_size") or config.has("draft_vocab_size"):
        return "eagle3"
    if "eagle" in name:
        return "eagle"
    return "mtp" if "nextn" in name or first.lower().endswith("mtp") else ""


def read_drafter(kind: str, config: Keys, builder: Builder, plans: list[Plan], vocab: int) -> Drafter:
    """The drafter of a kind from `draft_kind`. Raises InputError for a missing or impossible size."""
    readers = {"eagle3": _eagle3, "peagle": _eagle3, "eagle": _eagle, "mtp": _mtp}
    return readers.get(kind, _block)(kind, config, builder, plans, vocab)


def _sizes(config: Keys, builder: Builder) -> tuple[int, int]:
    """(target's hidden size, number of its hidden states that are read)."""
    target = config.optional("target_hidden_size") or builder.keys.optional("target_hidden_size") or builder.hidden
    count = 3
    eagle = config.nested("eagle_config") or builder.keys.nested("eagle_config")
    ids = eagle.numbers("eagle_aux_hidden_state_layer_ids") if eagle else None
    ids = ids or config.numbers("eagle_aux_hidden_state_layer_ids") or config.numbers("aux_hidden_state_layer_ids")
    return target, len(ids) if ids else count


def _eagle3(kind: str, config: Keys, builder: Builder, plans: list[Plan], vocab: int) -> Drafter:
    """EAGLE-3: the first layer reads the token's embedding beside the hidden state, each normed: a double-width QKV."""
    target, count = _sizes(config, builder)
    hidden = builder.hidden
    layers: list[Layer] = []
    for i, plan in enumerate(plans):
        builder.width = 2 if i == 0 else 1
        layer = builder.build(plan)
        if i == 0:
            layer = _with_norms(layer, 1, hidden)
        layers.append(layer)
    builder.width = 1
    reduced = config.optional("draft_vocab_size") or builder.keys.optional("draft_vocab_size") or vocab
    if reduced > vocab:
        raise config.fail(
            "draft_vocab_size", f"{reduced} is larger than the vocabulary, {vocab}", "correct one of them"
        )
    fc = Projection("fc", count * target, hidden, builder.scheme.base, "none")
    return Drafter(DraftShape(kind, fc, target), layers, reduced, borrows_embedding=target == hidden)


def _with_norms(layer: Layer, count: int, hidden: int) -> Layer:
    return replace(layer, norms=layer.norms + count, norm_parameters=layer.norm_parameters + count * hidden)


def _eagle(kind: str, config: Keys, builder: Builder, plans: list[Plan], vocab: int) -> Drafter:
    """EAGLE and EAGLE-2: target-shaped layers (the first without its input norm) after fc over embedding and state."""
    target, _ = _sizes(config, builder)
    layers = [builder.build(plan) for plan in plans]
    layers[0] = _with_norms(layers[0], -1, builder.hidden)
    fc = Projection("fc", builder.hidden + target, builder.hidden, builder.scheme.base, "none", bias=True)
    return Drafter(DraftShape("eagle", fc, target), layers, vocab, borrows_head=True, norms=0)


def _mtp(kind: str, config: Keys, builder: Builder, plans: list[Plan], vocab: int) -> Drafter:
    """A next-token-prediction module cut out of its target."""
    fc = Projection("eh_proj", 2 * builder.hidden, builder.hidden, builder.scheme.base, "none")
    layers = [builder.build(plan) for plan in plans]
    return Drafter(DraftShape("mtp", fc, builder.hidden), layers, vocab, borrows_head=True, norms=3)


def _block(kind: str, config: Keys, builder: Builder, plans: list[Plan], vocab: int) -> Drafter:
    """DFlash and its kin: one pass over a block of mask tokens, which attend to hidden states of the target."""
    hidden, base = builder.hidden, builder.scheme.base
    keys = builder.keys.nested("dflash_config") or builder.keys
    target = builder.keys.optional("target_hidden_size") or hidden
    ids = keys.numbers("target_layer_ids") or builder.keys.numbers("target_layer_ids")
    count = len(ids) if ids else layer_count(builder.keys)
    heads: tuple[Projection, ...] = ()
    if kind == "dspark" and (rank := keys.optional("markov_rank", minimum=0)):
        style = keys.text("markov_head_type", default="vanilla")
        widths = {"vanilla": (0, 0), "gated": (hidden + rank, rank), "rnn": (hidden + 2 * rank, 3 * rank)}
        if style not in widths:
            raise keys.fail("markov_head_type", f"{style[:40]!r} is not supported", f"supported: {', '.join(widths)}")
        inner = (Projection(f"markov_{style}", *widths[style], base, "none", bias=True),) if widths[style][0] else ()
        heads = (*inner, Projection("markov_out", rank, vocab, base, "column"))
        if keys.flag("enable_confidence_head"):
            read = hidden + (rank if keys.flag("confidence_head_with_markov") else 0)
            heads += (Projection("confidence", read, 1, base, "none", bias=True),)
    if kind == "domino":
        width = keys.whole("emb_dim")
        state = keys.whole("gru_hidden_dim")
        heads = (
            Projection("gru", hidden + state, 3 * state, base, "none"),
            Projection("token_in", hidden + state, width, base, "none"),
            Projection("token_out", width, vocab, base, "column"),
        )
    block = builder.keys.optional("block_size", maximum=4096) or keys.optional("block_size", maximum=4096) or 0
    if not block:
        raise builder.keys.fail("block_size", "the key is missing", "add the block that the drafter was trained for")
    fc = Projection("fc", count * target, hidden, base, "none")
    layers = [builder.build(plan) for plan in plans]
    return Drafter(DraftShape(kind, fc, target, block, heads), layers, vocab, borrows_head=True, norms=2)
