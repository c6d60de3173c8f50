"""Examples run as a user runs them, and give on two ranks what they give on one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def started(*command: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], **pipes)


def losses(process: subprocess.Popen[str]) -> list[float]:
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    return [float(loss) for loss in re.findall(r"loss (\S+)", out)]


def test_first_steps_are_the_same_on_one_rank_and_on_two():
    script = str(EXAMPLES / "first_steps.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    processes = started(script), started(*torchrun, script)
    try:
        alone, shared = map(losses, processes)
    finally:
        for process in processes:
            process.kill()
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    # Printed to five digits, of which the last may round either way.
    assert shared == pytest.approx(alone, abs=1.1e-5)
