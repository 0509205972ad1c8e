"""Engine descriptions: facts read in the engines' public source (docs/engines.md), and properties that must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.asked import scenario
from specsim.configs import load_model
from specsim.engines import METHODS, NO_LIMIT, load_engine, read_flags
from specsim.errors import InputError
from specsim.forward import Parallel
from specsim.forward import build as build_pass
from specsim.models import BF16
from specsim.names import ENGINES, PHASES
from specsim.ops import ONE, ROWS, Load, RowsAbove
from specsim.prediction import machine_of, predict
from specsim.profiles import EngineTerms
from specsim.provenance import sources_of
from specsim.scenarios import build

SGLANG_RELEASES = [f"0.5.{patch}" for patch in range(11, 24)]
VLLM_RELEASES = ["0.20.0", "0.20.2", "0.25.1", "0.33.0"]
ONE_ROW = Load(np.asarray(1.0), np.asarray(1.0), np.asarray(100.0))
RELEASES = [("sglang", v) for v in SGLANG_RELEASES] + [("vllm", v) for v in VLLM_RELEASES]


@pytest.mark.parametrize(("name", "version"), RELEASES)
def test_every_described_release_loads(name: str, version: str) -> None:
    engine = load_engine(name, version)
    assert (engine.name, engine.version) == (name, version)
    assert EngineTerms.names() == set(engine.terms)
    for term in engine.terms.values():
        assert term.relative_uncertainty > 0
        assert term.source
    assert all(count >= 1 for counts in engine.kernels.values() for count in counts.values())
    assert {"gqa", "mla", "linear", "dense", "moe", "groups", "shared", "pass", "draft"} <= set(engine.kernels)


def test_default_release_is_the_measured_one() -> None:
    assert load_engine("sglang").version == "0.5.16"
    assert load_engine("sglang", "v0.5.16.post1") == load_engine("sglang", "0.5.16")


def test_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'sglang'"):
        load_engine("sgl-lang")


@pytest.mark.parametrize("version", ["0.4.9", "0.5.10", "0.6.0", "newest", "", "1", "9" * 50 + ".1"])
def test_a_release_without_description_is_refused(version: str) -> None:
    with pytest.raises(InputError, match=r"0\.5\.11 to 0\.5\.23"):
        load_engine("sglang", version)


def test_descriptions_cannot_be_changed_by_a_caller() -> None:
    engine = load_engine("sglang")
    with pytest.raises(TypeError):
        engine.kernels["gqa"]["tiny"] = 9  # type: ignore[index]


def test_kernels_of_one_step_reproduce_the_profile() -> None:
    """One H200 rank of Kimi-K2.5 at batch 1, SGLang 0.5.16, launched 2,199 kernels in a decode step.

    61 layers of MLA: 5 projections, 4 norms, attention, rotary and cache write. One dense layer: 2 projections and the
    activation. 60 layers of experts: router, 2 shared projections, routing, fused experts, shared activation and sum.
    Simulated uniform routing added 8 kernels to each of the 60. Once: final norm, lm_head, the rest of the pass.
    Left out: 62 reductions that split GEMMs launch, which a GEMM's fixed time contains.
    """
    engine = load_engine("sglang")
    extra = {piece: sum(counts.values()) for piece, counts in engine.kernels.items()}
    attention = 5 + 4 + engine.attention_launches("mla", "fa3") + extra["mla"]
    dense = 2 + extra["dense"]
    experts = 1 + 2 + engine.launches("moe_int4") + extra["moe"] + extra["shared"]
    total = 61 * attention + dense + 60 * (experts + 8) + extra["pass"] + 1
    assert total == pytest.approx(2199, rel=0.03)
    assert total + 62 == pytest.approx(2199, abs=2)


def test_attention_kernels_depend_on_the_backend() -> None:
    engine = load_engine("sglang")
    assert engine.attention_launches("mla") == 3
    assert engine.attention_launches("mla", "triton") == 2
    assert engine.attention_launches("gqa", "no-such-backend") == engine.launches("attention_gqa")
    assert engine.launches("moe_fp8") == engine.launches("moe") == 6
    assert engine.launches("something new") == 1


class TestCapturedBatches:
    """SGLang server_args.py and base_cuda_graph_runner.py (0.5.16); vllm/config/vllm.py."""

    def test_speculation_captures_every_small_batch_up_to_its_running_cap(self) -> None:
        captured = load_engine("sglang").captured_batches(None, True, 141, 8)
        assert captured == (*range(1, 9), *range(10, 33, 2), 40, 44, 48)

    def test_plain_decode_pads_more(self) -> None:
        captured = load_engine("sglang").captured_batches(None, False, 141, 8)
        assert captured[:6] == (1, 2, 4, 8, 12, 16)
        assert captured[-1] == 512

    @pytest.mark.parametrize(
        ("memory", "tp", "version", "largest"),
        [
            (16, 1, "0.5.16", 8),
            (24, 1, "0.5.16", 24),
            (24, 8, "0.5.16", 80),
            (32, 2, "0.5.20", 48),
            (48, 2, "0.5.16", 32),
            (48, 4, "0.5.16", 160),
            (80, 2, "0.5.16", 256),
            (96, 8, "0.5.16", 512),
            (141, 1, "0.5.23", 256),
            (180, 1, "0.5.16", 512),
        ],
    )
    def test_largest_follows_memory_and_tensor_parallelism(
        self, memory: float, tp: int, version: str, largest: int
    ) -> None:
        assert load_engine("sglang", version).captured_batches(None, False, memory, tp)[-1] == largest

    def test_the_users_largest_is_captured_even_off_the_grid(self) -> None:
        assert load_engine("sglang").captured_batches(5, False, 80, 1) == (1, 2, 4, 5)

    def test_the_users_list_wins(self) -> None:
        assert load_engine("sglang").captured_batches(256, True, 80, 1, explicit=[8, 1, 8]) == (1, 8)

    def test_running_limit_is_captured_too(self) -> None:
        assert load_engine("sglang").captured_batches(64, False, 80, 1, max_running=50)[-2:] == (48, 50)

    @pytest.mark.parametrize("engine", ["sglang", "vllm"])
    def test_a_largest_beyond_any_batch_is_refused(self, engine: str) -> None:
        """A hundred million sizes would take minutes and gigabytes to list."""
        with pytest.raises(InputError, match="captured batch sizes: 999,999,999 is out of range; give up to 131,072"):
            load_engine(engine).captured_batches(999_999_999, True, 80, 1)

    def test_vllm_rounds_tokens_to_whole_sequences(self) -> None:
        """Sizes 1, 2, 4, 8, 16 tokens with 4 rows a sequence: 4, 8 and 16 tokens, so 1, 2 and 4 sequences."""
        vllm = load_engine("vllm")
        assert vllm.captured_batches(16, True, 80, 8, rows=4) == (1, 2, 4)
        assert vllm.captured_batches(None, False, 80, 8)[-1] == 512
        assert vllm.captured_batches(None, False, 24, 1, max_running=16)[-1] == 16
        assert vllm.captured_batches(None, True, 80, 8, rows=4)[-1] == 128

    @pytest.mark.parametrize("bad", [0, -1])
    def test_sizes_must_be_positive(self, bad: int) -> None:
        with pytest.raises(InputError, match="must be positive"):
            load_engine("sglang").captured_batches(bad, True, 80, 1)

    @given(
        st.sampled_from(ENGINES),
        st.integers(1, 600) | st.none(),
        st.booleans(),
        st.floats(8, 300),
        st.integers(1, 16),
        st.integers(1, 9),
    )
    def test_ascending_and_unique(
        self, name: str, largest: int | None, speculative: bool, memory: float, tp: int, rows: int
    ) -> None:
        captured = load_engine(name).captured_batches(largest, speculative, memory, tp, rows=rows)
        assert list(captured) == sorted(set(captured))
        assert all(size >= 1 for size in captured)


class TestPaddedBatch:
    def test_pads_to_the_next_captured_size_and_leaves_larger_ones(self) -> None:
        padded = load_engine("sglang").padded_batch(np.array([[1, 3], [9, 300]]), (1, 2, 4, 8, 16))
        np.testing.assert_array_equal(padded, [[1, 4], [16, 300]])

    def test_without_graphs_nothing_is_padded(self) -> None:
        assert load_engine("sglang").padded_batch(7, ()) == 7

    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.lists(st.integers(1, 600), max_size=20))
    def test_never_smaller_never_beyond_the_next_size(self, batch: list[int], captured: list[int]) -> None:
        engine = load_engine("sglang")
        padded = engine.padded_batch(batch, captured)
        assert (padded >= np.array(batch)).all()
        np.testing.assert_array_equal(padded, engine.padded_batch(padded, captured))
        assert all(p == b or p in captured for p, b in zip(padded, batch, strict=True))


class TestGraphPhases:
    """eagle_worker_v2.py: which attention backends capture the draft extend, by release."""

    @pytest.mark.parametrize(
        ("backend", "since"),
        [
            ("triton", "0.5.11"),
            ("trtllm_mla", "0.5.11"),
            ("trtllm_mha", "0.5.13"),
            ("flashinfer", "0.5.14"),
            ("dsa", "0.5.15"),
            ("flashmla", "0.5.16"),
            ("fa3", "0.5.23"),
        ],
    )
    def test_draft_extend_enters_graphs_backend_by_backend(self, backend: str, since: str) -> None:
        for version in SGLANG_RELEASES:
            phases = load_engine("sglang", version).graph_phases("eagle3", attention_backend=backend)
            assert phases["extend"] is (SGLANG_RELEASES.index(version) >= SGLANG_RELEASES.index(since)), version
            assert phases["verify"]
            assert phases["draft"]

    def test_backend_defaults_by_gpu(self) -> None:
        """Hopper: FlashAttention 3; RTX PRO 6000 (12.0): flashinfer for grouped, triton for latent attention."""
        engine = load_engine("sglang")
        assert not engine.graph_phases("eagle3", compute_capability="9.0")["extend"]
        assert engine.graph_phases("eagle3", compute_capability="12.0")["extend"]
        assert engine.default_attention_backend("mla", "12.0") == "triton"
        assert engine.default_attention_backend("mla", "9.0") == "fa3"
        assert engine.default_attention_backend("gqa", "10.0") == "trtllm_mha"
        assert engine.default_attention_backend("gqa", "10.0", topk=4) == "flashinfer"

    @given(st.sampled_from(ENGINES), st.sampled_from(METHODS), st.sets(st.sampled_from(PHASES)), st.booleans())
    def test_switches_only_take_graphs_away(self, name: str, method: str, eager: set[str], off: bool) -> None:
        engine = load_engine(name)
        before = engine.graph_phases(method)
        after = engine.graph_phases(method, eager=frozenset(eager), disable_cuda_graph=off)
        assert set(after) == set(PHASES)
        for phase in PHASES:
            assert after[phase] == (before[phase] and phase not in eager and not off)

    @pytest.mark.parametrize(
        ("options", "latent", "release", "largest"),
        [
            ({}, False, "0.5.16", 8192),
            ({}, False, "0.5.11", 8192),
            ({}, True, "0.5.14", 2048),
            ({}, True, "0.5.16", 0),  # MLA's prefill takes another path in a cut graph
            ({"prefill_graphs": True}, True, "0.5.16", 2048),
            ({"prefill_graph_tokens": 256}, True, "0.5.16", 0),
            ({"prefill_graph_tokens": 256}, False, "0.5.16", 256),
            ({"prefill_graph_sizes": [64, 16]}, False, "0.5.16", 64),
            ({"prefill_graphs": False}, False, "0.5.16", 0),
            ({"disable_cuda_graph": True}, False, "0.5.16", 0),
            ({"dp_attention": 4}, False, "0.5.16", 0),
            ({"moe_a2a_backend": "deepep"}, False, "0.5.16", 0),
            ({}, True, "0.5.23", 2048),
        ],
    )
    def test_prefills_run_in_cut_graphs_of_up_to_a_chunk(
        self, options: dict[str, Any], latent: bool, release: str, largest: int
    ) -> None:
        """`_apply_cuda_graph_compatibility` and `_handle_gpu_memory_settings` of the public source, server_args.py."""
        sizes = load_engine("sglang", release).prefill_graphs(options, latent=latent, chunk=8192)
        assert max(sizes, default=0) == largest
        assert list(sizes) == sorted(sizes)

    @pytest.mark.parametrize("size", [10**10, -5, "x", 2.5])
    def test_numbers_of_prompt_tokens_that_no_graph_has(self, size: Any) -> None:
        for options in ({"prefill_graph_tokens": size}, {"prefill_graph_sizes": [4, size]}):
            with pytest.raises(InputError, match="give whole numbers from 1 to 131,072"):
                load_engine("sglang").prefill_graphs(options, latent=False, chunk=8192)
        assert max(load_engine("sglang").prefill_graphs({}, latent=False, chunk=10**10)) == 131_072

    def test_a_prompt_is_padded_to_the_next_graph_but_not_to_twice_its_length(self) -> None:
        """Captured: 4, 8 to 32, 48 to 256 by 16, to 512 by 32, to 1,024 by 64, to 4,096 by 256. One token would run four. On
        average of the lengths between 1,024 and 1,280 half of 255 is added."""
        engine = load_engine("sglang")
        sizes = engine.prefill_graphs({}, latent=False, chunk=4096)
        tokens = np.asarray([1.0, 2.0, 33.0, 1024.0, 1025.0, 4096.0, 4097.0])
        assert engine.padded_prefill(tokens, sizes).tolist() == [0, 4, 48, 1024, 1280, 4096, 0]
        found = engine.padded_prefill(tokens, sizes, on_average=True)
        assert found[4] == 1025 + 127.5
        assert found[5] == 4096
        assert (found > 0).tolist() == [False, True, True, True, True, True, False]
        assert engine.padded_prefill(tokens, ()).tolist() == [0] * 7
        assert load_engine("vllm").prefill_graphs({}, latent=False, chunk=4096) == ()

    def test_ngram_drafts_on_the_host_and_verifies_in_a_graph(self) -> None:
        expected = {"decode": True, "draft": False, "verify": True, "extend": False}
        assert load_engine("sglang").graph_phases("ngram") == expected

    def test_vllm_latent_attention_backend_by_gpu(self) -> None:
        vllm = load_engine("vllm")
        assert vllm.default_attention_backend("mla", "12.0") == "triton_mla"
        assert vllm.default_attention_backend("mla", "9.0") == "flash_attn_mla"

    def test_unknown_names(self) -> None:
        with pytest.raises(InputError, match="did you mean 'eagle"):
            load_engine("sglang").graph_phases("eagel")
        with pytest.raises(InputError, match="did you mean 'verify'"):
            load_engine("sglang").graph_phases("eagle3", eager={"verfy"})


class TestAllReduce:
    """custom_all_reduce.py, custom_all_reduce_v2.py, pcie_ipc_ar.py (SGLang); cuda_communicator.py (vLLM)."""

    @staticmethod
    def choice(name: str, version: str | None, size: int, **how: object) -> str:
        limits = load_engine(name, version).allreduce_limits(**{"ranks": 8, "link": "nvlink", "graph": True, **how})  # type: ignore[arg-type]
        return next(name for name, limit in limits if size <= limit)

    def test_more_than_two_pcie_gpus_always_use_nccl(self) -> None:
        for name in ENGINES:
            for ranks in (3, 4, 6, 8, 16):
                assert self.choice(name, None, 14336, link="pcie", ranks=ranks) == "nccl"

    def test_two_pcie_gpus_use_the_custom_kernel_if_they_reach_each_other(self) -> None:
        for name in ENGINES:
            assert self.choice(name, None, 14336, link="pcie", ranks=2) == "custom-v1"
            assert self.choice(name, None, 14336, link="pcie", ranks=2, options={"p2p": False}) == "nccl"

    def test_sglang_one_shot_then_two_shot_then_nccl(self) -> None:
        """Eight H200: one-shot up to 128 KiB, two-shot up to the workspace of 16 MiB."""
        hopper = {"compute_capability": "9.0"}
        assert self.choice("sglang", "0.5.16", 128 * 1024, options=hopper) == "oneshot"
        assert self.choice("sglang", "0.5.16", 128 * 1024 + 1, options=hopper) == "custom"
        assert self.choice("sglang", "0.5.16", 16 * 2**20 + 1, options=hopper) == "nccl"
        assert self.choice("sglang", "0.5.16", 160 * 1024, graph=False, ranks=6, options=hopper) == "oneshot"

    def test_the_older_release_has_one_custom_kernel_up_to_8_mib(self) -> None:
        assert self.choice("sglang", "0.5.11", 8 * 2**20) == "custom-v1"
        assert self.choice("sglang", "0.5.11", 8 * 2**20 + 1) == "nccl"
        assert self.choice("sglang", "0.5.11", 1024, ranks=5) == "nccl"
        assert self.choice("sglang", "0.5.16", 1024, ranks=5) == "oneshot"
        old = {"env": {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}}
        assert self.choice("sglang", "0.5.16", 1024, ranks=5, options=old) == "nccl"

    def test_where_the_older_kernel_was_not_measured_the_newer_stands_in(self) -> None:
        """vLLM over two H200 takes the older kernel's curve where a profile has it, and the other's where it has not."""
        limits = load_engine("vllm", None).allreduce_limits(ranks=2, link="nvlink", graph=True)
        assert [name for name, _ in limits][:2] == ["custom-v1", "custom"]
        machine = machine_of(build(model="Llama-3.1-8B", hardware="2x-h200", tp=2, method="none"))
        assert machine.curve(tuple(name for name, _ in limits), 2, "graph").implementation.startswith("custom")

    def test_pcie_kernels_are_a_choice_of_late_releases(self) -> None:
        asked = {"env": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "row_bytes": 14336}
        assert self.choice("sglang", "0.5.20", 14336, link="pcie", options=asked) == "nccl"
        assert self.choice("sglang", "0.5.21", 14336, link="pcie", options=asked) == "pcie-ipc"
        assert self.choice("sglang", "0.5.21", 14336, link="pcie", graph=False, options=asked) == "nccl"
        assert self.choice("sglang", "0.5.21", 14336, link="pcie") == "nccl"

    def test_flags_and_environment(self) -> None:
        off = {"disable_custom_all_reduce": True}
        assert self.choice("sglang", None, 1024, options=off) == "nccl"
        assert self.choice("vllm", None, 1024, options=off) == "nccl"
        assert self.choice("sglang", None, 1024, options={"nodes": 2}) == "nccl"
        assert self.choice("sglang", None, 1024, link="pcie", options={"env": {"NCCL_PROTO": "LL"}}) == "nccl-ll"
        fused = {"flashinfer_allreduce_fusion": True, "compute_capability": "9.0", "row_bytes": 1024}
        assert self.choice("sglang", None, 1024 * 2048, options=fused) == "flashinfer"
        assert self.choice("sglang", None, 1024 * 2049, options=fused) != "flashinfer"
        assert self.choice("sglang", None, 1024, options={**fused, "compute_capability": "12.0"}) != "flashinfer"

    def test_fused_allreduce_is_on_by_itself_for_some_architectures(self) -> None:
        auto = {"architecture": "DeepseekV3ForCausalLM", "compute_capability": "9.0"}
        assert self.choice("sglang", None, 14336, options=auto) == "flashinfer"
        assert self.choice("sglang", None, 14336, options={**auto, "flashinfer_allreduce_fusion": False}) == "oneshot"
        assert self.choice("sglang", None, 14336, link="pcie", options=auto) == "nccl"
        assert self.choice("sglang", None, 14336, options={**auto, "architecture": "LlamaForCausalLM"}) == "oneshot"
        assert self.choice("sglang", None, 14336, options={**auto, "dp_attention": True}) == "oneshot"
        assert self.choice("sglang", None, 14336, options={**auto, "moe_a2a_backend": "deepep"}) == "oneshot"
        assert self.choice("sglang", None, 14336, options={**auto, "nodes": 2}) == "nccl"
        two = {**auto, "nodes": 2, "compute_capability": "10.0"}
        assert self.choice("sglang", None, 14336, options=two) == "flashinfer"
        assert self.choice("vllm", None, 14336, options=auto) == "custom-v1"

    def test_a_scenario_tells_the_engine_its_architecture(self) -> None:
        """Kimi-K2.5 sums and normalises in FlashInfer's kernel on an NVLink box of Hopper GPUs, Llama does not; nor does
        either on a PCIe box. Where no curve of it is known, that of TensorRT-LLM, whose kernel it is, serves."""
        for model, box, served in (
            ("Kimi-K2.5", "8x-h200", ["flashinfer", "trtllm", "oneshot", "custom", "nccl"]),
            ("Llama-3.3-70B", "8x-h200", ["oneshot", "custom", "nccl"]),
            ("Kimi-K2.5", "8x-rtx-pro-6000", ["nccl"]),
        ):
            s = build(model=model, hardware=box, method="none")
            n = s.network
            limits = s.engine.allreduce_limits(ranks=8, link=n.link, graph=True, options=n.options)
            assert [name for name, _ in limits] == served
            if served[0] == "flashinfer":
                assert limits[0][1] == 2048 * 7168 * 2
                assert machine_of(s).curve(tuple(served), 8, "graph").implementation == "trtllm"

    def test_vllm_limits(self) -> None:
        """vLLM on eight H100: custom below 256 KiB, symmetric memory below 64 MiB; elsewhere custom below 8 MiB."""
        hopper = {"compute_capability": "9.0"}
        assert self.choice("vllm", None, 256 * 1024 - 1, options=hopper) == "custom-v1"
        assert self.choice("vllm", None, 256 * 1024, options=hopper) == "symm-mem"
        assert self.choice("vllm", None, 64 * 2**20, options=hopper) == "nccl"
        assert self.choice("vllm", None, 8 * 2**20 - 1, options={"compute_capability": "8.0"}) == "custom-v1"
        plain = {**hopper, "env": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}}
        assert self.choice("vllm", None, 8 * 2**20, options=plain) == "nccl"

    @given(
        st.sampled_from(RELEASES),
        st.integers(1, 17),
        st.sampled_from(["none", "pcie", "nvlink"]),
        st.booleans(),
        st.fixed_dictionaries(
            {},
            optional={
                "compute_capability": st.sampled_from(["8.0", "9.0", "10.0", "10.3", "12.0"]),
                "disable_custom_all_reduce": st.booleans(),
                "flashinfer_allreduce_fusion": st.booleans(),
                "row_bytes": st.integers(0, 32768),
                "p2p": st.booleans(),
                "env": st.just({"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "true", "NCCL_PROTO": "Simple"}),
            },
        ),
    )
    def test_every_message_is_served_and_nccl_is_always_last(
        self, release: tuple[str, str], ranks: int, link: str, graph: bool, options: dict[str, object]
    ) -> None:
        limits = load_engine(*release).allreduce_limits(ranks=ranks, link=link, graph=graph, options=options)
        assert limits[-1] == ("nccl", NO_LIMIT)
        assert all(limit > 0 for _, limit in limits)
        assert len({name for name, _ in limits}) == len(limits)


@pytest.mark.parametrize("name", ENGINES)
def test_flag_lists(name: str) -> None:
    flags = read_flags(name)
    assert all(flag.startswith("-") and "_" not in flag for flag in flags)
    assert set(flags.values()) <= {"switch", "value", "list", "optional"}


class TestProductsOfFp8:
    """SGLang on a Hopper multiplies fp8 weights in blocks by DeepGEMM unless told otherwise, and quantises the inputs first."""

    def kernels(self, **options: object) -> str:
        return scenario("DeepSeek-V3", hardware="8x-h200", **options).block_products

    def test_the_kernel_follows_gpu_flag_and_variable(self) -> None:
        assert self.kernels() == "deepgemm"
        assert self.kernels(env={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}) == "triton"
        assert self.kernels(fp8_gemm_backend="triton") == "triton"
        line = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8"
        for text in (f"SGLANG_ENABLE_JIT_DEEPGEMM=0 {line}", f"{line} --fp8-gemm-backend triton"):
            assert scenario(sglang_args=text, hardware="8x-h200").block_products == "triton"
        assert self.kernels(engine="vllm") == ""
        assert load_engine("sglang").block_products({}, "12.0") == "triton"

    def test_a_choice_that_the_profile_cannot_tell_is_said(self) -> None:
        """Eight H200 by public tables, without Triton's products: a note; none for the default, and none where they are known."""
        for flag, said in (("triton", 1), ("cutlass", 1), ("flashinfer_cutlass", 1), ("auto", 0), ("deep_gemm", 0)):
            p = predict(scenario("DeepSeek-V3", hardware="8x-h200", fp8_gemm_backend=flag))
            assert sum("this choice of kernel changes nothing" in w for w in p.warnings) == said, flag
        here = predict(scenario("DeepSeek-V3", hardware="1x-h200", tp=1, fp8_gemm_backend="triton"))
        assert not any("changes nothing" in w for w in here.warnings)

    def test_experts_follow_flag_format_and_exchange(self) -> None:
        """SGLang runs experts by Triton (INT4 by Marlin) unless told otherwise; fp8 ones by DeepGEMM where rows are exchanged,
        which a variable prevents (`create_moe_runner`, layers/quantization/fp8.py)."""
        kernels = load_engine("sglang").expert_kernels
        assert kernels({}, "9.0", "fp8") == kernels({"moe_runner_backend": "triton"}, "9.0", "fp8") == ""
        assert kernels({"moe_runner_backend": "deep_gemm"}, "9.0", "fp8") == "deepgemm"
        assert kernels({"moe_runner_backend": "triton"}, "9.0", "int4") == "triton"
        for exchange, variable, gpu, format, found in (
            ("deepep", "1", "9.0", "fp8", "deepgemm"),
            ("mori", "1", "9.0", "fp8", ""),
            ("deepep", "0", "9.0", "fp8", ""),
            ("deepep", "1", "12.0", "fp8", ""),
            ("deepep", "1", "9.0", "bf16", ""),
        ):
            options = {"moe_a2a_backend": exchange, "env": {"SGLANG_ENABLE_JIT_DEEPGEMM": variable}}
            assert kernels(options, gpu, format) == found
        assert load_engine("vllm").expert_kernels({"moe_runner_backend": "deep_gemm"}, "9.0", "fp8") == ""

    def test_experts_by_deepgemm_are_its_products_and_what_runs_around_them(self) -> None:
        """One H200 measured both. Qwen3-30B-A3B has 48 layers with 128 experts of 2048 x 768: DeepGEMM's two products a layer,
        and around them 5 small kernels and 2 that lay out scales, 128 blocks of 256 rows with a scale for 128 values, each
        4 bytes read and written: 2 x 4 x 128 x 256 x (2048 + 768) / 128 = 5,767,168 bytes."""
        line = "--model Qwen3-30B-A3B-FP8 --moe-runner-backend"
        s, usual = (
            scenario(sglang_args=f"{line} {k}", hardware="1x-h200", method="none") for k in ("deep_gemm", "auto")
        )
        by_class = [
            {
                o.rate: o
                for o in build_pass(s.model, s.parallel, s.engine, True, in_blocks=s.in_blocks).operators
                if o.when == ONE
            }
            for s in (s, usual)
        ]
        experts = by_class[0]["moe_fp8_deepgemm"]
        assert (experts.calls, experts.kernels) == (48, 96)
        assert "moe_fp8" not in by_class[0]
        assert by_class[1]["moe_fp8"].calls == 48
        assert by_class[0]["tiny"].calls - by_class[1]["tiny"].calls == 48 * 7
        assert by_class[0]["tiny"].bytes[ONE] == 48 * 5_767_168
        assert predict(s).decode_ms.value > predict(usual).decode_ms.value
        assert "moe_fp8_deepgemm" in repr(sources_of(s))

    @pytest.mark.parametrize(
        ("model", "hardware", "backend", "said"),
        [
            ("Qwen3-30B-A3B-FP8", "1x-h200", "deep_gemm", ""),  # measured
            ("Qwen3-30B-A3B-FP8", "1x-h200", "triton", ""),  # what moe_fp8 is of
            ("Qwen3-30B-A3B-FP8", "1x-h200", "cutlass", "moe_fp8_cutlass: it is priced as moe_fp8"),
            ("Qwen3-30B-A3B-FP8", "8x-h100", "deep_gemm", "moe_fp8_deepgemm: it is priced as moe_fp8"),
            ("Qwen3-30B-A3B", "1x-h200", "deep_gemm", "moe_bf16_deepgemm: it is priced as moe_bf16"),
            ("Llama-3.1-8B", "1x-h200", "deep_gemm", ""),  # no experts
        ],
    )
    def test_a_choice_of_experts_kernel_that_changes_nothing_is_said(
        self, model: str, hardware: str, backend: str, said: str
    ) -> None:
        p = predict(scenario(model, hardware=hardware, tp=1, method="none", moe_runner_backend=backend))
        found = [w for w in p.warnings if "changes nothing" in w]
        assert len(found) == bool(said)
        assert said in " ".join(found)

    def test_a_profile_without_the_kernel_prices_the_class(self) -> None:
        s = build(model="DeepSeek-V3", hardware="8x-h100")
        machine = machine_of(s)
        assert "gemm_fp8_deepgemm" not in machine.rates
        assert machine.rate("gemm_fp8_deepgemm") is machine.rates["gemm_fp8"]

    def test_each_fp8_projection_quantises_its_inputs(self) -> None:
        """One kernel more for each of a layer's projections than the same model in bf16 has, whose head stays bf16."""
        fp8 = load_model("DeepSeek-V3")
        layer, n = next((layer, n) for layer, n in fp8.layers if layer.experts is None)
        eight = [p for p in (*layer.mixer, *layer.ffn) if p.format.name == "fp8"]
        plain = replace(layer, **{
            part: tuple(replace(p, format=BF16) for p in getattr(layer, part)) for part in ("mixer", "ffn")
        })  # fmt: skip
        engine = load_engine("sglang")
        one, other = (
            build_pass(replace(fp8, layers=((some, n),)), Parallel(), engine, graph=True).kernels(ONE_ROW)
            for some in (layer, plain)
        )
        assert eight
        assert one - other == n * sum(p.count for p in eight)


