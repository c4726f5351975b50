"""Two nodes (a raylet each): ranks on both give the tokens of one rank, and what cannot be placed is told at once."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import DEADLINE, PROMPTS, all_gone, expected_tokens, generate, settings
from served_model import write_served_model

from cluster.engine.executor import NoRoom
from cluster.engine.ray_executor import RayExecutor
from cluster.launch.local_ray import free_ports
from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
NODE_CPUS = 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with two logical CPUs each, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as folder:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_kill_worker_timeout_milliseconds", "500")
        environment.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        cluster = Cluster(shutdown_at_exit=False)
        try:
            cluster.add_node(num_cpus=NODE_CPUS, include_dashboard=False, temp_dir=folder)
            cluster.add_node(num_cpus=NODE_CPUS)
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield str(cluster.address)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.usefixtures("address")
async def test_two_ranks_on_two_nodes_give_the_tokens_of_one(caplog: pytest.LogCaptureFixture) -> None:
    engine_settings = replace(settings(2), rank_cpus=NODE_CPUS, placement="spread")
    executor = RayExecutor(engine_settings)
    with caplog.at_level(logging.INFO, logger="cluster.engine.ray_executor"):
        assert await generate(executor, engine_settings) == expected_tokens()
    assert "ranks are on nodes" in caplog.text
    await all_gone(executor.process_ids())


@pytest.mark.usefixtures("address")
async def test_a_lost_rank_is_replaced_on_its_node() -> None:
    executor = RayExecutor(replace(settings(2), rank_cpus=NODE_CPUS, placement="spread"))
    await executor.start()
    first = executor.process_ids()
    os.kill(first[1], signal.SIGKILL)
    await executor.restart()
    new = NewRequest("a", PROMPTS[0], len(PROMPTS[0]), SamplingParams(max_tokens=1, temperature=0.0), [0], 0)
    plan = StepPlan(0, 0, {"a": len(PROMPTS[0])}, [new])
    result = await asyncio.wait_for(executor.execute_step(plan, DEADLINE), DEADLINE)
    assert result.sampled_token_ids == {"a": expected_tokens()[0][:1]}
    await executor.shutdown()
    await all_gone(first + executor.process_ids())


@pytest.mark.usefixtures("address")
async def test_ranks_are_not_spread_unless_that_is_asked_for() -> None:
    engine_settings = replace(settings(2), rank_cpus=NODE_CPUS)
    engine_settings = replace(engine_settings, deadlines=replace(engine_settings.deadlines, place=1.0))
    with pytest.raises(NoRoom, match="no room in the cluster for 2 ranks"):
        await RayExecutor(engine_settings).start()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_served_model(tmp_path_factory.mktemp("model")))


def chunkserve(command: str, address: str, model: str, *words: str) -> subprocess.CompletedProcess[str]:
    port = free_ports(1)[0]
    arguments = [command, "--address", address, f"model.path={model}", f"server.port={port}", "cache.memory_gb=0.1"]
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments, "parallel.tensor_parallel_size=2", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )


REASON = (
    "no single node has room for an engine (parallel.tensor_parallel_size=2, parallel.placement=pack),"
    " which takes 3 CPUs"
)


def test_preflight_finds_what_works(address: str, model: str) -> None:
    done = chunkserve("preflight", address, model, "parallel.placement=spread")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    checks = ["check", "model", "placement", "versions", "versions", "model", "model", "server", "links", "links"]
    assert [row[0] for row in rows] == [*checks, "all-reduce"]
    assert "failed" not in done.stdout
    assert rows[-1][1:6] == ["2", "ranks,", "2", "nodes", "ok"]
    assert "over shared memory: 4 KiB in" in done.stdout  # raylets of one machine
    assert "2 nodes reached" in done.stdout


def test_preflight_and_serve_tell_the_same_reason(address: str, model: str) -> None:
    done = chunkserve("preflight", address, model)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if " failed " in line]
    assert row.startswith("placement")
    assert REASON in row
    assert "the ranks cannot be placed now" in done.stdout
    served = chunkserve("serve", address, model)
    assert served.returncode == 1
    assert f"the application cannot be placed: {REASON}" in served.stderr
    assert "parallel.placement=spread lets ranks be on several nodes" in served.stderr
