"""`outrider data`: the target answers prompts and writes user turns of its own.

The only door is `main`. Answers go to a framed msgpack file that trainers read.
"""

from verifier_service.data.cli import main

__all__ = ["main"]
