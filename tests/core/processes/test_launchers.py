"""What the environment says of a process."""

import re

import pytest
from jax._src import clusters as jax_clusters
from jax._src.clusters import cloud_tpu_cluster

from isoshard.core.errors import DistributedError
from isoshard.core.processes.launchers import (
    LAUNCHERS,
    Launch,
    coordinator,
    launch_from,
    signs_of_others,
)
from isoshard.core.runtime._jax_internals import CLUSTERS

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[0-1]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


MPI = {
    "mpich": {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "1"},
    "mvapich": {
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_RANK": "2",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
    },
    "open mpi": OPEN_MPI,
}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (TORCHRUN, Launch("torchrun", 3, 4, 1, "n0:29500")),
        ({**TORCHRUN, "RAY_JOB_ID": "02"}, Launch("ray", 3, 4, 1, "n0:29500")),
        (SLURM, Launch("slurm", 2, 4, 0)),
        *((MPI[name], Launch(name, 2, 4, 1)) for name in MPI),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", 3, 4, 1, "n0:29500")),
        ({**SLURM, **OPEN_MPI}, Launch("open mpi", 2, 4, 1)),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}, Launch("slurm", 2, 4, 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # without a step
    ],
)
def test_launchers_and_which_goes_first(environment, launch):
    assert launch_from(environment) == launch


def test_a_missing_variable_is_named():
    for given, words in ((TORCHRUN, "Start .* torchrun"), (SLURM, "")):
        for missing in given:
            env = {name: value for name, value in given.items() if name != missing}
            if missing in ("LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NODELIST"):
                continue
            with pytest.raises(DistributedError, match=f"\n  {missing} is not set\n.*{words}"):
                launch_from(env)
    with pytest.raises(DistributedError, match="RANK=4 is not below WORLD_SIZE=4"):
        launch_from({**TORCHRUN, "RANK": "4"})


def test_all_faults_are_listed():
    env = {"RANK": "-1", "WORLD_SIZE": "many", "MASTER_ADDR": "", "MASTER_PORT": "70000"}
    with pytest.raises(DistributedError) as caught:
        launch_from(env)
    told = str(caught.value)
    assert "MASTER_ADDR is not set" in told
    assert "RANK='-1' is not a whole number" in told
    assert "WORLD_SIZE='many' is not a whole number" in told
    assert "MASTER_PORT=70000 is no port: give 1 to 65535" in told


class Asked:
    """A class of JAX's, as it answers where it is at home."""

    def __init__(self, rank=1, size=4, local=None):
        self.get_process_id, self.get_process_count = (lambda: rank), (lambda: size)
        self.get_local_process_id = lambda: local

    def get_coordinator_address(self, timeout, port):
        return f"n0:{port or 8482} within {timeout} s"


