"""What must not be shown or kept: API keys, tokens and passwords, in settings, launch lines, addresses and texts.

A secret is told by the name beside it (`api_key`, `--hf-token`, `HF_TOKEN=`), by its own look (`hf_...`, a user in an address), or
by being the API key of the environment. `scrub` replaces what names and looks tell; `hide` replaces known values anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

REDACTED = "[redacted]"
KEY_VARIABLES = ("SPECSIM_API_KEY", "OPENAI_API_KEY")
# Keys that hide nothing: what people set for servers that ask for none.
NO_SECRETS = ("EMPTY", "auto", "dummy", "false", "none", "null", "sglang", "test", "token", "true", "vllm")
SHORT = 8  # characters below which a key may be a part of other words and numbers
_KEY_FLAGS = ("--api-key", "--admin-api-key", "--hf-token")
_SECRET_KEY = re.compile(
    r"api[-_]?key|secret|passw|credential|authorization|[-_]key$|(?:^|[-_])(?:hf|auth)?_?token$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{12,}"
    r"|(?<=[Bb]earer )\S+|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+|(?<=://)[^/@\s]+(?=@)"
)
_ASSIGNED = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Whether a key of a configuration names a secret (api_key, hf_token, ssl_keyfile_password, ...)."""
    return bool(_SECRET_KEY.search(key))


def scrub(value: Any) -> Any:
    """The value with secrets replaced, in dictionaries, lists and strings, and with NaN and infinity made None.

    A list is read as words of a command line, in which a flag's value follows it; a string may be such a word: NAME=value, or
    JSON.
    """
    return _scrubbed(value, [])


def secrets_in(*values: Any) -> list[str]:
    """What `scrub` replaces in the values, longest first."""
    found: list[str] = []
    for value in values:
        _scrubbed(value, found)
    return _longest_first(found)


def _longest_first(secrets: Sequence[str]) -> list[str]:
    return sorted({s for s in secrets if len(s) >= 4 and s != REDACTED}, key=len, reverse=True)


def _scrubbed(value: Any, found: list[str]) -> Any:
    if isinstance(value, Mapping):
        hidden = {k for k, v in value.items() if is_secret(str(k)) and v not in (None, "", False)}
        found += [str(value[k]) for k in hidden]
        return {plain(str(k)): REDACTED if k in hidden else _scrubbed(v, found) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_word(item, before, found) for before, item in zip(("", *value), value, strict=False)]
    if isinstance(value, str):
        return _text(plain(value), found)
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def _word(item: Any, before: Any, found: list[str]) -> Any:
    """A word of a command line after another."""
    if isinstance(before, str) and before.startswith("-") and "=" not in before and _is_secret_flag(before):
        found.append(str(item))
        return REDACTED
    return _scrubbed(item, found)


def _is_secret_flag(flag: str) -> bool:
    """Whether a word is a flag whose value is a secret, abbreviated or misspelt too."""
    if is_secret(flag):
        return True
    if len(flag) <= len("--a") or not flag.startswith("--"):
        return False
    return any(known.startswith(flag) for known in _KEY_FLAGS) or bool(get_close_matches(flag, _KEY_FLAGS, 1, 0.85))


def _text(text: str, found: list[str]) -> str:
    if assigned := _ASSIGNED.fullmatch(text):
        name, value = assigned.groups()
        if _is_secret_flag(name):
            found.append(value)
            return f"{name}={REDACTED}"
        return f"{name}={_text(value, found)}"
    if text[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):  # it only begins like JSON
            content = None
        if isinstance(content, (dict, list)) and (clean := _scrubbed(content, found)) != content:
            return json.dumps(clean)
    found += _SECRET_VALUE.findall(text)
    return _SECRET_VALUE.sub(REDACTED, text)


def without_secrets(line: str) -> str:
    """A launch line as it may be shown to others: keys and tokens are redacted."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote: no launch line
        return line
    clean = scrub(words)
    return line if clean == words else shlex.join(clean)


def safe_address(address: str) -> str:
    """The address without user, password and secret-looking query values."""
    address = _SECRET_VALUE.sub(REDACTED, address)
    return re.sub(r"([?&])([^=&#]*)=([^&#]*)", lambda m: _query(m.group(1), m.group(2), m.group(3)), address)


def _query(mark: str, key: str, value: str) -> str:
    return f"{mark}{key}={REDACTED if is_secret(key) or key.lower() in ('key', 'auth') else value}"


def plain(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


# --- the API key of the environment ----------------------------------------------------------------------------------------


def api_key() -> tuple[str, str]:
    """The API key of the environment, and the name of its variable; empty where none is set."""
    name = next((name for name in KEY_VARIABLES if os.environ.get(name)), "")
    return os.environ.get(name, "").strip(), name


def own_secrets(*values: Any) -> list[str]:
    """API keys of the environment and what is secret in the values, longest first."""
    keys = [key for name in KEY_VARIABLES if (key := os.environ.get(name, "").strip()) not in NO_SECRETS]
    return _longest_first([*keys, *secrets_in(*values)])


def hide(text: str, secrets: Sequence[str]) -> str:
    """The text with each of the secrets replaced: a short one as a word by itself, since it may be a part of others."""
    for secret in secrets:
        whole = re.escape(secret)
        text = re.sub(rf"(?<!\w){whole}(?!\w)" if len(secret) < SHORT else whole, REDACTED, text)
    return text


def without_key(value: Any) -> Any:
    """`value` with the API key replaced in any text of it, as a server may send it back."""
    return _hidden(value, own_secrets())


def _hidden(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return hide(value, secrets)
    if isinstance(value, dict):
        return {k: _hidden(v, secrets) for k, v in value.items()}
    return [_hidden(v, secrets) for v in value] if isinstance(value, list) else value
