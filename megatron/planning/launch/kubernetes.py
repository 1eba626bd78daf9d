"""Kubernetes manifests: an indexed Job, and PyTorchJob and TrainJob of Kubeflow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.errors import ConfigError
from megatron.planning.launch.launch_file import LaunchFile, Mount, Said, size_in_bytes, whole

KINDS = ("Job", "PyTorchJob", "TrainJob")
_DEFAULT_GRACE = 30
_DEFAULT_SHARED_MEMORY = 64 * 2**20
_GPUS = "nvidia.com/gpu"
_PRODUCT = "nvidia.com/gpu.product"
_HEALTH = re.compile(r"check_health\.py\s+(\S+)")


def read_manifest(path: str, documents: Sequence[Mapping[str, Any]]) -> LaunchFile:
    """The one Job, PyTorchJob or TrainJob among the ``documents`` of a manifest. Raises ConfigError."""
    jobs = [each for each in documents if each.get("kind") in KINDS]
    if len(jobs) != 1:
        kinds = ", ".join(str(each.get("kind")) for each in documents)
        raise ConfigError(
            f"--launch-file {path} has {len(jobs)} jobs ({kinds}); it must have one "
            f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    (job,) = jobs
    spec = _mapping(job, "spec")
    if job["kind"] == "Job":
        return _indexed_job(path, job, spec, documents)
    if job["kind"] == "PyTorchJob":
        return _pytorch_job(path, spec)
    return _train_job(path, spec, documents)


def _indexed_job(
    path: str, job: Mapping[str, Any], spec: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]
) -> LaunchFile:
    pod = _mapping(spec, "template", "spec")
    found = _Pod(path, pod, _containers(pod, path)[0])
    nodes = tuple(
        Said(whole(spec.get(name, 1), where=f"{path}: {name}"), name) for name in ("completions", "parallelism")
    )
    problems = [*_checks(path, pod, found)]
    if nodes[0].value > 1:
        problems += _rendezvous(str(_mapping(job, "metadata").get("name")), spec, pod, found.variables, documents)
    return found.launch_file("an indexed Job", nodes=nodes, problems=problems)


def _checks(path: str, pod: Mapping[str, Any], training: _Pod) -> Iterator[str]:
    """Reasons why an init container with ``--dry-run`` checks other settings than those that are trained with."""
    for container in pod.get("initContainers") or []:
        check = _Pod(path, pod, container)
        if "--dry-run" not in check.words:
            continue
        words = [word for word in check.words if word not in ("--dry-run", "--no-check-files")]
        if words != [*training.words]:
            yield (
                f"the init container {check.name} checks {' '.join(words)}, and {training.name} starts "
                f"{' '.join(training.words)}; make them agree"
            )
        for name in sorted({*check.variables} | {*training.variables}):
            checked, used = check.variables.get(name), training.variables.get(name)
            if checked != used:
                yield (
                    f"the variable {name} of the init container {check.name} is {checked}, and that of "
                    f"{training.name} is {used}; make them agree"
                )


def _rendezvous(
    name: str,
    spec: Mapping[str, Any],
    pod: Mapping[str, Any],
    variables: Mapping[str, str],
    documents: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    """Reasons why the pods of an indexed Job would not find node 0."""
    if spec.get("completionMode") != "Indexed":
        yield "completionMode is not Indexed, and then pods have no numbers and node 0 no name; set it"
    services = {
        str(_mapping(each, "metadata").get("name"))
        for each in documents
        if each.get("kind") == "Service" and str(_mapping(each, "spec").get("clusterIP")) == "None"
    }
    subdomain = pod.get("subdomain")
    if subdomain not in services:
        yield (
            f"the pods' subdomain is {subdomain}, and the file has {'the headless Service ' if services else ''}"
            f"{', '.join(sorted(services)) or 'no headless Service'}; node 0 has a name only where they agree"
        )
    expected, address = f"{name}-0.{subdomain}", variables.get("MASTER_ADDR", "")
    if address.split(".svc")[0] != expected:
        yield f"MASTER_ADDR is {address or 'not set'}, and node 0 is {expected}; set MASTER_ADDR to it"


def _pytorch_job(path: str, spec: Mapping[str, Any]) -> LaunchFile:
    replicas = _mapping(spec, "pytorchReplicaSpecs")
    if not replicas:
        raise ConfigError(
            f"--launch-file {path} has no pytorchReplicaSpecs; it must have Master, and Worker for more nodes"
        )
    pods, problems = {}, []
    for role, replica in replicas.items():
        pod = _mapping(replica, "template", "spec")
        named = [each for each in _containers(pod, path) if each.get("name") == "pytorch"]
        if not named:
            problems.append(f"{role} has no container named pytorch, and the training operator looks for that one")
        pods[role] = _Pod(path, pod, (named or _containers(pod, path))[0])
    first = next(iter(pods.values()))
    for role, each in pods.items():
        for what in ("words", "variables", "image", "gpus"):
            if getattr(each, what) != getattr(first, what):
                problems.append(f"{what} of {role} are not those of {next(iter(pods))}: every node must start the same")
    count = sum(whole(each.get("replicas", 1), where=f"{path}: replicas of {role}") for role, each in replicas.items())
    nodes = (Said(count, f"replicas of {' and '.join(replicas)}"),)
    per_node = spec.get("nprocPerNode")
    ranks = (
        ()
        if per_node in (None, "auto", "gpu")
        else (Said(whole(per_node, where=f"{path}: nprocPerNode"), "nprocPerNode"),)
    )
    return first.launch_file("a PyTorchJob", nodes=nodes, ranks=ranks, problems=problems)


def _train_job(path: str, spec: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> LaunchFile:
    trainer, name = _mapping(spec, "trainer"), _mapping(spec, "runtimeRef").get("name")
    runtimes = {
        str(_mapping(each, "metadata").get("name")): each
        for each in documents
        if "TrainingRuntime" in str(each.get("kind"))
    }
    if name not in runtimes:
        raise ConfigError(
            f"--launch-file {path}: the runtime {name} of the TrainJob is not in the file; add its TrainingRuntime, "
            "which says memory, mounts and times"
        )
    jobs = _mapping(runtimes[str(name)], "spec", "template", "spec").get("replicatedJobs") or []
    pod = next(
        (_mapping(each, "template", "spec", "template", "spec") for each in jobs if each.get("name") == "node"), None
    )
    if pod is None:
        raise ConfigError(f"--launch-file {path}: the runtime {name} has no replicated job named node, which trains")
    container = next((each for each in _containers(pod, path) if each.get("name") == "node"), _containers(pod, path)[0])
    merged: dict[str, Any] = dict(container)
    merged |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    merged["env"] = [*(container.get("env") or []), *(trainer.get("env") or [])]
    merged["resources"] = trainer.get("resourcesPerNode") or container.get("resources")
    nodes = (Said(whole(trainer.get("numNodes", 1), where=f"{path}: numNodes"), "numNodes"),)
    per_node = trainer.get("numProcPerNode")
    ranks = () if per_node is None else (Said(whole(per_node, where=f"{path}: numProcPerNode"), "numProcPerNode"),)
    return _Pod(path, pod, merged).launch_file("a TrainJob", nodes=nodes, ranks=ranks)


class _Pod:
    """A pod's container that trains."""

    def __init__(self, path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
        self._path, self._pod, self._container = path, pod, container
        self.name, self.image = container.get("name"), container.get("image")
        self.words = tuple(str(word) for name in ("command", "args") for word in container.get(name) or [])
        self.variables = {
            str(each["name"]): str(each["value"]) for each in container.get("env") or [] if "value" in each
        }
        resources = _mapping(container, "resources")
        self._requests = _mapping(resources, "requests")
        self._limits = {**self._requests, **_mapping(resources, "limits")}
        self.gpus = self._limits.get(_GPUS)

    def launch_file(
        self,
        kind: str,
        *,
        nodes: tuple[Said[int], ...],
        ranks: tuple[Said[int], ...] = (),
        problems: Sequence[str] = (),
    ) -> LaunchFile:
        """What the pod and the job around it say."""
        path, variables = self._path, self.variables
        if "NODES" in variables:
            nodes = (*nodes, Said(whole(variables["NODES"], where=f"{path}: the variable NODES"), "the variable NODES"))
        if self.gpus is not None:
            ranks = (*ranks, Said(whole(self.gpus, where=f"{path}: {_GPUS}"), f"the limit {_GPUS}"))
        if "GPUS_PER_NODE" in variables:
            where = "the variable GPUS_PER_NODE"
            ranks = (*ranks, Said(whole(variables["GPUS_PER_NODE"], where=f"{path}: {where}"), where))
        product = _mapping(self._pod, "nodeSelector").get(_PRODUCT)
        memory = self._limits.get("memory")
        grace = self._pod.get("terminationGracePeriodSeconds")
        where = "terminationGracePeriodSeconds" if grace is not None else "the default terminationGracePeriodSeconds"
        return LaunchFile(
            path=path,
            kind=kind,
            nodes=nodes,
            ranks_per_node=ranks,
            gpu=None if product is None else Said(str(product), _PRODUCT),
            memory=None if memory is None else Said(size_in_bytes(memory, where=f"{path}: memory"), "the limit memory"),
            shared_memory=self._shared_memory(),
            grace=Said(_DEFAULT_GRACE if grace is None else whole(grace, where=f"{path}: {where}"), where),
            mounts=tuple(self._mounts()),
            variables=variables,
            words=self.words,
            health=tuple(self._health()),
            stops_early="pods are evicted and preempted",
            problems=(*problems, *self._requests_that_no_limit_allows()),
        )

    def _requests_that_no_limit_allows(self) -> Iterator[str]:
        asked, limit = self._requests.get("memory"), self._limits.get("memory")
        where = f"{self._path}: memory"
        if asked is not None and size_in_bytes(asked, where=where) > size_in_bytes(limit, where=where):
            yield f"the request of memory {asked} is above its limit {limit}: Kubernetes takes no such pod"
        if self._requests.get(_GPUS, self.gpus) != self.gpus:
            yield f"the request of {_GPUS} {self._requests[_GPUS]} is not its limit {self.gpus}: give the limit alone"

    def _volumes(self) -> dict[str, Mapping[str, Any]]:
        return {str(each.get("name")): each for each in self._pod.get("volumes") or []}

    def _mounts(self) -> Iterator[Mount]:
        volumes = self._volumes()
        for each in self._container.get("volumeMounts") or []:
            volume = volumes.get(str(each.get("name")), {})
            claim = _mapping(volume, "persistentVolumeClaim")
            yield Mount(
                path=str(each.get("mountPath")),
                where=f"the volume {each.get('name')}",
                read_only=bool(each.get("readOnly") or claim.get("readOnly")),
                lasts="emptyDir" not in volume,
            )

    def _shared_memory(self) -> Said[int]:
        volumes = self._volumes()
        for each in self._container.get("volumeMounts") or []:
            if each.get("mountPath") == "/dev/shm":
                name = str(each.get("name"))
                limit = _mapping(volumes.get(name, {}), "emptyDir").get("sizeLimit", self._limits.get("memory", "1Pi"))
                return Said(size_in_bytes(limit, where=f"{self._path}: sizeLimit of {name}"), f"the volume {name}")
        return Said(_DEFAULT_SHARED_MEMORY, "no volume at /dev/shm")

    def _health(self) -> Iterator[Said[str]]:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            command = " ".join(map(str, _mapping(self._container, probe, "exec").get("command") or []))
            if found := _HEALTH.search(command):
                yield Said(found[1].strip("'\""), probe)


def _containers(pod: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    found = [each for each in pod.get("containers") or [] if isinstance(each, Mapping)]
    if not found:
        raise ConfigError(f"--launch-file {path} has a pod without containers; name the one that trains")
    return found


def _mapping(value: object, *keys: str) -> dict[str, Any]:
    """What lies at ``keys``; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}