def test_queries_are_copied_out_of_the_joint_product_where_there_are_several_rows() -> None:
    """One small kernel a layer more with two rows than with one, of 4,096 values read and written a row (32 heads of 128), on
    half the ranks half as wide; none with latent attention. Two groups of ranks share two rows, one each: none."""
    engine = load_engine("sglang")
    two = Load(np.asarray(2.0), np.asarray(1.0), np.asarray(100.0))
    for name, tp, dp, more in (
        ("Llama-3.1-8B", 1, 1, 32),
        ("Llama-3.1-8B", 2, 1, 32),
        ("Llama-3.1-8B", 2, 2, 0),
        ("DeepSeek-V3", 8, 1, 0),
    ):
        p = build_pass(load_model(name), Parallel(tp, dp=dp), engine, graph=True)
        assert float(p.kernels(two)) - float(p.kernels(ONE_ROW)) == more
        copies = [o for o in p.operators if o.when != ONE]
        assert [o.bytes[ROWS] for o in copies] == ([32 * 2 * 4096 * 2 / tp] if name.startswith("Llama") else [])


def test_heads_are_normed_in_one_kernel() -> None:
    """Qwen3-8B has Llama-3.1-8B's two norms a layer and one small kernel more, not two norms more."""
    engine = load_engine("sglang")
    counts = {}
    for name in ("Qwen3-8B", "Llama-3.1-8B"):
        model = load_model(name)
        p = build_pass(replace(model, layers=((model.layers[0][0], 1),)), Parallel(), engine, graph=True)
        small = [o for o in p.operators if o.component == "small_kernels"]
        counts[name] = {rate: sum(o.calls for o in small if o.rate == rate) for rate in ("norm", "tiny")}
    assert counts["Qwen3-8B"]["norm"] == counts["Llama-3.1-8B"]["norm"]
    assert counts["Qwen3-8B"]["tiny"] == counts["Llama-3.1-8B"]["tiny"] + 1


def test_the_router_of_latent_attention_splits_its_inner_width() -> None:
    """Kimi-K2.5's router (7168 x 384) and joint down-projection (7168 x 2112) up to 16 rows; Qwen3's router walks always."""
    features = {
        name: {f for o in build_pass(load_model(name), Parallel(), load_engine("sglang"), graph=True).operators for f in o.inner if o.component != "attention"}
        for name in ("Kimi-K2.5", "Qwen3-30B-A3B")
    }  # fmt: skip
    assert features == {"Kimi-K2.5": {ONE, RowsAbove(16)}, "Qwen3-30B-A3B": {ONE}}
