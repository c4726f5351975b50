"""All checks of one cluster, in the order in which a start would meet what they look at."""

from cluster.engine.settings import EngineSettings
from cluster.errors import EngineError, ModelError
from cluster.launch.cluster_nodes import free_nodes, living_nodes, possible_nodes
from cluster.launch.placement import demand_of, placement_problems
from cluster.models.store import open_store
from cluster.preflight.all_reduce import try_sums
from cluster.preflight.nodes import Probes
from cluster.preflight.row import Row
from cluster.settings.tree import Device, Settings, engine_settings


def check_all(settings: Settings, device: Device) -> list[Row]:
    """Look at the connected cluster, and for the model on this machine."""
    model, found = find_model(settings)
    engine = engine_settings(settings, model or settings.model.path, device)
    rows = check_placement(settings, engine)
    placed = all(row.state == "ok" for row in rows)
    return [found, *rows, *check_nodes(settings, model), check_sums(engine, placed)]


def find_model(settings: Settings) -> tuple[str | None, Row]:
    """The model's directory on this machine, if it is here; nothing is fetched."""
    path = settings.model.path
    try:
        stored = open_store(lambda line: None).local(path)
    except ModelError as error:
        return None, Row("model", "this machine", "failed", str(error))
    if stored is None:
        detail = f"{path} is not on this machine; serve fetches it, or chunkserve model fetch {path}"
        return None, Row("model", "this machine", "skipped", detail)
    return str(stored.directory), Row("model", "this machine", "ok", f"{path}: {stored.source}")


def check_placement(settings: Settings, engine: EngineSettings) -> list[Row]:
    """Whether the cluster can hold the application at all; and if so, whether it can now, beside what others use."""
    demand = demand_of(settings, engine)
    nodes = possible_nodes(demand)
    where = f"{len(living_nodes())} nodes"
    problems = placement_problems(demand, nodes)
    if not problems:
        detail = (
            f"engines: {demand.num_engines}, each with ranks: {demand.num_ranks} ({demand.placement});"
            f" front ends: {demand.num_frontends}; all fit"
        )
        in_use = placement_problems(demand, free_nodes())
        if not in_use:
            return [Row("placement", where, "ok", detail)]
        if len(nodes) > len(living_nodes()):
            return [Row("placement", where, "skipped", f"{detail} once the autoscaler has started nodes")]
        problems = [f"fits, but not beside what others use now: {problem}" for problem in in_use]
    return [Row("placement", where, "failed", problem) for problem in problems]


def check_nodes(settings: Settings, model: str | None) -> list[Row]:
    """Every living node: versions, the model's files if they are here, the server's port, links between nodes."""
    probes = Probes()
    try:
        probes.check_versions()
        if model is not None:
            probes.check_model(model)
        probes.check_server_port(settings.server.host, settings.server.port)
        probes.check_links()
    finally:
        probes.close()
    return probes.rows


def check_sums(engine: EngineSettings, placed: bool) -> Row:
    """An all-reduce between the ranks of one engine."""
    num_ranks = engine.worker.tensor_parallel_size
    where = f"{num_ranks} ranks"
    if num_ranks == 1:
        return Row("all-reduce", "1 rank", "skipped", "a single rank sums with nobody")
    if not placed:
        return Row("all-reduce", where, "skipped", "the ranks cannot be placed now")
    try:
        num_nodes, times = try_sums(engine)
    except EngineError as error:
        return Row("all-reduce", where, "failed", str(error))
    return Row("all-reduce", f"{where}, {num_nodes} node{'s' if num_nodes > 1 else ''}", "ok", str(times))
