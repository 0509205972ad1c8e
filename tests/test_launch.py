"""Reading launch lines: what the engines' parsers and their resolution of arguments do (docs/engines.md)."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim.asked import scenario
from specsim.engines import METHODS, read_flags
from specsim.errors import InputError
from specsim.launch import read_launch
from specsim.names import ENGINES

EAGLE3 = (
    "--model-path target --tp 8 --speculative-algorithm EAGLE3 --speculative-draft-model-path draft "
    "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
)


def sglang(line: str | list[str], **how: Any) -> dict[str, Any]:
    return read_launch("sglang", line, **how).options


def vllm(line: str | list[str], **how: Any) -> dict[str, Any]:
    return read_launch("vllm", line, **how).options


def notes(engine: str, line: str, **how: Any) -> str:
    return "\n".join(read_launch(engine, line, **how).notes)


class TestForms:
    """One command in the forms in which people paste it."""

    expected = (sglang(EAGLE3)["method"], 8, "target", "draft", 3)

    @pytest.mark.parametrize(
        "line",
        [
            EAGLE3,
            f"python3 -m sglang.launch_server {EAGLE3}",
            f"python -m sglang.launch_server {EAGLE3} --port 30000 2>&1 | tee server.log",
            f"sglang serve {EAGLE3} > log.txt",
            f"serve {EAGLE3}",
            f"/opt/venv/bin/sglang serve {EAGLE3} &",
            f"$ NCCL_P2P_DISABLE=1 SGLANG_X=y python3 -m sglang.launch_server {EAGLE3}",
            f"export NCCL_DEBUG=INFO\npython3 -m sglang.launch_server {EAGLE3}",
            f"#!/bin/bash\n# don't stop it\nsource venv/bin/activate\npython3 -m sglang.launch_server {EAGLE3}\n",
            f"cd /models && nohup python3 -m sglang.launch_server {EAGLE3}",
            f"docker run --gpus all -e NCCL_DEBUG=INFO --env=A=b lmsysorg/sglang:latest python3 -m sglang.launch_server {EAGLE3}",
            f'docker run lmsysorg/sglang:latest bash -c "python3 -m sglang.launch_server {EAGLE3}"',
            "python3 -m sglang.launch_server \\\n  " + EAGLE3.replace(" --", " \\\n  --"),
            "python3 -m sglang.launch_server \\\r\n  " + EAGLE3.replace(" --", " \\ \r\n  --"),
            "python3 -m sglang.launch_server\n  " + EAGLE3.replace(" --", "\n  --"),
            EAGLE3.replace("--tp 8", "--tp=8").replace("--model-path target", "--model-path=target"),
            EAGLE3.replace("--tp 8", "--tp-size 8").replace("--model-path", "--model"),
            EAGLE3.replace("--tp 8", "--tensor-parallel-size 8"),
            EAGLE3.replace("--tp 8", "\u2014tp 8"),
            EAGLE3.replace("--tp 8", "--tp 2 --tp 8"),
            EAGLE3.replace("--model-path target", "target"),
            EAGLE3.replace("--speculative-algorithm", "--speculative-algo"),
            EAGLE3.replace("-num-steps", "_num_steps"),
            EAGLE3.replace("EAGLE3", "eagle3"),
            EAGLE3 + " \\ ",
            json.dumps(["python3", "-m", "sglang.launch_server", *EAGLE3.split()]),
            f"CMD {json.dumps(['python3', '-m', 'sglang.launch_server', *EAGLE3.split()])}",
            f'ENTRYPOINT ["python3", "-m", "sglang.launch_server"]\nCMD {json.dumps(EAGLE3.split())}',
            "".join(f"- {word}\n" for word in EAGLE3.split()),
            "\n          ".join(f'- "{word}"' for word in EAGLE3.split()),
            f'command: ["python3", "-m", "sglang.launch_server"]\nargs: {json.dumps(EAGLE3.split())}',
            f"command: [bash, -c]\nargs:\n- |\n  echo up\n  python3 -m sglang.launch_server {EAGLE3}\n",
            "command: >\n  " + EAGLE3.replace(" --", "\n  --"),
            f'ALGORITHM="EAGLE3"; sglang serve {EAGLE3.replace("EAGLE3", "$ALGORITHM")}',
            f"export RANKS=8\nMODEL=target\nsglang serve {EAGLE3.replace('8', '${RANKS}').replace('path target', 'path $MODEL')}",
            f"sglang serve {EAGLE3.replace('--tp 8', '--tp ${RANKS:-8}')}",
            f'ARGS=(\n  {EAGLE3.replace("--tp 8", "")}\n)\nARGS+=(--tp 8)\nexec sglang serve "${{ARGS[@]}}"',
        ],
    )
    def test_are_the_same(self, line: str) -> None:
        launch = read_launch("sglang", line)
        o = launch.options
        assert (o["method"], o["tp"], o["model"], o["draft"], o["draft_tokens"]) == self.expected
        assert launch.unknown == ()

    def test_a_manifest_tells_image_and_environment_too(self) -> None:
        """Of a pod's containers that which starts the engine, by its command or its image; no secret of its environment."""
        args = "".join(f"    - {word}\n" for word in EAGLE3.split())
        env = "    env:\n    - {name: NCCL_DEBUG, value: INFO}\n    - {name: VLLM_API_KEY, value: sesame}\n"
        side = "  - {name: proxy, image: nginx:1.27, args: [-g, daemon off;]}\n"
        pod = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n"
        command = "    command: [python3, -m, sglang.launch_server]\n"
        found = read_launch("sglang", f"{pod}{side}  - image: lmsysorg/sglang:v0.5.16\n{command}{env}    args:\n{args}")
        assert (found.options["model"], found.options["tp"], found.options["version"]) == ("target", 8, "0.5.16")
        assert found.options["env"] == {"NCCL_DEBUG": "INFO"}
        by_name = f"{pod}  - env: [{{name: RANKS, value: '4'}}]\n{command}    args: [--model-path, $(MODEL), --tp, $(RANKS)]\n"
        assert (sglang(by_name)["tp"], sglang(by_name)["model"]) == (4, "$(MODEL)")
        vllm_pod = f"{pod}{side}  - image: vllm/vllm-openai:latest\n    args: [--model, target, -tp, '4']\n"
        assert (vllm(vllm_pod)["model"], vllm(vllm_pod)["tp"]) == ("target", 4)

    @pytest.mark.parametrize(
        "text", ["[" * 9000, "- " * 9000 + "x", "a: &a [*a]\ncommand: [x]", "[1, {", "args: []", "%x: ["]
    )
    def test_what_only_looks_like_a_list_is_read_as_a_line(self, text: str) -> None:
        assert isinstance(read_launch("sglang", text).options, dict)

    @pytest.mark.parametrize("text", [f"A={'x' * 40000}\n" + "$A " * 9000, f"A=({'x ' * 20000})\n" + "${A[@]} " * 5000])
    def test_variables_do_not_make_a_line_endless(self, text: str) -> None:
        with pytest.raises(InputError, match="longer than"):
            read_launch("sglang", text)

    def test_a_variable_that_the_text_does_not_set_stays(self) -> None:
        assert sglang("sglang serve --model-path $MODEL --tp 8")["model"] == "$MODEL"

    def test_a_value_before_a_redirection_is_a_value(self) -> None:
        line = "nohup python3 -m sglang.launch_server --model-path target --tp 2 > server.log 2>&1 &"
        assert sglang(line) == sglang("--model-path target --tp 2")

    def test_a_list_of_arguments_is_not_split_again(self) -> None:
        assert sglang(["--model-path", "my model", "--tp", "2"])["model"] == "my model"

    def test_empty(self) -> None:
        assert sglang("") == {"method": "none"}
        assert vllm([]) == {"method": "none"}

    def test_environment_keeps_what_matters_and_no_secret(self) -> None:
        line = "HF_TOKEN=secret VLLM_API_KEY=secret SGLANG_ADMIN_API_KEY=s NCCL_PROTO=LL python3 -m sglang.launch_server --model-path m"
        assert sglang(line)["env"] == {"NCCL_PROTO": "LL"}

    def test_release_from_the_image(self) -> None:
        launch = read_launch("vllm", "docker run vllm/vllm-openai:v0.20.2 --model m -tp 4")
        assert launch.options == {"model": "m", "tp": 4, "method": "none", "version": "0.20.2"}
        nested = "docker run lmsysorg/sglang:v0.5.13-cu130 bash -c 'sglang serve m --speculative-algorithm NGRAM'"
        assert sglang(nested)["disable_overlap"]
        old = read_launch("vllm", "docker run vllm/vllm-openai:v0.6.0 --model m")
        assert "version" not in old.options
        assert old.notes == ("vllm 0.6.0 is not described; read as 0.20.0",)

    def test_unknown_flags_are_listed_with_their_values_left_out(self) -> None:
        launch = read_launch("sglang", "--no-such-flag 1 2 --tp 4 --other=5 --another")
        assert launch.unknown == ("--no-such-flag", "--other", "--another")
        assert launch.options["tp"] == 4
        assert "model" not in launch.options

    @pytest.mark.parametrize(
        ("engine", "flag", "meant"),
        [
            ("sglang", "--speculative-num-stpes 3", "--speculative-num-steps"),
            ("sglang", "--tensor-paralel-size 4", "--tensor-parallel-size"),  # an alias
            ("sglang", "--disable_cuda_grahp", "--disable-cuda-graph"),
            ("vllm", "--max-num-batchd-tokens=64", "--max-num-batched-tokens"),
            ("sglang", "--log-levle info", None),  # no cost depends on it
            ("sglang", "--speculative-num-steps-per-batch 3", None),  # may be one of a later release
            ("sglang", "--frobnicate", None),
        ],
    )
    def test_a_misspelt_flag_that_costs_depend_on_is_refused(self, engine: str, flag: str, meant: str | None) -> None:
        launch = read_launch(engine, f"--model m {flag}")
        assert launch.unknown == (flag.replace("=", " ").split()[0],)
        if meant is None:
            launch.refuse_slips("--sglang-args")
            return
        with pytest.raises(InputError, match=f"did you mean {meant}?"):
            launch.refuse_slips("--sglang-args")
        with pytest.raises(InputError, match="is no flag of"):
            scenario(**{f"{engine}_args": f"Qwen3-8B {flag}" if engine == "vllm" else f"--model Qwen3-8B {flag}"})

    def test_flags_of_vllm_that_take_several_names(self) -> None:
        """`str | list[str]` of its configs takes one or more (`get_kwargs`, engine/arg_utils.py)."""
        launch = read_launch("vllm", "serve m --served-model-name a b --ignore-patterns x y --max-num-seqs 4")
        assert launch.options["model"] == "m"
        assert launch.notes == ()
        assert ("--served-model-name", "a", "b") in launch.flags

    @pytest.mark.parametrize(
        ("line", "other"),
        [
            ({"sglang_args": "--model-path Qwen3-8B --attention-backend triton"}, "fa3, has it: what triton takes"),
            ({"sglang_args": "--model-path Qwen3-8B --decode-attention-backend flashinfer"}, "what flashinfer takes"),
            ({"vllm_args": "Qwen3-8B --attention-backend TRITON_ATTN"}, "flash_attn, has it: what TRITON_ATTN takes"),
            ({"vllm_args": "Qwen3-8B --attention-config.backend FLASHINFER"}, "what FLASHINFER takes"),
            ({"vllm_args": "VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve Qwen3-8B"}, "what FLASHINFER takes"),
            ({"vllm_args": "Qwen3-8B --attention-backend FLASH_ATTN"}, ""),
            ({"sglang_args": "--model-path Qwen3-8B --attention-backend fa3"}, ""),
            ({"sglang_args": "--model-path Qwen3-8B"}, ""),
        ],
    )
    def test_another_attention_backend_than_the_default_is_said_to_be_unknown(
        self, line: dict[str, str], other: str
    ) -> None:
        said = [w for w in scenario(hardware="1x-h200", **line).warnings if "attention is priced" in w]
        assert len(said) == bool(other)
        assert all(other in w for w in said)

    def test_the_line_of_another_engine_is_told_for_what_it_is(self) -> None:
        """`--model-path` is a flag of SGLang, and nothing like it is one of vLLM."""
        with pytest.raises(
            InputError, match="--model-path is no flag of vLLM; it is one of SGLang: give the line with --sglang-args"
        ):
            scenario(vllm_args="--model-path Qwen/Qwen3-8B")
        with pytest.raises(InputError, match="--tp-size is no flag of vLLM"):
            scenario(vllm_args="Qwen/Qwen3-8B --tp-size 4")

    @pytest.mark.parametrize(
        ("flag", "own"),
        [("--max-num-seqs 7", "--max-running-requests"), ("--gpu-memory-utilization .8", "--mem-fraction-static"),
         ("--max-num-batched-tokens 100", None), ("--enforce-eager", None)],
    )  # fmt: skip
    def test_a_flag_of_another_engine_is_refused_where_its_costs_depend_on_it(self, flag: str, own: str | None) -> None:
        with pytest.raises(InputError, match="is no flag of SGLang; it is one of vLLM") as error:
            scenario(sglang_args=f"--model Qwen3-8B {flag}")
        assert (f", or its name here, {own}" in str(error.value)) == (own is not None)
        read_launch("sglang", "--kv-transfer-config x --model m").refuse_slips(
            "--sglang-args"
        )  # vLLM's; no cost depends on it

    @pytest.mark.parametrize(
        ("engine", "flag"), [("sglang", "--disable-prefill-cuda-graph=yes"), ("vllm", "--enforce-eager=true")]
    )
    def test_a_switch_takes_no_value(self, engine: str, flag: str) -> None:
        with pytest.raises(InputError, match=rf"{flag.split('=')[0]}: takes no value; leave ="):
            read_launch(engine, f"--model m {flag}")

    def test_ambiguous_abbreviations(self) -> None:
        launch = read_launch("sglang", "--speculative-num 3")
        assert launch.unknown == ("--speculative-num",)
        assert "ambiguous" in launch.notes[0]

    def test_config_file_is_mentioned(self) -> None:
        assert "serve.yaml" in notes("sglang", "--config serve.yaml --tp 2")
        assert "serve.yaml" in notes("vllm", "vllm serve --config serve.yaml")

    @pytest.mark.parametrize(
        ("engine", "line", "match"),
        [
            ("sglang", "--tp zero", r"^--tp-size: 'zero' is not a whole number"),
            ("sglang", "--tp 0", r"^--tp-size: 0 is out of range"),
            ("sglang", "--tp", r"^--tp: expects a value"),
            ("sglang", "--tp --model x", r"^--tp: expects a value"),
            ("sglang", "--tp " + "9" * 6000, r"^--tp-size"),
            ("sglang", "--mem-fraction-static 1.5", r"^--mem-fraction-static: '1.5' is not a fraction"),
            ("sglang", "--mem-fraction-static nan", r"^--mem-fraction-static"),
            ("sglang", "--cuda-graph-bs", r"^--cuda-graph-bs: expects at least one"),
            ("sglang", "--cuda-graph-bs 1 two", r"'two' is not a whole number"),
            ("sglang", "--cuda-graph-config {", r"^--cuda-graph-config: is not JSON"),
            ("sglang", "--speculative-algorithm EAGEL", r"did you mean 'EAGLE"),
            ("sglang", "--tp 4 --dp 3 --enable-dp-attention", r"does not divide"),
            ("sglang", '--model "open', r"balance the quotes"),
            ("sglang", "vllm serve m", r"is a line of vllm"),
            ("sglang", "sglang serve a; sglang serve b", r"several servers"),
            ("sglang", "SGLANG_SIMULATE_ACC_LEN=x sglang serve m", r"^SGLANG_SIMULATE_ACC_LEN"),
            ("vllm", "python -m sglang.launch_server", r"is a line of sglang"),
            ("vllm", "vllm serve m --speculative-config {method:eagle3}", r"^--speculative-config: is not JSON"),
            ("vllm", "vllm serve m --speculative-config '[1]'", r"not a JSON object"),
            ("vllm", """-sc '{"method":"eagle3","model":"d"}'""", r"num_speculative_tokens is missing"),
            ("vllm", """-sc '{"method":"eagle3","num_speculative_tokens":3}'""", r"without a draft model"),
            ("vllm", """-sc '{"method":"mtp","num_speculative_tokens":0}'""", r"out of range"),
            ("vllm", """-sc '{"method":["mtp"],"num_speculative_tokens":1}'""", r"method is not a text"),
            ("vllm", "--gpu-memory-utilization 0", r"^--gpu-memory-utilization"),
        ],
    )
    def test_bad_values_are_one_line_that_names_the_flag(self, engine: str, line: str, match: str) -> None:
        with pytest.raises(InputError, match=match) as caught:
            read_launch(engine, line)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_unknown_engine(self) -> None:
        with pytest.raises(InputError, match="did you mean 'vllm'"):
            read_launch("vlm", "")


