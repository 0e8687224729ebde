"""Images and compose file name only what exists: flags, paths, ports, variables, targets; and what
is misspelt is refused with one sentence."""

from __future__ import annotations

import fnmatch
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import (
    COMPOSE,
    DEPLOY,
    ROOT,
    SECRETS,
    MissingVariable,
    names_of_variables,
    read_dockerfile,
    read_services,
    words_of,
)
from deployed_flags import LAUNCHER, ROUTER, problem_of_command
from jsonschema.validators import validator_for

GPU = DEPLOY / "compose.gpu.yaml"
SERVICES = read_services(SECRETS)
ARGUMENTS, STAGES = read_dockerfile()
IMAGES = ("cpu", "cuda", "router")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [COMPOSE, GPU], ids=lambda path: path.name)
def test_compose_files_keep_to_their_schema(path: Path) -> None:
    place = "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(files("check_jsonschema").joinpath(place).read_text(encoding="utf-8"))
    validator_for(schema)(schema).validate(load(path))


PROMETHEUS = load(DEPLOY / "prometheus/prometheus.yml")


def test_prometheus_finds_the_alert_rules() -> None:
    """A glob that matches nothing is no error to Prometheus, and then nothing ever alerts."""
    (config, rules) = (mount for mount in SERVICES["prometheus"].mounts if mount.path is not None)
    assert SERVICES["prometheus"].command[0] == f"--config.file={config.target}"
    for pattern in PROMETHEUS["rule_files"]:
        inside = str(Path(config.target).parent / pattern)
        assert inside.startswith(rules.target + "/")
        assert rules.path is not None
        assert list(rules.path.glob(inside.removeprefix(rules.target + "/"))), pattern


def test_every_flag_exists_with_its_value() -> None:
    commands = {name: service.command for name, service in SERVICES.items()}
    commands |= {f"image {name}": words_of(*STAGES[name].values("CMD")) for name in IMAGES}
    judged = 0
    for place, command in commands.items():
        words = command
        if words[:3] == LAUNCHER or words[:5] == ROUTER:
            for mount in SERVICES[place].mounts if place in SERVICES else ():
                if mount.path is not None:  # the repository's own
                    words = [word.replace(mount.target, str(mount.path)) for word in words]
            assert not problem_of_command(words), place
            judged += 1
    assert judged == 6


def test_published_ports_are_exposed_and_local() -> None:
    for name, service in SERVICES.items():
        for words in service.record.get("ports", []):
            host, outside, inside = words.split(":")
            assert host == "127.0.0.1" and outside == inside, f"{name}: {words}"
            assert int(inside) in service.ports, f"{name}: {words}"


def test_every_secret_is_asked_for_in_a_sentence() -> None:
    asked = {name for name, how in names_of_variables(COMPOSE).items() if how.startswith(":?")}
    assert asked == set(SECRETS)
    for name in asked:
        with pytest.raises(MissingVariable, match=rf"^{name}: set it to a (new password|name) "):
            read_services({key: value for key, value in SECRETS.items() if key != name})
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for path in (COMPOSE, GPU):
        for name in names_of_variables(path):
            assert f"`{name}`" in page, f"{path.name}: README.md does not explain {name}"


def ignored(path: str) -> bool:
    """Whether the context leaves a path out, as BuildKit reads the file: the last match counts, and
    what is in a folder that matches does too."""
    found = False
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        whole = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        names = list(parts) if line.startswith("**/") else whole
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            found = not line.startswith("!")
    return found


def test_images_get_what_they_copy_and_no_secrets() -> None:
    for stage in STAGES.values():
        for source in stage.copied:
            assert (ROOT / source).exists(), f"{stage.name}: COPY {source}"
            assert not ignored(source), f"{stage.name}: COPY {source} is in Dockerfile.dockerignore"
    for path in (".git/config", ".venv/bin/python", "keys/peer.key_secret", "python/__pycache__/y"):
        assert ignored(path)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_nobody_and_is_watched(name: str) -> None:
    stage, service = STAGES[name], SERVICES["router" if name == "router" else "prefill"]
    assert stage.values("USER")[-1] == "10001:10001"
    assert [words_of(each) for each in stage.values("ENTRYPOINT")] == [["/usr/bin/tini", "--"]]
    (health,) = stage.values("HEALTHCHECK")
    words = words_of(health.partition("CMD ")[2])
    assert words == service.health and words[0] == "python3"
    assert {int(port) for port in stage.values("EXPOSE")[0].split()} == set(service.ports)
    if name != "router":
        assert words[1] in stage.copied.values()
        assert stage.values("VOLUME") == ["/kv"]
