"""Names the arithmetic of this verifier: two with one fingerprint give the same bits (design 4).

The code counts: a build that sums in another order is another arithmetic, and a cluster in the
middle of an upgrade runs both. Knows no weights; the target's digest is handed in.
"""

import hashlib
from pathlib import Path

import torch

from protos import noise

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("model", "sampling")


def fingerprint(digest: str, dtype: torch.dtype, form: str, device: str) -> str:
    """16 hex digits over torch's build, ISA, threads, dtype, weights, form, device and code.

    digest: of the target's weights. form: `fused` or `modules`. device: what tells it from a CPU,
    "" for a CPU.
    """
    parts = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        vector_units(),
        str(torch.get_num_threads()),
        str(dtype),
        digest,
        form,
        *filter(None, [device]),
        code_digest(_PACKAGE),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def vector_units() -> str:
    """The vector and matrix extensions of this processor, by which oneDNN chooses its kernels.

    torch's one word for the ISA is the same with and without AMX, the sums are not.
    """
    known: dict[str, object] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # newer than the oldest torch we take
    names = (name for name, value in known.items() if value is True)
    return "+".join(sorted(n for n in names if n.startswith(("avx", "amx", "fma", "sve", "neon"))))


def code_digest(package: Path) -> str:
    """Digest of the sources that decide a token: model and sampling under `package`, the noise."""
    digest = hashlib.sha256(Path(noise.__file__).read_bytes())
    for room in _ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