class TestSglang:
    """arg_groups/speculative_hook.py and server_args.py of 0.5.16 unless a release is named."""

    def test_a_chain(self) -> None:
        launch = read_launch("sglang", EAGLE3)
        expected = {"method": "eagle3", "num_steps": 2, "topk": 1, "draft_tokens": 3}
        assert expected.items() <= launch.options.items()
        assert "caps running requests at 48" in launch.notes[0]

    def test_the_cap_gives_way_to_a_flag(self) -> None:
        launch = read_launch("sglang", EAGLE3 + " --max-running-requests 128")
        assert launch.options["max_running_requests"] == 128
        assert launch.notes == ()

    @pytest.mark.parametrize("tokens", [1, 2, 4, 64])
    def test_topk_1_makes_draft_tokens_steps_plus_1(self, tokens: int) -> None:
        line = EAGLE3.replace("--speculative-num-draft-tokens 3", f"--speculative-num-draft-tokens {tokens}")
        assert sglang(line)["draft_tokens"] == 3
        assert "steps + 1 = 3" in notes("sglang", line)

    def test_a_draft_length_that_follows_the_batch_is_told(self) -> None:
        """Lines that `specsim plan --policy` prints: what is read is their longest draft, at a batch that may have another."""
        assert "changes with the batch" in notes("sglang", EAGLE3 + " --speculative-adaptive")
        config = '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 1, 0]]}'
        assert "changes with the batch" in notes("vllm", f"vllm serve y --speculative-config '{config}'")
        assert "changes with the batch" not in notes("sglang", EAGLE3)

    def test_a_tree_keeps_its_tokens(self) -> None:
        line = EAGLE3.replace("topk 1", "topk 4").replace("draft-tokens 3", "draft-tokens 8")
        assert (sglang(line)["topk"], sglang(line)["draft_tokens"]) == (4, 8)
        assert sglang(line, version="0.5.12")["disable_overlap"]
        assert "disable_overlap" not in sglang(line, version="0.5.13")

    def test_a_tree_too_small_for_its_tokens(self) -> None:
        """2 steps with topk 2 give 2 + 2 x 2 drafted tokens, 7 with the root."""
        line = EAGLE3.replace("topk 1", "topk 2").replace("draft-tokens 3", "draft-tokens {}")
        assert "at most 7" not in notes("sglang", line.format(7))
        assert "at most 7" in notes("sglang", line.format(8))

    @pytest.mark.parametrize(
        ("model", "architecture", "expected"),
        [
            ("meta-llama/Llama-3.1-8B-Instruct", None, (5, 4, 8)),
            ("any", "LlamaForCausalLM", (5, 4, 8)),
            ("any", "Grok1ForCausalLM", (5, 4, 8)),
            ("moonshotai/Kimi-K2.5", None, (3, 1, 4)),
            ("llama-but-not", "DeepseekV3ForCausalLM", (3, 1, 4)),
        ],
    )
    def test_without_all_three_the_architecture_decides(
        self, model: str, architecture: str | None, expected: tuple[int, int, int]
    ) -> None:
        line = f"--model-path {model} --speculative-algorithm EAGLE3 --speculative-draft-model-path d"
        o = sglang(line, architecture=architecture)
        assert (o["num_steps"], o["topk"], o["draft_tokens"]) == expected
        assert "chooses by architecture" in notes("sglang", line, architecture=architecture)

    def test_only_some_of_the_three(self) -> None:
        only_steps = "--speculative-algorithm EAGLE3 --speculative-num-steps 4"
        assert (sglang(only_steps)["topk"], sglang(only_steps)["draft_tokens"]) == (1, 5)
        assert "topk is missing" in notes("sglang", only_steps)
        no_steps = "--speculative-algorithm EAGLE3 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1"
        assert (sglang(no_steps)["num_steps"], sglang(no_steps)["draft_tokens"]) == (3, 4)
        assert "num-steps is missing" in notes("sglang", no_steps)

    @pytest.mark.parametrize(
        ("flags", "method"),
        [
            ("EAGLE --speculative-draft-model-path d", "eagle"),
            ("EAGLE", "mtp"),
            ("NEXTN", "mtp"),
            ("nextn --speculative-draft-model d", "mtp"),
            ("EAGLE3 --speculative-draft-model-path d", "eagle3"),
            ("STANDALONE --speculative-draft-model-path d", "draft-model"),
            ("NGRAM", "ngram"),
            ("LOOKAHEAD", "ngram"),
            ("FROZEN_KV_MTP", "mtp"),
            ("DFLASH --speculative-draft-model-path d", "dflash"),
        ],
    )
    def test_methods(self, flags: str, method: str) -> None:
        assert sglang(f"--model-path m --speculative-algorithm {flags}")["method"] == method

    @pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
    def test_a_block_is_as_long_as_the_line_or_the_drafter_says(self, algorithm: str) -> None:
        """SGLang's single step of a block drafter is no depth: a scenario takes it from the block."""
        line = f"--speculative-algorithm {algorithm} --speculative-draft-model-path d"
        assert not {"num_steps", "draft_tokens"} & set(sglang(line))
        assert sglang(f"{line} --speculative-num-draft-tokens 8")["draft_tokens"] == 8
        assert sglang(f"{line} --speculative-{algorithm.lower()}-block-size 6")["draft_tokens"] == 6

    def test_no_algorithm_no_speculation(self) -> None:
        line = EAGLE3.replace("--speculative-algorithm EAGLE3", "")
        assert sglang(line)["method"] == "none"
        assert "max_running_requests" not in sglang(line)
        assert "does not speculate" in notes("sglang", line)

    def test_ngram(self) -> None:
        """12 tokens when nothing is said; the tree found on the host is read as its longest chain."""
        o = sglang("--speculative-algorithm NGRAM")
        assert (o["draft_tokens"], o["topk"], o["num_steps"]) == (12, 1, 11)
        assert sglang("--speculative-algorithm NGRAM", version="0.5.13")["disable_overlap"]
        assert "disable_overlap" not in o
        line = "--speculative-algorithm NGRAM --enable-dp-attention --dp 2 --tp 2"
        assert "refuses to start" in notes("sglang", line)

    def test_attention_mode_decides_nothing_about_graphs(self) -> None:
        line = EAGLE3 + " --speculative-attention-mode decode"
        assert sglang(line)["speculative_attention_mode"] == "decode"
        assert "disable_cuda_graph" not in sglang(line)
        assert "does not decide whether they run in CUDA graphs" in notes("sglang", line)
        with pytest.raises(InputError, match="--speculative-attention-mode"):
            sglang(EAGLE3 + " --speculative-attention-mode extend")

    def test_data_parallel_attention(self) -> None:
        assert sglang("--tp 8 --dp 4 --enable-dp-attention")["dp_attention"] == 4
        assert sglang("--tp 8 --enable-dp-attention")["dp_attention"] is False
        assert "dp_attention" not in sglang("--tp 8 --dp 4")
        assert "independent copies" in notes("sglang", "--tp 8 --dp 4")

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            ("--cuda-graph-max-bs 32", {"cuda_graph_max_bs": 32}),
            ("--cuda-graph-max-bs-decode 32", {"cuda_graph_max_bs": 32}),
            ("--cuda-graph-bs 8 1 4", {"cuda_graph_max_bs": 8, "captured_sizes": [1, 4, 8]}),
            ("--cuda-graph-bs 8 1 --cuda-graph-max-bs 99", {"cuda_graph_max_bs": 8, "captured_sizes": [1, 8]}),
            ("--disable-cuda-graph", {"disable_cuda_graph": True, "prefill_graphs": False}),
            ("--cuda-graph-backend-decode disabled", {"disable_cuda_graph": True}),
            ("--disable-cuda-graph --cuda-graph-backend-decode full", {"prefill_graphs": False}),
            ("--cuda-graph-max-bs-prefill 256", {"prefill_graph_tokens": 256}),
            ("--piecewise-cuda-graph-max-tokens 512", {"prefill_graph_tokens": 512}),
            ("--cuda-graph-bs-prefill 64 16", {"prefill_graph_sizes": [16, 64]}),
            ("--disable-prefill-cuda-graph", {"prefill_graphs": False}),
            ("--disable-piecewise-cuda-graph", {"prefill_graphs": False}),
            ("--disable-piecewise-cuda-graph --enforce-piecewise-cuda-graph", {"prefill_graphs": True}),
            ("--cuda-graph-backend-prefill breakable --disable-prefill-cuda-graph", {"prefill_graphs": True}),
            # one option in all of these (DeprecatedStoreConstAction, server_args.py): the last on the line
            ("--enforce-piecewise-cuda-graph --disable-piecewise-cuda-graph", {"prefill_graphs": False}),
            ("--cuda-graph-backend-prefill breakable --disable-piecewise-cuda-graph", {"prefill_graphs": False}),
            (
                "--disable-piecewise-cuda-graph --cuda-graph-backend-prefill breakable --cuda-graph-max-bs-prefill 8",
                {"prefill_graphs": True, "prefill_graph_tokens": 8},
            ),
            (
                "--enforce-piecewise-cuda-graph --disable-piecewise-cuda-graph --enforce-piecewise-cuda-graph",
                {"prefill_graphs": True},
            ),
            (
                "--disable-cuda-graph --enable-breakable-cuda-graph",
                {"disable_cuda_graph": True, "prefill_graphs": True},
            ),
            (
                """--cuda-graph-config '{"prefill":{"max_bs":64,"backend":"disabled"}}' --cuda-graph-max-bs-prefill 8""",
                {"prefill_graphs": False, "prefill_graph_tokens": 64},
            ),
            ("""--cuda-graph-config '{"decode":{"max_bs":16}}' --cuda-graph-max-bs 8""", {"cuda_graph_max_bs": 16}),
            (
                """--cuda-graph-config '{"decode":{"backend":"full"}}' --cuda-graph-backend-decode disabled""",
                {},
            ),
            (
                "--cuda-graph-max-bs 3 --disable-cuda-graph-padding",
                {"cuda_graph_max_bs": 3, "captured_sizes": [1, 2, 3]},
            ),
        ],
    )
    def test_graphs(self, flags: str, expected: dict[str, Any]) -> None:
        assert sglang(flags) == {"method": "none", **expected}

    def test_before_0_5_14_enforced_graphs_win_over_disabled_ones(self) -> None:
        """`_handle_piecewise_cuda_graph`: two switches, whatever their order; --enable-breakable-cuda-graph chooses how, not whether."""
        for line in ("--enforce-piecewise-cuda-graph --disable-piecewise-cuda-graph",
                     "--disable-piecewise-cuda-graph --enforce-piecewise-cuda-graph"):  # fmt: skip
            assert sglang(line, version="0.5.13")["prefill_graphs"] is True
        line = "--disable-piecewise-cuda-graph --enable-breakable-cuda-graph"
        assert sglang(line, version="0.5.13")["prefill_graphs"] is False
        assert sglang(line)["prefill_graphs"] is True

    @pytest.mark.parametrize(
        "phase", ['{"backend": "a"}', '{"backend": [1]}', '{"bs": 0}', '{"bs": []}', '{"bs": {}}', '{"max_bs": 0}']
    )
    def test_a_configuration_of_prefill_graphs_that_sglang_refuses(self, phase: str) -> None:
        with pytest.raises(InputError, match="--cuda-graph"):
            sglang(["--cuda-graph-config", f'{{"prefill": {phase}}}'])

    def test_plain_options(self) -> None:
        line = (
            "--kv-cache-dtype fp8_e4m3 --quantization w4afp8 --dtype bfloat16 --mem-fraction-static 0.85 --page-size 64 "
            "--chunked-prefill-size -1 --context-length 32768 --attention-backend triton --disable-custom-all-reduce "
            "--speculative-draft-attention-backend fa3 --disable-overlap-schedule --ep 8 --nnodes 2"
        )
        expected = {
            "kv_cache_dtype": "fp8_e4m3",
            "quantization": "w4afp8",
            "dtype": "bfloat16",
            "mem_fraction": 0.85,
            "page_size": 64,
            "chunked_prefill_size": -1,
            "context_length": 32768,
            "attention_backend": "triton",
            "draft_attention_backend": "fa3",
            "disable_custom_all_reduce": True,
            "disable_overlap": True,
            "ep": 8,
            "nodes": 2,
            "method": "none",
        }
        assert sglang(line) == expected

    def test_allreduce_fusion(self) -> None:
        assert sglang("--enable-flashinfer-allreduce-fusion")["flashinfer_allreduce_fusion"]
        both = "--enable-flashinfer-allreduce-fusion --enforce-disable-flashinfer-allreduce-fusion"
        assert sglang(both)["flashinfer_allreduce_fusion"] is False

    def test_environment(self) -> None:
        front = "SGLANG_SIMULATE_ACC_LEN=2.5 SGLANG_ENABLE_SPEC_V2=0 python3 -m sglang.launch_server "
        assert sglang(front + EAGLE3)["simulated_accept_length"] == 2.5
        assert "disable_overlap" not in sglang(front + EAGLE3)
        assert sglang(front + EAGLE3, version="0.5.13")["disable_overlap"]
        asked = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 sglang serve m"
        assert "exists from 0.5.21" in notes("sglang", asked)
        assert "exists from 0.5.21" not in notes("sglang", asked, version="0.5.21")
        assert "host memory" in notes("sglang", "NCCL_P2P_DISABLE=1 sglang serve m")


