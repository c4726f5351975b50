"""Where the processes of a service write what they log: standard error, which Ray keeps in a file a process."""

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """From now on, with times, all that our own modules say and all that they warn of. Again: nothing happens."""
    for room in ("cluster", "workers"):
        logger = logging.getLogger(room)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
