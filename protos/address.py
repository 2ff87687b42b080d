"""host:port, as configurations say it and servers announce it. Knows no socket."""

from protos.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port, brackets around an IPv6 host allowed. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen must be host:port, not {address!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets: what `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
