"""Commands of container runtimes: what is recognised, and what is added to them."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.drivers.local import container_runtime
from autoscaler.drivers.local.container_runtime import (
    OUTPUT_BYTES_MAX,
    ContainerRun,
    RuntimeFailedError,
    check_command,
    describe_status,
    label_command,
    list_containers,
    publishes_to_network,
    read_container_run,
    with_destination,
)
from autoscaler.spec.engine_definition import EngineError


@pytest.mark.parametrize(
    ("command", "client"),
    [
        ("docker run -p 80:80 image", "docker"),
        ("/usr/bin/podman run image", "/usr/bin/podman"),
        ("podman container run image", "podman"),
        ("sudo -n docker --context gpu run image", "sudo -n docker --context gpu"),
        ("sudo -u root docker run image", "sudo -u root docker"),
        ("env DOCKER_HOST=unix:///a.sock docker --debug run image", "env DOCKER_HOST=unix:///a.sock docker --debug"),
        ("docker --context=gpu run image", "docker --context=gpu"),
        ("docker --context container run image", "docker --context container"),
        ("nice -n 5 timeout 90s docker run image", "nice -n 5 timeout 90s docker"),
        ("timeout -s KILL 30 docker run image", "timeout -s KILL 30 docker"),
        ("sudo ionice -c 2 nohup podman run image", "sudo ionice -c 2 nohup podman"),
        ("nerdctl --namespace x run image run", "nerdctl --namespace x"),
        ("docker compose run service", "docker"),
        ("docker --debug compose --file a.yml --profile gpu run service", "docker --debug"),
        ("sudo podman compose -p name run service", "sudo podman"),
        ("nerdctl compose run service", "nerdctl"),
        ("docker-compose run service", "docker"),
        ("sudo -n /usr/bin/docker-compose -f a.yml run service", "sudo -n docker"),
    ],
)
def test_command_that_runs_a_container_is_recognised(command: str, client: str) -> None:
    run = read_container_run(command.split())
    assert run is not None
    assert run.client == tuple(client.split())
    assert " ".join(run.command) == command.partition(" run ")[0] + " run"
    assert run.options == tuple(command.split(" run ", 1)[1].split())


@pytest.mark.parametrize(
    "command",
    [
        "llama-server --port 80",
        "docker start name",
        "docker compose up run",
        "docker compose exec service run",
        "docker compose compose run",
        "docker-compose compose run",
        "docker-compose up service",
        "docker exec name run",
        "docker image run",
        "docker container exec name run",
        "docker container",
        "sudo",
        "sudo llama-server docker run",
        "run docker",
        "serve --run docker",
        "vllm serve /models/podman --mode run",
        "llama-server --alias docker run",
    ],
)
def test_command_that_does_not_run_a_container_is_not_recognised(command: str) -> None:
    assert read_container_run(command.split()) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("docker run -p 9000:8080 image", True),
        ("docker run -p9000:8080/tcp image", True),
        ("docker run --publish=0.0.0.0:9000:8080 image", True),
        ("docker run --publish [::]:9000:8080 image", True),
        ("docker run -p :::9000:8080 image", True),
        ("docker run -itp 8000-8010:8000-8010 image", True),
        ("docker run -P image", True),
        ("docker run -p 127.0.0.1:9000:8080 image", False),
        ("docker run -p [::1]:9000:8080 image", False),
        ("docker run --network host image --port 9000 -p text:9", False),
        ("docker run image -p", False),
    ],
)
def test_published_port_is_open_to_the_network_unless_its_address_is_local(command: str, expected: bool) -> None:
    run = read_container_run(command.split())
    assert run is not None
    assert publishes_to_network(run) is expected


@pytest.mark.parametrize("output", ["--all", "0123456789ab --volumes", "\x1b[2J", "0123456789AB", "é" * 12, "x" * 64])
async def test_output_that_is_not_a_list_of_container_ids_is_an_error(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[tuple[str, ...]]()

    async def command(words: tuple[str, ...]) -> str:
        commands.append(words)
        return output

    monkeypatch.setattr(container_runtime, "_command", command)
    with pytest.raises(RuntimeFailedError, match=r"^docker ps wrote something else than ids of containers$"):
        await list_containers(("docker",), "i/r1")
    assert [words[1] for words in commands] == ["ps"]


@pytest.mark.parametrize(("size", "kept"), [(10, 10), (3 * OUTPUT_BYTES_MAX, OUTPUT_BYTES_MAX + 1)])
async def test_output_of_a_runtime_is_read_to_its_end_and_kept_up_to_a_limit(size: int, kept: int) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(bytes(size))
    stream.feed_eof()
    assert len(await container_runtime._read_limited(stream)) == kept
    assert stream.at_eof()


def test_labelled_command_passes_secrets_by_name_and_devices_by_value() -> None:
    run = ContainerRun(("sudo", "podman"), ("sudo", "podman", "run"), ("--label", "a=b", "image", "--port", "80"))
    words = label_command(run, "i/r1", ["TOKEN", "DOCKER_HOST"], {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert " ".join(words) == (
        "sudo podman run -l dev.pilotlight.replica=i/r1 -e CUDA_VISIBLE_DEVICES=GPU-1 "
        "-e PILOTLIGHT_REPLICA=i/r1 -e TOKEN --label a=b image --port 80"
    )


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("systemd-run --user llama-server --port 80", "add --scope"),
        ("sudo /usr/bin/systemd-run -p MemoryMax=8G llama-server --port 80", "add --scope"),
        ("podman-compose run --publish 127.0.0.1:80:80 service", "use podman or docker compose"),
    ],
)
def test_command_whose_processes_cannot_be_managed_is_rejected_with_a_fix(command: str, fix: str) -> None:
    with pytest.raises(EngineError, match=rf"^spec\.command: .*; {fix}$"):
        check_command(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "systemd-run --user --scope -p MemoryMax=8G llama-server --port 80",
        "llama-server --alias systemd-run --port 80",
        "docker compose run service",
    ],
)
def test_command_whose_processes_can_be_managed_is_accepted(command: str) -> None:
    check_command(command.split())


def test_docker_host_of_the_model_is_passed_to_later_container_commands() -> None:
    assert with_destination(("docker",), {"TOKEN": "secret"}) == ("docker",)
    assert with_destination(("docker",), {"DOCKER_HOST": "unix:///a.sock", "TOKEN": "secret"}) == (
        "env", "DOCKER_HOST=unix:///a.sock", "docker",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("exited with status 137", "exited with status 137 (SIGKILL)"),
        ("exited with status 255", "exited with status 255"),
        ("exited with status 1", "exited with status 1"),
        ("was killed by SIGTERM", "was killed by SIGTERM"),
    ],
)
def test_container_exit_status_caused_by_a_signal_shows_the_signal_name(how: str, expected: str) -> None:
    assert describe_status(how) == expected
