"""`transformers serve` with continuous batching."""

from pathlib import Path

from benchmarks.client import Dialect
from benchmarks.options import processor_dtype
from benchmarks.peers.environment import PeerEnvironment

VERSION = "5.24.0"
TORCH_VERSION = "2.13.0"


class TransformersServe:
    """PyPI's `transformers[serving]` on the CPU."""

    name = "transformers"
    title = f"transformers {VERSION}"
    dialect: Dialect = "transformers"
    takes_token_ids = False
    best_budget = 512

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.environment = PeerEnvironment(f"transformers-{VERSION}", cache_dir)

    def prepare(self) -> None:
        """Install it, unless it is there. Raises PeerError."""
        self.environment.ensure(_install)

    def command(self, model: Path, budget: int, port: int) -> list[str]:
        """What starts it: `budget` is its number of tokens a batch."""
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--device": "cpu",
            "--dtype": processor_dtype(),
            "--cb-max-batch-tokens": str(budget),
        }
        serve = [str(self.environment.python.with_name("transformers")), "serve", str(model), "--continuous-batching"]
        return [*serve, *(word for option in options.items() for word in option)]

    def variables(self) -> dict[str, str]:
        """Its environment variables, besides ours."""
        return {"HF_HUB_OFFLINE": "1"}


def _install(environment: PeerEnvironment) -> None:
    environment.pip_install(f"transformers[serving]=={VERSION}", f"torch=={TORCH_VERSION}", "accelerate")
