"""Examples run as a user runs them, and give on two ranks what they give on one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def losses(*command: str) -> list[float]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


def test_first_steps_are_the_same_on_one_rank_and_on_two():
    script = str(EXAMPLES / "first_steps.py")
    alone = losses(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    # Printed to five digits, of which the last may round either way.
    assert losses(*torchrun, script) == pytest.approx(alone, abs=1.1e-5)
