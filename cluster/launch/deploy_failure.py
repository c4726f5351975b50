"""Why a deployment failed, out of the text in which Serve tells it."""

_OURS = ("cluster.errors.", "scheduler.", "workers.")


def cause_of(failure: str) -> str:
    """The line that names the cause: the last error of our own packages in the tracebacks, else the last line."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OURS) and ": " in line]
    if not ours:
        return lines[-1] if lines else "Serve gave no cause"
    return ours[-1].partition(": ")[2]
