"""The metrics actor in a real Ray: pushed by threads of several processes, read by name."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics.actor import create_metrics_actor, get_metrics_actor, remove_metrics_actor
from cluster.metrics.engine import EngineMetrics
from cluster.metrics.pusher import MetricsPusher
from cluster.metrics.snapshot import MetricsSnapshot


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@pytest.fixture
def app() -> Iterator[str]:
    name = f"app-{time.time_ns()}"
    yield name
    remove_metrics_actor(name)


def scrape(app: str) -> dict[str, float]:
    """Sample name -> value, summed over labels."""
    text = ray.get(get_metrics_actor(app).render.remote(), timeout=20).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def start_engine(app: str, source_id: str) -> Any:
    """A process that pushes like an engine replica does."""

    class Engine:  # Local, so that Ray ships it by value: workers cannot import a test module.
        def __init__(self) -> None:
            self.metrics = EngineMetrics()
            self.pusher = MetricsPusher(app, source_id, "engine", "tiny", self.metrics.snapshot)
            self.pusher.start()

        def serve(self, num_refusals: int) -> None:
            self.metrics.set_up(True)
            for _ in range(num_refusals):
                self.metrics.refuse("prompt")

    return ray.remote(Engine).options(num_cpus=0).remote()


def test_engines_in_processes_are_added_up_and_outlived(app: str) -> None:
    create_metrics_actor(app)
    engines = [start_engine(app, f"engine-{number}") for number in range(2)]
    ray.get([engine.serve.remote(number) for number, engine in enumerate(engines, start=1)], timeout=60)
    wait_for("both engines' counts", lambda: scrape(app).get("chunkserve:admission_rejections_total") == 3)
    assert scrape(app)["chunkserve:engine_up"] == 2
    ray.kill(engines[0])
    wait_for("the dead engine's gauges to go", lambda: scrape(app)["chunkserve:engine_up"] == 1)
    assert scrape(app)["chunkserve:admission_rejections_total"] == 3
    ray.kill(engines[1])


def test_phases_show_while_a_source_starts_and_a_stopped_one_leaves(app: str) -> None:
    actor = create_metrics_actor(app)
    pusher = MetricsPusher(app, "frontend", "frontend", "tiny", MetricsSnapshot)
    pusher.start()

    def phase() -> str | None:
        statuses = ray.get(actor.status.remote(), timeout=20)
        return statuses[0].phase if statuses else None

    pusher.begin_phase("load")
    wait_for("the phase to show", lambda: phase() == "load")
    pusher.end_phase("load", 1.5)
    wait_for("the phase to end", lambda: scrape(app).get("chunkserve:startup_phase_seconds") == 1.5)
    assert phase() is None
    pusher.stop()
    assert ray.get(actor.status.remote(), timeout=20) == []


def test_one_actor_an_application(app: str) -> None:
    assert create_metrics_actor(app) == create_metrics_actor(app) == get_metrics_actor(app)
    with pytest.raises(ValueError, match="another"):
        get_metrics_actor("another")


def test_a_pusher_survives_the_loss_of_the_actor(app: str) -> None:
    metrics = EngineMetrics()
    metrics.refuse("prompt")
    pusher = MetricsPusher(app, "engine", "engine", "tiny", metrics.snapshot)
    pusher.start()
    wait_for("the first push", lambda: app_has(app, 1))
    remove_metrics_actor(app)
    metrics.refuse("prompt")
    wait_for("pushes to a new actor", lambda: app_has(app, 2))
    pusher.stop()


def app_has(app: str, rejections: float) -> bool:
    try:
        return scrape(app).get("chunkserve:admission_rejections_total") == rejections
    except (ValueError, ray.exceptions.RayActorError):
        return False  # not there yet, or gone


def test_an_orphaned_actor_ends_itself(app: str) -> None:
    create_metrics_actor(app, orphan_seconds=0.2)

    def gone() -> bool:
        try:
            get_metrics_actor(app)
        except ValueError:
            return True
        return False

    wait_for("the actor to end", gone)


def test_a_pusher_that_outlives_ray_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_wanted(app_name: str) -> None:
        raise AssertionError("created an actor, and with it a cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("cluster.metrics.pusher.create_metrics_actor", not_wanted)
    pusher = MetricsPusher("gone", "engine", "engine", "tiny", MetricsSnapshot)
    pusher.start()
    pusher.stop()