class TestVllm:
    """vllm/config/speculative.py, engine/arg_utils.py and utils/argparse_utils.py of 0.20.0."""

    @pytest.mark.parametrize(
        "flags",
        [
            """--speculative-config '{"method":"eagle3","model":"d","num_speculative_tokens":3}'""",
            """--speculative_config='{"method":"eagle3","model":"d","num_speculative_tokens":3}'""",
            """-sc '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}'""",
            "--speculative-config.method eagle3 --speculative-config.model d --speculative-config.num_speculative_tokens 3",
            "--speculative-config.method=eagle3 -sc.model=d -sc.num-speculative-tokens=3",
            "--spec-method eagle3 --spec-model d --spec-tokens 3",
            "--speculative-model d --num-speculative-tokens 3 --spec-method eagle3",
        ],
    )
    def test_speculative_config_forms(self, flags: str) -> None:
        o = vllm(f"vllm serve target -tp 8 {flags}")
        expected = {"model": "target", "tp": 8, "method": "eagle3", "draft": "d", "num_steps": 3, "draft_tokens": 4}
        assert expected.items() <= o.items()
        assert "max_running_requests" not in o

    @pytest.mark.parametrize(
        ("config", "method"),
        [
            ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp"),
            ({"method": "mtp", "num_speculative_tokens": 1}, "mtp"),
            ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}, "ngram"),
            ({"model": "[ngram]", "num_speculative_tokens": 4}, "ngram"),
            ({"method": "suffix"}, "ngram"),
            ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 2}, "eagle3"),
            ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "num_speculative_tokens": 2}, "eagle"),
            ({"model": "z/Qwen3-DFlash", "num_speculative_tokens": 2}, "dflash"),
            ({"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 2}, "draft-model"),
            ({"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 2}, "draft-model"),
        ],
    )
    def test_methods(self, config: dict[str, Any], method: str) -> None:
        assert vllm(["serve", "m", "-sc", json.dumps(config)])["method"] == method

    def test_missing_number_of_tokens(self) -> None:
        assert vllm("""-sc '{"method":"suffix"}'""")["draft_tokens"] == 25
        assert vllm("""-sc '{"method":"mtp"}'""")["draft_tokens"] == 2

    def test_dotted_arguments_replace_json_given_before(self) -> None:
        """vLLM appends the merged dotted arguments as one JSON at the end, and the last value wins."""
        line = """-sc '{"method":"mtp","num_speculative_tokens":1}' -sc.method ngram -sc.num_speculative_tokens 4"""
        assert (vllm(line)["method"], vllm(line)["num_steps"]) == ("ngram", 4)

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            ("--enforce-eager", {"disable_cuda_graph": True}),
            ("--enforce-eager --no-enforce-eager", {}),
            ("-O0", {"disable_cuda_graph": True}),
            ("-O3", {}),
            ("-cc.cudagraph_mode=NONE", {"disable_cuda_graph": True}),
            ("""--compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE"}'""", {}),
            ("--compilation-config 3", {}),
            (
                """--compilation-config '{"cudagraph_capture_sizes":[8,1]}'""",
                {"captured_sizes": [1, 8]},
            ),
            ("--cudagraph-capture-sizes 1 2 4", {"captured_sizes": [1, 2, 4]}),
            ("--max-cudagraph-capture-size 64", {"cuda_graph_max_bs": 64}),
        ],
    )
    def test_graphs(self, flags: str, expected: dict[str, Any]) -> None:
        assert vllm(f"vllm serve m {flags}") == {"model": "m", "method": "none", **expected}

    def test_parallelism(self) -> None:
        o = vllm("vllm serve m --data_parallel_size 8 --enable-expert-parallel")
        assert (o["tp"], o["dp_attention"], o["ep"]) == (8, 8, 8)
        o = vllm("vllm serve m -tp 8 --enable-expert-parallel")
        assert (o["tp"], o["ep"]) == (8, 8)
        assert "dp_attention" not in o
        assert "copies" in notes("vllm", "vllm serve m --data-parallel-size 2 -tp 4")

    def test_draft_parallelism(self) -> None:
        line = (
            """-tp 8 -sc '{"method":"eagle3","model":"d","num_speculative_tokens":2,"draft_tensor_parallel_size":1}'"""
        )
        assert vllm(line)["draft_tp"] == 1
        assert "takes only 1" in notes("vllm", line.replace('size":1', 'size":4'))

    def test_plain_options(self) -> None:
        line = (
            "vllm serve m --max-num-seqs 64 --max-num-batched-tokens 8k --kv-cache-dtype fp8 --max-model-len 32K "
            "--gpu-memory-utilization 0.9 --block-size 16 --no-async-scheduling --disable-custom-all-reduce -q fp8"
        )
        expected = {
            "model": "m",
            "max_running_requests": 64,
            "max_num_batched_tokens": 8000,
            "kv_cache_dtype": "fp8",
            "context_length": 32768,
            "mem_fraction": 0.9,
            "page_size": 16,
            "disable_overlap": True,
            "disable_custom_all_reduce": True,
            "quantization": "fp8",
            "method": "none",
        }
        assert vllm(line) == expected


