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
from deployed import DEPLOY, SECRETS, read_dockerfile, read_services, unread
from deployed_flags import LAUNCHER, ROUTER, launcher_flags, ports_of, problem_of_command
from manifest_kinds import OWN, Kustomization

from kit.commands import ran
from sglang_tiered.flags import parse_bytes
from sglang_tiered.route.envoy import OWN_HEADERS
from sglang_tiered.route.settings import Source
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


KUSTOMIZATIONS = {
    str(path.parent.relative_to(FOLDER)): msgspec.yaml.decode(path.read_bytes(), type=Kustomization)
    for path in FOLDER.glob("**/kustomization.yaml")
}


def test_every_file_is_in_one_kustomization() -> None:
    """One that is in none is never applied, and nobody is told; and a folder in its own resource
    is a cycle to kustomize, which refuses all of it."""
    listed = []
    for folder, one in KUSTOMIZATIONS.items():
        made = [file for generated in one.configMapGenerator for file in generated.files]
        paths = [(FOLDER / folder / name).resolve() for name in (*one.resources, *made)]
        listed += [path for path in paths if not path.is_dir()]
        within = [*paths, *((FOLDER / folder / name).resolve() for name in one.components)]
        assert not {*within} & {*(FOLDER / folder / "x").parents}
    there = {path for path in FOLDER.glob("**/*.yaml") if path.name != "kustomization.yaml"}
    assert sorted(listed) == sorted(there)
    images = {image.name: image for image in KUSTOMIZATIONS["."].images}
    assert {image.newTag for image in images.values()} <= read_dockerfile()[1].keys()
    used = {c["image"] for name in WORKLOADS for c in containers(pod_of(name))}
    assert used == set(images) | {read_services(SECRETS)["redis"].record["image"]}


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


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_ports_of_commands_probes_and_services_agree(name: str) -> None:
    container = main_of(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports_of(name, [str(word) for word in container["args"]]) == sorted(ports.values())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        how = container.get(probe, {})
        port = (how.get("httpGet") or how.get("tcpSocket") or {}).get("port")
        assert port is None or port in ports, f"{name}: {probe}: {port}"
        words = " ".join(how.get("exec", {}).get("command", []))
        assert {int(n) for n in re.findall(r"(?<=[: ])\d{4,5}\b", words)} <= {*ports.values()}
    service = named("Service")[name]
    assert service["spec"]["selector"].items() <= labels_of(name).items()
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"], f"{name}: {port}"
    if name in ROLES:  # ready only with its tiers, and alive for as long as SGLang has patience
        script = Path(container["readinessProbe"]["exec"]["command"][1])
        assert read_dockerfile()[1]["cuda"].copied[f"deploy/{script.name}"] == str(script)
        assert container["livenessProbe"]["timeoutSeconds"] > 20


def test_the_router_finds_pods_and_outlasts_them() -> None:
    counts = dict.fromkeys(ROLES, 0)
    for url in Source(str(FOLDER / "servers.yaml")).read() or []:
        found = re.fullmatch(r"http://([a-z]+)-(\d+)\.([a-z]+):(\d+)", url)
        assert found and WORKLOADS[found[1]]["spec"]["serviceName"] == found[3]
        assert named("Service")[found[3]]["spec"]["clusterIP"] == "None"
        assert int(found[4]) in {port["containerPort"] for port in main_of(found[1])["ports"]}
        counts[found[1]] += 1
    assert counts == {role: WORKLOADS[role]["spec"]["replicas"] for role in ROLES}
    (drain,) = [word.partition("=")[2] for word in args_of("router") if "--drain=" in word]
    servers = {pod_of(name)["terminationGracePeriodSeconds"] for name in ROLES}
    until_killed = pod_of("router")["terminationGracePeriodSeconds"]
    assert until_killed > int(drain.rstrip("s")) >= max(servers)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_variables_and_mounts_are_what_runs_needs(name: str) -> None:
    pod, main, defined = pod_of(name), main_of(name), list[str]()
    values = [one.get("value", "") for one in main.get("env", [])]
    for variable in main.get("env", []):
        read = any(f"$({variable['name']})" in value for value in values)
        assert read or not unread([variable["name"]], str(main["args"][-1])), variable
        # Kubernetes fills in only what stands before it.
        assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= set(defined)
        defined.append(variable["name"])
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    claims = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
    volumes |= {claim["metadata"]["name"] for claim in claims}
    mounted = [m for c in containers(pod) for m in c.get("volumeMounts", [])]
    assert {mount["name"] for mount in mounted} == volumes
    paths = [mount["mountPath"] for mount in main.get("volumeMounts", [])]
    for word in main["args"]:
        if found := re.match(r"--\S+?=(/\S+)", word):
            assert any(Path(found[1]).is_relative_to(path) for path in paths), f"{name}: {word}"
    maps = {made.name for made in KUSTOMIZATIONS["."].configMapGenerator}
    assert {v["configMap"]["name"] for v in pod.get("volumes", []) if "configMap" in v} <= maps


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


def test_selectors_choose_what_they_mean() -> None:
    for name, workload in WORKLOADS.items():
        assert workload["spec"]["selector"]["matchLabels"] == labels_of(name)
    for name, budget in named("PodDisruptionBudget").items():
        assert budget["spec"]["selector"]["matchLabels"] == labels_of(name)
    selectors = [one["spec"]["podSelector"] for one in named("NetworkPolicy").values()]
    guarded = set().union(*(chosen_by(selector) for selector in selectors if selector))
    assert guarded == {*WORKLOADS, OWN_PODS}


def callers(pod: str, port: str) -> set[str]:
    """Who reaches a port of a pod, as the policies say."""
    number = {one["name"]: one["containerPort"] for one in main_of(pod)["ports"]}
    found = set[str]()
    for policy in named("NetworkPolicy").values():
        if pod in chosen_by(policy["spec"]["podSelector"]):
            for rule in policy["spec"].get("ingress", []):
                for let in rule["ports"]:
                    first = number.get(let["port"], let["port"])
                    if first <= number[port] <= let.get("endPort", first):
                        for peer in rule["from"]:
                            one = peer.get("podSelector") or peer["namespaceSelector"]
                            namespace = {*one.get("matchLabels", {}).values()}
                            found |= chosen_by(one) if "podSelector" in peer else namespace
    return found


def test_policies_let_in_who_must_call() -> None:
    for role in ROLES:
        assert callers(role, "http") == {"router", "monitoring"}
        assert callers(role, "peer") >= {*ROLES}
    assert callers("prefill", "bootstrap") == {"decode"}
    assert callers("prefill", "events") & callers("prefill", "replay") >= {"router"}
    assert callers("redis", "redis") >= {*ROLES}
    assert callers("router", "http") == callers("picker", "picker") == {"gateway"}
    assert callers("router", "metrics") == callers("picker", "metrics") == {"monitoring"}


def test_every_server_is_scraped() -> None:
    scraped = set()
    for monitor in named("ServiceMonitor").values():
        for name in chosen_by(monitor["spec"]["selector"]):
            service = named("Service")[name]
            if name in (*ROLES, OWN_PODS):  # as the alerts know servers
                job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
                assert job.startswith("sglang-tiered")
            assert service["metadata"]["labels"].items() <= labels_of(name).items()
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert {one["port"] for one in monitor["spec"]["endpoints"]} <= ports
            scraped.add(name)
    assert scraped == {*ROLES, OWN_PODS, "router", "picker"}


def test_a_gateway_finds_picker_and_servers() -> None:
    (pool,), (route,) = (named(kind).values() for kind in ("InferencePool", "HTTPRoute"))
    ref, (rule,) = pool["spec"]["endpointPickerRef"], route["spec"]["rules"]
    ports = named("Service")[ref["name"]]["spec"]["ports"]
    assert ref["port"]["number"] in {port["port"] for port in ports}
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    servers = named("Service")[OWN_PODS]["spec"]
    assert servers["selector"] == pool["spec"]["selector"]["matchLabels"]
    assert f"--servers=dns://{OWN_PODS}:{servers['ports'][0]['port']}" in args_of("picker")
    assert set(rule["filters"][0]["requestHeaderModifier"]["remove"]) <= set(OWN_HEADERS)


def test_the_operator_gets_the_alert_rules_whole() -> None:
    """What the page's command hands to ``kubectl``."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"(?m)^(awk .*?) \| kubectl .* apply -f -$", text)
    made = ran("bash", "-ceu", command, cwd=DEPLOY.parent, check=True)
    alerts = (DEPLOY.parent / "scripts/grafana/alerts.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(made.stdout)["spec"] == yaml.safe_load(alerts)


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
