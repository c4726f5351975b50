"""What a process logs goes to its standard error, once and with its time."""

import subprocess
import sys

CODE = """
import logging
from workers.logs import log_to_stderr
log_to_stderr()
log_to_stderr()
logging.getLogger("cluster.engine.x").info("a phase took %g s", 1.5)
logging.getLogger("elsewhere").info("nobody's business")
"""


def test_once_with_its_time() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert line.endswith(" INFO cluster.engine.x: a phase took 1.5 s")
    assert line[:2] == "20"
