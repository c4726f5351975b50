"""Whether a front end can serve, and if not, how far it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """`phase` is "ready", or what is waited for, in a few words fit to be shown to anybody."""

    ready: bool
    """Requests are served: by an engine that runs, or by one that is started for them."""
    live: bool
    """False when engines run and none of them gets on: waiting longer will not help."""
    phase: str
