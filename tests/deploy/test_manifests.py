"""The manifests of Kubernetes: their syntax, and that they name what the commands and the server have."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitascope.cli import COMMANDS
from vitascope.cli.parsing import parse
from vitascope.deploy.server.settings import TOKEN, Settings

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


class StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{keys} at {node.start_mark}"
        return super().construct_mapping(node, deep)


def documents(name: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy" / "kubernetes" / name).read_text(encoding="utf-8")
    found = list(yaml.load_all(text, StrictLoader))
    assert all(document.keys() == {"apiVersion", "kind", "metadata", "spec"} for document in found)
    kinds = {document["kind"]: document for document in found}
    assert len(kinds) == len(found)
    return kinds


@pytest.fixture
def serving() -> dict[str, dict[str, Any]]:
    return documents("serve.yaml")


@pytest.fixture
def container(serving: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = serving["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture
def settings(container: dict[str, Any]) -> Settings:
    return parsed([*container["command"], *container["args"]]).settings


def parsed(words: list[str]) -> Any:
    """A command with its options; a UserError for a flag that does not exist."""
    program, command, *arguments = words
    assert program == "vitascope"
    return parse(COMMANDS[command], command, arguments)


def test_every_file_is_tested_and_its_comments_name_it() -> None:
    assert [path.name for path in FILES] == ["predict.yaml", "serve.yaml"]
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert f"kubectl apply -f deploy/kubernetes/{path.name}" in text
        (extras,) = re.findall(r"--build-arg EXTRAS=(\S+)", text)
        for extra in extras.split(","):
            assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_server_is_started_with_flags_that_exist(container: dict[str, Any]) -> None:
    command = parsed([*container["command"], *container["args"]])
    assert command.settings.host == "0.0.0.0"
    assert command.models == ("/models/current",)
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/models"]


def test_ports_are_those_of_the_server(serving, container, settings) -> None:
    (port,) = container["ports"]
    assert settings.port == port["containerPort"]
    named = [container[probe]["httpGet"]["port"] for probe in PROBES]
    named += [each["targetPort"] for each in serving["Service"]["spec"]["ports"]]
    named += [each["port"] for each in serving["PodMonitor"]["spec"]["podMetricsEndpoints"]]
    assert set(named) == {port["name"]}


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_paths_answer_and_the_metric_is_there(serving, container, monkeypatch) -> None:
    pytest.importorskip("fastapi", reason="fastapi is not installed (vitascope[server])")
    from tests.deploy.server import served

    monkeypatch.setattr("vitascope.deploy.server.service.DecoderPool", served.DecodersInThreads)
    (endpoint,) = serving["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (metric,) = serving["HorizontalPodAutoscaler"]["spec"]["metrics"]

    async def story() -> None:
        async with served.serving(served.HeldEngine(), "secret") as client:
            for path in {container[probe]["httpGet"]["path"] for probe in PROBES}:
                assert (await client.get(path)).status_code == 200
            assert (await client.get(endpoint["path"])).status_code == 401
            text = (await client.get(endpoint["path"], headers={"Authorization": "Bearer secret"})).text
        assert f"\n# TYPE {metric['pods']['metric']['name']} gauge\n" in text

    served.play(story())


def test_labels_and_names_fit_together(serving: dict[str, dict[str, Any]], container: dict[str, Any]) -> None:
    labels = serving["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert serving["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert serving["Service"]["spec"]["selector"] == labels
    assert serving["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    target = serving["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    deployment = serving["Deployment"]
    assert target == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    (variable,) = container["env"]
    secret = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == TOKEN
    (endpoint,) = serving["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == secret
    assert "replicas" not in deployment["spec"]  # each apply would undo the autoscaler


def test_stopping_ends_in_time_and_servers_are_added_before_requests_are_rejected(
    serving: dict[str, dict[str, Any]], container: dict[str, Any], settings: Settings
) -> None:
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert (
        settings.grace_s + waits
        < serving["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
    (metric,) = serving["HorizontalPodAutoscaler"]["spec"]["metrics"]
    target = int(metric["pods"]["target"]["averageValue"])
    assert settings.max_batch <= target < settings.queue


def test_bulk_job_has_flags_that_exist_one_folder_and_the_tested_version_of_ray() -> None:
    spec = documents("predict.yaml")["RayJob"]["spec"]
    line, _, otherwise = spec["entrypoint"].partition(" || ")
    assert otherwise == "test $? -eq 1"  # the status of a complete file with unreadable images
    command = parsed(shlex.split(line))
    assert (command.cluster.engine, command.cluster.ray_address, command.resume) == ("ray", "auto", True)
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for pod in pods:
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
        for place in (command.model, *command.images, str(command.out)):
            assert place.startswith(f"{mount['mountPath']}/")
    assert f"\nray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
