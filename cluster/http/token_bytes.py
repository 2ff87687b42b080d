"""The bytes of single tokens, as the HTTP face knows them: `protos.token_bytes`."""

from protos.token_bytes import BytesOf, TokenBytes, bytes_of_entries

__all__ = ["BytesOf", "TokenBytes", "bytes_of_entries"]
