"""Settings of a front end: what it serves and how much one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Checked when built; raises ValueError naming the setting."""

    model_path: str
    """Local directory with the tokenizer, config.json and generation_config.json."""
    model_name: str
    """The name clients ask for, and the `model` of every answer."""
    app_name: str = "chunkserve"
    """Whose metrics actor the front end reports to and shows."""
    api_key: str | None = None
    """When set, every /v1 route needs `Authorization: Bearer <api_key>`; /health and /metrics stay open."""
    api_key_file: str | None = None
    """A file with further keys, one a line; each of them will do, and a changed file holds at once."""
    max_body_mb: float = 16.0
    """Largest request body, in MiB; a larger one is a 413 before it was read."""
    wake_seconds: float | None = None
    """Set where there may be no engine: how long a request waits for one to load."""
    batch_directory: str | None = None
    """Where uploaded files and batches are kept; without it there are none. All front ends must see the same one."""
    max_file_mb: float = 200.0
    """Largest uploaded file, in MiB."""
    max_choices: int = 128
    """Most choices of one request: prompts x n."""
    uses_views: bool = False
    """Engines tell it of their caches and queues, for a router that chooses by them."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name is empty; clients need a name to ask for")
        if self.api_key == "":
            raise ValueError("api_key is empty; leave it out to accept requests without a key")
        for name in ("max_body_mb", "max_choices", "max_file_mb"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