def _read(engine: str, line: str | list[str]) -> None:
    """A launch that JSON can hold, or one line of error; soon."""
    begin = time.perf_counter()
    try:
        launch = read_launch(engine, line)
    except InputError as error:
        said = str(error)
    else:
        said = json.dumps(launch.options) + "".join(launch.notes + launch.unknown).replace("\n", " ")
    assert "\n" not in said
    assert time.perf_counter() - begin < 2


FLAGS = {engine: sorted(read_flags(engine)) for engine in ENGINES}
VALUES = st.one_of(
    st.sampled_from(["1", "0", "-1", "8", "0.5", "EAGLE3", "NGRAM", "nan", "1e9", "", "{}", "[]", '{"decode":{"bs":[1]}}',
                     '{"method":"eagle3","model":"d","num_speculative_tokens":2}', "a b", "\u00b2", "1_0"]),
    st.text(max_size=12),
)  # fmt: skip


class TestFuzz:
    @given(st.sampled_from(ENGINES), st.text(max_size=300))
    def test_any_text(self, engine: str, text: str) -> None:
        _read(engine, text)

    @given(st.sampled_from(ENGINES), st.lists(st.text(max_size=20), max_size=20))
    def test_any_list(self, engine: str, words: list[str]) -> None:
        _read(engine, words)

    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=200)
    @given(st.data(), st.sampled_from(ENGINES), st.booleans())
    def test_any_flags(self, data: st.DataObject, engine: str, quoted: bool) -> None:
        flag = st.sampled_from(FLAGS[engine]).map(
            lambda f: f if len(f) % 3 else f.replace("-", "_").replace("__", "--")
        )
        words = data.draw(st.lists(st.one_of(flag, VALUES, st.builds("{}={}".format, flag, VALUES)), max_size=15))
        _read(engine, shlex.join(words) if quoted else words)

    @given(st.data())
    def test_speculation_resolves_to_a_consistent_chain_or_tree(self, data: st.DataObject) -> None:
        number = st.none() | st.integers(1, 16)
        steps, topk, tokens = (data.draw(number) for _ in range(3))
        algorithm = data.draw(st.sampled_from(["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]))
        line = f"--speculative-algorithm {algorithm}"
        line += f" --speculative-num-steps {steps}" if steps else ""
        line += f" --speculative-eagle-topk {topk}" if topk else ""
        line += f" --speculative-num-draft-tokens {tokens}" if tokens else ""
        o = sglang(line)
        assert o["method"] in METHODS
        assert o["num_steps"] >= 1
        assert o["topk"] >= 1
        if o["topk"] == 1:
            assert o["draft_tokens"] == o["num_steps"] + 1

    def test_long_lines_are_quick(self) -> None:
        for line in ("--tp 1 " * 14_000, "a" * 99_000, "'" * 99_998, "\\\n" * 45_000, "x=y " * 24_000, "-e " * 30_000):
            _read("sglang", line)
            _read("vllm", line)
        with pytest.raises(InputError, match="longer than"):
            read_launch("sglang", "x" * 300_000)


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("sglang", "--pp-size 4 --tp 2", "pipeline parallelism"),
        ("vllm", "-pp 2", "pipeline parallelism"),
        ("sglang", "--kv-cache-dtype fp4_e2m1", "kv-cache-dtype fp4_e2m1"),
        ("sglang", "--dtype float32", "dtype float32"),
        ("sglang", "--tp 2 --moe-a2a-backend deepep", "moe-a2a-backend deepep"),
        (
            "vllm",
            '-tp 4 --speculative-config \'{"model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}\'',
            "draft_tensor_parallel_size 1",
        ),
    ],
)
def test_what_no_cost_follows_from_is_said(engine: str, flags: str, words: str) -> None:
    said = notes(engine, f"m {flags}" if engine == "vllm" else f"--model-path m {flags}")
    assert f"{words} is not modelled" in said
    plain = "--dtype bfloat16 --kv-cache-dtype fp8_e4m3"
    assert "not modelled" not in notes(engine, f"m {plain}" if engine == "vllm" else f"--model-path m {plain}")


def test_a_flag_that_is_off_is_not_noted() -> None:
    assert "not modelled" not in notes("vllm", "m -dcp 1 --cpu-offload-gb 0")
    assert "not modelled" not in notes(
        "sglang", "--model-path m --ep-num-redundant-experts 0 --disaggregation-mode null"
    )


@pytest.mark.parametrize(
    ("engine", "flag", "words"),
    [
        ("sglang", "--json-model-override-args '{\"num_hidden_layers\": 4}'", "priced as its config.json has it"),
        ("sglang", "--torchao-config fp8wo", "priced as its config.json has it"),
        ("sglang", "--enable-lora --lora-paths a=b", "without adapters"),
        ("sglang", "--enable-torch-compile", "the engine's own"),
        ("sglang", "--disaggregation-mode decode", "both prefill and decode"),
        ("sglang", "--load-format gguf", "--load-format gguf is not modelled"),
        ("sglang", "--cpu-offload-gb 10", "the GPUs' own memory"),
        ("vllm", "--cpu-offload-gb 10", "the GPUs' own memory"),
        ("sglang", "--enable-two-batch-overlap", "one after the other"),
        ("vllm", "-dcp 4", "no cache is cut by tokens"),
        ("sglang", "--dcp-size 4", "no cache is cut by tokens"),
        ("sglang", "--moe-dense-tp-size 1", "dense layers are cut as all others"),
        ("sglang", "--enable-eplb --ep-num-redundant-experts 32", "each expert is held once"),
        ("sglang", "--tp 2 --enable-torch-symm-mem", "as the engine's others have them"),
        ("vllm", "--hf-overrides '{\"num_hidden_layers\": 4}'", "priced as its config.json has it"),
    ],
)
def test_a_flag_that_changes_what_is_served_is_noted_where_nothing_follows_from_it(engine, flag, words):
    notes = read_launch(engine, f"--model-path m {flag}" if engine == "sglang" else f"--model m {flag}").notes
    assert any(words in note for note in notes), notes
