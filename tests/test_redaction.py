"""What is secret is neither shown nor kept, wherever it stands; what is not stays as it is."""

from __future__ import annotations

import pytest

from specsim.redaction import REDACTED, hide, own_secrets, scrub, secrets_in, without_key, without_secrets


@pytest.mark.parametrize(
    ("words", "clean"),
    [
        (["--api-key", "sesame", "--tp", "8"], ["--api-key", REDACTED, "--tp", "8"]),
        (["--api-k", "sesame"], ["--api-k", REDACTED]),  # engines take abbreviations
        (["--api-kye", "sesame"], ["--api-kye", REDACTED]),
        (["--admin-api-key=sesame"], [f"--admin-api-key={REDACTED}"]),
        (["env", "HF_TOKEN=sesame", "python"], ["env", f"HF_TOKEN={REDACTED}", "python"]),
        (["docker", "--env=HF_TOKEN=sesame"], ["docker", f"--env=HF_TOKEN={REDACTED}"]),
        (["--x", '{"access_key": "sesame", "n": 1}'], ["--x", f'{{"access_key": "{REDACTED}", "n": 1}}']),
        (['--x={"a": [{"password": "sesame"}]}'], [f'--x={{"a": [{{"password": "{REDACTED}"}}]}}']),
        (["http://me:sesame@proxy:3128/x"], [f"http://{REDACTED}@proxy:3128/x"]),
        (["HTTPS_PROXY=http://me:sesame@proxy:3128"], [f"HTTPS_PROXY=http://{REDACTED}@proxy:3128"]),
    ],
)
def test_secrets_of_a_command_line(words: list[str], clean: list[str]) -> None:
    assert scrub(words) == clean
    assert any("sesame" in found for found in secrets_in(words))


def test_what_is_no_secret_stays() -> None:
    """Settings whose names or values only look alike; JSON is not written anew for nothing."""
    words = ["--max-total-tokens", "812345", "--tokenizer-path", "x", '{"n":1}', "[2026-01-01] Decode", "[1"]
    assert scrub(words) == words
    assert scrub({"max_total_num_tokens": 5, "note": "a=b c", "big": "{" * 50_000}) == {
        "max_total_num_tokens": 5,
        "note": "a=b c",
        "big": "{" * 50_000,
    }
    assert without_secrets("vllm serve m -tp 8 --compilation-config '{\"level\": 3}'").endswith("'{\"level\": 3}'")


def test_a_short_key_is_no_part_of_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of 1234 does not eat the digits of 812345, and one of `vllm`, as people set it, does not make the engine unknown."""
    assert hide("key 1234 of 812345", ["1234"]) == f"key {REDACTED} of 812345"
    assert hide("xtopsecret1x", ["topsecret1"]) == f"x{REDACTED}x"
    monkeypatch.setenv("OPENAI_API_KEY", "vllm")
    assert without_key({"engine": {"name": "vllm"}}) == {"engine": {"name": "vllm"}}
    monkeypatch.setenv("SPECSIM_API_KEY", "sesame")
    assert without_key([{"a": "Bearer sesame"}, 3]) == [{"a": f"Bearer {REDACTED}"}, 3]
    assert own_secrets({"HF_TOKEN": "opensesame"}) == ["opensesame", "sesame"]
