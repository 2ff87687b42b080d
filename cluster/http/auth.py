"""API keys: where they come from and how a caller's is compared.

Invariant: a comparison takes the same time whichever key is wrong, and no key is ever logged or
echoed.
"""

import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from protos.errors import ConfigError, Unauthenticated


def load_keys(
    env_var: str | None, file: str | None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Keys from an environment variable (comma-separated) and a file (one a line, # comments).

    Raises: ConfigError when a named source is absent or empty: asking for keys and getting an
    open door must not happen.
    """
    keys: list[str] = []
    if env_var is not None:
        value = (os.environ if environ is None else environ).get(env_var, "")
        found = [key.strip() for key in value.split(",") if key.strip()]
        if not found:
            raise ConfigError(f"http.api_keys_env: {env_var} holds no key")
        keys += found
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError("http.api_keys_file cannot be read") from error
        found = [key for key in map(str.strip, lines) if key and not key.startswith("#")]
        if not found:
            raise ConfigError("http.api_keys_file holds no key")
        keys += found
    return tuple(keys)


def check_key(authorization: str | None, keys: Sequence[str]) -> None:
    """Pass when `keys` is empty or the header bears one of them.

    Raises: Unauthenticated.
    """
    if not keys:
        return
    scheme, _, given = (authorization or "").partition(" ")
    # A header is read as Latin-1: these are the bytes that were sent.
    offered = given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
    matched = False
    for key in keys:
        matched |= hmac.compare_digest(offered, key.encode("utf-8"))
    if not (matched and offered):
        raise Unauthenticated("missing or wrong API key; send 'Authorization: Bearer <key>'")
