"""The verifier on a device that is not the CPU, where there is none: claims in their own process.

torch's spare device type must be registered for a whole process (see foreign/far_device.py), so the
claims in `foreign/` are run by a pytest of their own.
"""

import subprocess
import sys
from pathlib import Path


def test_all_claims_about_a_foreign_device_hold(root: Path):
    claims = sorted((Path(__file__).parent / "foreign").glob("claims_*.py"))
    assert claims
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, claims)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
