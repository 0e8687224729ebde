"""The manifests keep to their schemas, and what one of them names another one has."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from deployed import DEPLOY, SECRETS, read_dockerfile, read_services
from deployed_flags import LAUNCHER, ROUTER, launcher_flags, problem_of_command
from manifest_kinds import OWN

from sglang_tiered.flags import parse_bytes
from sglang_tiered.wire.keys import PEER, ROLES, load_keys, make_keys

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.37")
OWN_PODS = "server"
SET_BY_HAND = {"prefill-keys", "decode-keys", "peer-keys", "redis", "bucket", "hub"}


DOCUMENTS = [
    document
    for path in sorted(FOLDER.glob("**/*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if "kind" in document  # ``server.yaml`` is no manifest
]


def named(kind: str) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in DOCUMENTS if one["kind"] == kind}


WORKLOADS = named("StatefulSet") | named("Deployment")


def pod_of(name: str) -> Any:
    return WORKLOADS[name]["spec"]["template"]["spec"]


def main_of(name: str) -> Any:
    (container,) = pod_of(name)["containers"]
    return container


def labels_of(name: str) -> dict[str, str]:
    if name == OWN_PODS:  # of the user's own, behind a gateway
        return dict(named("Service")[name]["spec"]["selector"])
    return dict(WORKLOADS[name]["spec"]["template"]["metadata"]["labels"])


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_keep_to_their_schemas(version: str) -> None:
    assert len(DOCUMENTS) > 15
    for document in DOCUMENTS:
        if document["kind"] in OWN:
            msgspec.convert(document, OWN[document["kind"]])
        else:
            kubernetes_validate.validate(document, version, strict=True)


def args_of(name: str) -> list[str]:
    """The command of a workload, with the file of the map in the place of its mount."""
    mounted, own = "/etc/sglang-tiered/server.yaml", str(FOLDER / "server.yaml")
    return [str(word).replace(mounted, own) for word in main_of(name)["args"]]


def settings() -> dict[str, Any]:
    found = launcher_flags([f"--config={FOLDER / 'server.yaml'}"])
    return {
        name: parse_bytes(name, value, otherwise="") if name.endswith("_bytes") else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("name", [*ROLES, "router", "picker"])
def test_every_flag_exists_with_its_value(name: str) -> None:
    assert args_of(name)[:3] == LAUNCHER or args_of(name)[:5] == ROUTER
    assert problem_of_command(args_of(name)) == ""


def flag_names(words: list[str]) -> set[str]:
    return {match[1] for word in words if (match := re.match(r"--([\w-]+)", word))}


@pytest.mark.parametrize("name", [*ROLES, "router"])
def test_flags_are_those_that_start_here(name: str) -> None:
    """``test_deploy.py`` starts the compose file's commands."""
    started = flag_names(read_services(SECRETS)[name].command)
    config = yaml.safe_load((FOLDER / "server.yaml").read_text())
    mine = flag_names(args_of(name)) | (set(config) if name in ROLES else set())
    sizes = {"tier-host-bytes", "tier-nvme-bytes", "tier-object-ttl", "tier-object-bytes"}
    assert mine - sizes == started


def test_every_secret_is_one_that_the_page_makes() -> None:
    names = r'"secret(?:KeyRef|Ref)": {[^}]*"name": "([\w-]+)"|"secretName": "([\w-]+)"'
    found = re.findall(names, json.dumps(WORKLOADS, sort_keys=True))
    assert {one or other for one, other in found} == SET_BY_HAND
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    made = set(re.findall(r"create secret generic ([\w-]+)", page))
    assert made == SET_BY_HAND - {"hub"} and "`hub`" in page


def containers(pod: Any) -> list[Any]:
    return [*pod["containers"], *pod.get("initContainers", [])]


def chosen_by(selector: Any) -> set[str]:
    """The workloads that a selector of pods, or a monitor's of services, means."""

    def is_meant(labels: dict[str, str]) -> bool:
        asked = selector.get("matchExpressions", [])
        is_in = all(labels[one["key"]] in one["values"] for one in asked)
        return is_in and selector.get("matchLabels", {}).items() <= labels.items()

    found = {name for name in (*WORKLOADS, OWN_PODS) if is_meant(labels_of(name))}
    assert OWN_PODS in found or not found >= set(ROLES), "a whole server is both"
    return found


def test_every_pod_is_guarded() -> None:
    selectors = [one["spec"]["podSelector"] for one in named("NetworkPolicy").values()]
    guarded = set().union(*(chosen_by(selector) for selector in selectors if selector))
    assert guarded == {*WORKLOADS, OWN_PODS}


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_pods_keep_to_the_restricted_standard(name: str) -> None:
    """What ``pod-security.kubernetes.io/enforce: restricted`` of the namespace asks for."""
    pod = pod_of(name)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    _, stages = read_dockerfile()
    if name != "redis":
        user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        assert stages["cuda"].values("USER")[-1] == stages["router"].values("USER")[-1] == user


def quantity(text: str) -> int:
    return parse_bytes("quantity", text + "B", otherwise="")


def kv_claim(name: str) -> str:
    claims = WORKLOADS[name]["spec"]["volumeClaimTemplates"]
    (claim,) = [one["spec"] for one in claims if one["metadata"]["name"] == "kv"]
    assert claim["storageClassName"] in named("StorageClass")
    return str(claim["resources"]["requests"]["storage"])


@pytest.mark.parametrize("name", ROLES)
def test_tiers_fit_what_the_pod_may_take(name: str) -> None:
    sizes, pod = settings(), pod_of(name)
    memory = quantity(main_of(name)["resources"]["limits"]["memory"])
    (shm,) = [one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "shm"]
    assert sizes["tier_host_bytes"] + quantity(shm) + (16 << 30) <= memory
    assert quantity(kv_claim(name)) > sizes["tier_nvme_bytes"] + (256 << 20)
    (volume,) = named("PersistentVolume").values()
    assert quantity(volume["spec"]["capacity"]["storage"]) >= quantity(kv_claim(name))


@pytest.mark.parametrize("name", ROLES)
def test_keys_of_a_secret_are_taken(name: str, tmp_path: Path) -> None:
    """Laid out as kubelet does it for a group: links to files that the group can read, which a
    server refuses. The init container's own script runs."""
    other = ROLES[1 - ROLES.index(name)]
    made = tmp_path / "made"
    make_keys(made)
    make_keys(made, (PEER,))
    secrets = (("transfer", name, other), ("peer", "peer", "peer"))
    for secret, own, theirs in secrets:
        data = tmp_path / "secrets" / secret / "..data"
        data.mkdir(parents=True)
        for file in (f"{own}.key_secret", f"{theirs}.key"):
            (data / file).write_bytes((made / file).read_bytes())
            (data / file).chmod(0o440)
            (data.parent / file).symlink_to(Path("..data") / file)
    (tmp_path / "keys").mkdir()
    (container,) = pod_of(name)["initContainers"]
    script = re.sub(r"(?<= )/(secrets|keys)/", rf"{tmp_path}/\1/", container["command"][-1])
    subprocess.run([*container["command"][:-1], script], check=True, timeout=30)
    for directory, role in ((tmp_path / "keys/transfer", name), (tmp_path / "keys/peer", PEER)):
        load_keys(directory, role)
        assert stat.S_IMODE((directory / f"{role}.key_secret").stat().st_mode) == 0o600
    given = [w.partition("=")[2] for w in args_of(name) if "-keys=" in w]
    assert given == ["/keys/transfer", "/keys/peer"]
