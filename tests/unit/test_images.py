"""The Dockerfiles, as far as they can be read: what they copy exists, and they set what the code wants set."""

import os
import re
from pathlib import Path

import pytest
from rendered_chart import ROOT, merged

from cluster.launch.environment import CLUSTER_ENVIRONMENT
from cluster.launch.image import main

FILES = ("Dockerfile.cpu", "Dockerfile.gpu")
STARTER = "/opt/chunkserve/proxy/haproxy"


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_is_sent_to_the_builder(name: str) -> None:
    sources = [word for key, rest in instructions(name) if key == "COPY" for word in rest.split()[:-1]]
    assert {"scheduler", "workers", "cluster"} <= set(sources)
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in sources:
        assert (ROOT / source).exists()
        assert source in sent


@pytest.mark.parametrize("name", FILES)
def test_the_environment_is_the_codes(name: str) -> None:
    [variables] = [rest for key, rest in instructions(name) if key == "ENV"]
    proxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": STARTER}
    assert dict(word.split("=") for word in variables.split()) == CLUSTER_ENVIRONMENT | proxy
    assert any(f"cluster.launch.image {Path(STARTER).parent}" in rest for key, rest in instructions(name))


@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_the_user_of_the_chart(name: str) -> None:
    security = merged({})["security"]
    users = [rest for key, rest in instructions(name) if key == "USER"]
    assert users == [f"{security['runAsUser']}:{security['runAsGroup']}"]


def test_only_the_image_without_a_gpu_takes_torch_for_processors() -> None:
    indexes = {name: "whl/cpu" in (ROOT / name).read_text() for name in FILES}
    assert indexes == {"Dockerfile.cpu": True, "Dockerfile.gpu": False}


def test_the_proxys_starter_may_be_run_and_not_be_changed(tmp_path: Path) -> None:
    assert main(tmp_path / "proxy") == 0
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "proxy").iterdir()}
    assert modes == {"haproxy": 0o755, "proxy-rules": 0o644}
    assert os.access(tmp_path / "proxy" / "haproxy", os.X_OK)
