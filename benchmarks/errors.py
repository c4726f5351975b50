"""What a benchmark ends with when it cannot be made."""


class BenchmarkError(Exception):
    """Something that a benchmark needs is not there, or failed; the message says what, and is all that is shown."""
