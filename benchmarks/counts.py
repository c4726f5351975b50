"""Numbers of things on a benchmark's command line."""

import argparse


def positive(text: str) -> int:
    """For `type=`: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number