@pytest.fixture
def bare(monkeypatch):
    """An environment without any launcher's variables."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("cluster", "name"), [("GkeTpuCluster", "gke tpu"), ("GceTpuCluster", "cloud tpu")]
)
def test_jax_is_asked_for_tpus(cluster, name):
    assert launch_from({}, {cluster: Asked()}.get) == Launch(name, 1, 4)
    assert launch_from({}, {cluster: Asked(0, 1)}.get) is None  # one machine


def test_kubernetes_numbers_pods_and_jax_counts_them():
    find = {"K8sCluster": Asked(rank=None)}.get
    assert launch_from({"JOB_COMPLETION_INDEX": "3"}, find) == Launch("kubernetes", 3, 4)
    assert launch_from({}, find) is None
    with pytest.raises(DistributedError, match="JOB_COMPLETION_INDEX=4 is not below count=4"):
        launch_from({"JOB_COMPLETION_INDEX": "4"}, find)


def test_what_jax_cannot_tell_is_an_error():
    def fail():
        raise RuntimeError("403 Forbidden")

    asked = Asked()
    asked.get_process_count = fail
    with pytest.raises(
        DistributedError, match=r"kubernetes, failed: RuntimeError: 403.* Start the"
    ):
        launch_from({"JOB_COMPLETION_INDEX": "1"}, {"K8sCluster": asked}.get)


def test_the_coordinator_is_the_launchers_the_users_or_jaxs(bare):
    launch = Launch("mpich", 1, 4)
    assert coordinator(Launch("torchrun", 1, 4, 1, "n0:29500"), 3) == "n0:29500"
    asked = {"Mpi4pyCluster": Asked()}.get
    assert coordinator(launch, 3, asked) == "n0:8482 within 3 s"
    bare.setenv("JAX_COORDINATOR_PORT", "77")
    assert coordinator(launch, 3, asked) == "n0:77 within 3 s"
    bare.setenv("JAX_COORDINATOR_ADDRESS", "n7:5")
    assert coordinator(launch, 3, asked) == "n7:5"


def test_no_coordinator(bare):
    def nobody(name):
        return None

    assert coordinator(Launch("mpich", 0, 1), 3, nobody) is None
    with pytest.raises(DistributedError, match=r"rank 1 of 4 .* mpich, .*JAX_COORDINATOR_ADDRESS="):
        coordinator(Launch("mpich", 1, 4), 3, nobody)


@pytest.mark.parametrize(
    ("environment", "cluster", "said", "advice"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM", ["SLURM_NTASKS=4"], "srun python"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM", ["SLURM_JOB_NUM_NODES=2"], "srun python"),
        ({"PMIX_RANK": "1"}, "MPI", ["PMIX_RANK=1"], "torchrun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPI", ["PMI_SIZE=2"], "torchrun"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "Cloud TPU", ["TPU_WORKER_HOSTNAMES=a,b"], r"jax\[tpu"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes", ["JOB_COMPLETION_INDEX=0"], r"jax\[k8s\]"),
        ({"RAY_JOB_ID": "02"}, "Ray", ["RAY_JOB_ID=02"], "TorchTrainer"),
    ],
)
def test_signs_of_others(environment, cluster, said, advice):
    assert launch_from(environment) is None
    [(name, variables, fix)] = signs_of_others(environment)
    assert (name, variables) == (cluster, said) and re.search(advice, fix)


def test_no_signs_of_others():
    alone = {"SLURM_NTASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost", "PMI_SIZE": "1"}
    assert signs_of_others({}) == signs_of_others(alone) == []


# The installed JAX, as it answers in such processes.


def test_jax_has_every_class_that_the_table_names():
    named = {name for launcher in LAUNCHERS for name in launcher.clusters}
    assert named == set(CLUSTERS) and None not in CLUSTERS.values()
    known = {kind.__name__ for kind in jax_clusters.ClusterEnv._cluster_types}
    assert known - {"BaseTpuCluster"} == named  # a new one of JAX's belongs into the table


def test_jax_tells_slurms_coordinator(bare):
    for name, value in {**SLURM, "SLURM_JOB_ID": "7"}.items():
        bare.setenv(name, value)
    assert coordinator(launch_from(SLURM), 3) == f"n0:{65535 - 4096 + 1 + 7}"


def test_jax_tells_open_mpis_coordinator(bare):
    bare.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    assert re.fullmatch(r"10\.96\.0\.1:6\d{4}", coordinator(launch_from(OPEN_MPI), 3))


def test_jax_tells_of_a_tpu_slice_under_gke(bare):
    bare.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    bare.setenv("TPU_WORKER_HOSTNAMES", "localhost,n1")
    bare.setenv("TPU_WORKER_ID", "1")
    for name, value in (("COORDINATOR_ADDRESS", ""), ("NUM_SLICES", "1"), ("SLICE_ID", "0")):
        bare.setenv(f"MEGASCALE_{name}", value)  # else JAX asks the metadata server
    launch = launch_from({})
    assert launch == Launch("gke tpu", 1, 2) and coordinator(launch, 3) == "localhost:8482"
