"""Where the service listens, and which files it leaves: none."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from dsa_indexer.v1 import indexer_pb2 as pb
from dsa_indexer.v1 import indexer_pb2_grpc as rpc
from indexer_service.errors import StartError
from indexer_service.listening import create_listener
from indexer_service.settings import Settings
from tests.service.processes import ServiceProcess, is_served_by
from tests.service.support import LocalService, Worker, open_request, refused, running
from tests.support.waiting import SOON, eventually


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d" / "i.sock"


@contextmanager
def refusal(*parts: str) -> Iterator[None]:
    with pytest.raises(StartError) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in (*parts, "(fix: ")), message
    assert "\n" not in message


def at(path: Path) -> Settings:
    return Settings(address=f"unix:{path}")


def start_and_stop(settings: Settings) -> None:
    with running(settings):
        pass


def test_the_directory_is_made_private_and_removed_again(path: Path) -> None:
    with running(at(path)) as service:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        own = f"i.sock.{os.getpid()}"
        assert sorted(os.listdir(path.parent)) == ["i.sock", own, f"{own}.fd"]
        assert os.readlink(path) == own
        assert service.address == f"unix:{path}"
    assert not path.parent.exists()


def test_a_directory_that_was_there_stays(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    start_and_stop(at(path))
    assert os.listdir(path.parent) == []


def test_files_of_others_stay(path: Path) -> None:
    with running(at(path)):
        (path.parent / "notes").touch()
        (path.parent / "i.sock.9").touch()
    assert sorted(os.listdir(path.parent)) == ["i.sock.9", "notes"]


def test_a_directory_that_others_can_enter_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o750)
    with refusal("address: ", str(path.parent), "0750", "0700"):
        start_and_stop(at(path))
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.chown(path.parent, 12345, 12345)
    with refusal("address: ", "user 12345"):
        start_and_stop(at(path))


def test_a_symbolic_link_as_directory_is_refused(tmp_path: Path, path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    path.parent.symlink_to("real")
    with refusal("address: ", str(path.parent)):
        start_and_stop(at(path))


def test_a_directory_without_parent_is_refused(tmp_path: Path) -> None:
    with refusal("address: ", "cannot be made"):
        start_and_stop(at(tmp_path / "a" / "b" / "i.sock"))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with refusal("address: ", "107"):
        start_and_stop(at(tmp_path / ("d" * 100) / "i.sock"))


def test_a_file_with_the_public_name_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with refusal("address: ", "not a socket"):
        start_and_stop(at(path))
    assert path.read_text() == "precious"


def test_an_address_in_use_by_a_live_service_is_refused(path: Path) -> None:
    with running(at(path)) as service:
        with refusal("address: ", "already runs"):
            start_and_stop(at(path))
        assert service.status().serving


def test_what_dead_services_left_is_removed(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    for name, kind in (("i.sock.77", socket.SOCK_STREAM), ("i.sock.77.fd", socket.SOCK_SEQPACKET)):
        with socket.socket(socket.AF_UNIX, kind) as dead:
            dead.bind(str(path.parent / name))
    (path.parent / "i.sock.78.link").symlink_to("i.sock.78")
    path.symlink_to("i.sock.77")
    with running(at(path)) as service:
        assert service.status().serving
        assert len(os.listdir(path.parent)) == 3
    assert os.listdir(path.parent) == []


def test_a_process_with_our_number_in_another_namespace_keeps_its_files(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    own = path.parent / f"i.sock.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(own))
        other.listen()
        with running(at(path)) as service:
            assert service.status().serving
            assert own.is_socket()
            Worker(service).attach().leave()
        assert os.listdir(path.parent) == [own.name]


def test_a_service_in_the_place_of_a_killed_one(
    path: Path, processes: list[ServiceProcess], tmp_path: Path
) -> None:
    processes.append(ServiceProcess(path, tmp_path / "log").wait_until_serving())
    processes[0].signal(signal.SIGKILL)
    processes[0].process.wait()
    assert len(os.listdir(path.parent)) == 3
    with running(at(path)) as service:
        assert service.status().pid == os.getpid()
        assert len(os.listdir(path.parent)) == 3
    assert os.listdir(path.parent) == []


def test_a_frozen_service_thaws_after_its_successor_took_over(
    path: Path, processes: list[ServiceProcess], tmp_path: Path
) -> None:
    processes.append(ServiceProcess(path, tmp_path / "log").wait_until_serving())
    frozen = processes[0]
    frozen.signal(signal.SIGSTOP)
    time.sleep(0.1)
    with running(at(path)) as service:
        assert service.status().pid == os.getpid()
        # The old one wakes up and ends: the name and our sockets are not its own any more.
        assert frozen.stop() == 0
        assert is_served_by(path, os.getpid())
        Worker(service).attach().leave()
        assert len(os.listdir(path.parent)) == 3
    assert os.listdir(path.parent) == []


def test_a_frozen_service_killed_after_its_successor_leaves_nothing(
    path: Path, processes: list[ServiceProcess], tmp_path: Path
) -> None:
    processes.append(ServiceProcess(path, tmp_path / "log").wait_until_serving())
    frozen = processes[0]
    frozen.signal(signal.SIGSTOP)
    time.sleep(0.1)
    with running(at(path)):
        frozen.signal(signal.SIGKILL)
        frozen.process.wait()
        assert len(os.listdir(path.parent)) == 5
    assert os.listdir(path.parent) == []


def test_services_that_start_together_leave_one(
    path: Path, processes: list[ServiceProcess], tmp_path: Path
) -> None:
    path.parent.mkdir(mode=0o700)
    for number in range(2):
        processes.append(ServiceProcess(path, tmp_path / f"log{number}"))
    assert eventually(lambda: sum(p.process.poll() is not None for p in processes) == 1, 2 * SOON)
    winner = next(p for p in processes if p.process.poll() is None)
    winner.wait_until_serving()
    loser = next(p for p in processes if p is not winner)
    assert "already runs" in loser.log.read_text()
    assert winner.stop() == 0
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "127.0.0.2:0"])
def test_loopback_needs_no_tls(address: str) -> None:
    with running(Settings(address=address)) as service:
        assert service.status().serving
        assert not service.address.endswith(":0")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:50051"])
def test_other_addresses_need_mutual_tls(address: str) -> None:
    with refusal("address: ", "tls_certificate", "tls_key", "tls_client_ca"):
        create_listener(Settings(address=address))


@pytest.mark.parametrize(
    "address",
    ["", "indexer", "unix:", ":50051", "127.0.0.1:x", "127.0.0.1:70000", "no.such.host.:1"],
)
def test_an_address_that_is_none(address: str) -> None:
    with refusal("address: "):
        create_listener(Settings(address=address))


def test_a_port_in_use_is_refused() -> None:
    with running(Settings(address="127.0.0.1:0")) as service:
        with refusal("address: cannot listen", service.address):
            start_and_stop(Settings(address=service.address))
        assert service.status().serving


def test_over_tcp_only_the_stream() -> None:
    failed = grpc.StatusCode.FAILED_PRECONDITION
    with running(Settings(address="127.0.0.1:0")) as service:
        stub = service.stub()
        with refused(failed, "signalling", "TCP"):
            stub.OpenSession(open_request(signalling=pb.SIGNALLING_RING))
        session = stub.OpenSession(open_request())
        assert session.signalling == pb.SIGNALLING_STREAM
        assert session.descriptor_socket == "" and session.descriptor_nonce == b""
        region = pb.Region(
            name="answers", host=pb.HostMemory(token=16), byte_size=8192, shape=[8192], data_type=1
        )
        with refused(failed, "answers.host", "TCP"):
            stub.RegisterRegions(
                pb.RegisterRegionsRequest(
                    session_id=session.session_id, epoch=session.epoch, regions=[region]
                )
            )
        plan = pb.StepPlan(step=1, epoch=session.epoch)
        responses = list(
            stub.RunSteps(iter([pb.RunStepsRequest(session_id=session.session_id, plan=plan)]))
        )
        assert responses[0].report.code == failed.value[0]


Tls = dict[str, Path]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """An authority, a service and a client it signed, and a client that signed itself."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("ca", "stranger"):
        openssl(
            *new, "-x509", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"
        )
    for name in ("service", "client"):
        request = f"{name}.csr"
        openssl(*new, *names, "-keyout", f"{name}.key", "-out", request, "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", request, "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2"),
            *("-CAcreateserial", "-copy_extensions", "copy", "-out", f"{name}.pem"),
        )
    return {path.name: path for path in folder.iterdir()}


def tls_settings(tls: Tls, **changes: Path | None) -> Settings:
    files = {
        "tls_certificate": tls["service.pem"],
        "tls_key": tls["service.key"],
        "tls_client_ca": tls["ca.pem"],
    }
    return Settings(address="0.0.0.0:0", **{**files, **changes})


def client_credentials(tls: Tls, name: str | None) -> grpc.ChannelCredentials:
    ca = tls["ca.pem"].read_bytes()
    if name is None:
        return grpc.ssl_channel_credentials(ca)
    pair = tls[f"{name}.key"].read_bytes(), tls[f"{name}.pem"].read_bytes()
    return grpc.ssl_channel_credentials(ca, *pair)


def serves(service: LocalService, credentials: grpc.ChannelCredentials | None) -> bool:
    port = service.address.rpartition(":")[2]
    target = f"127.0.0.1:{port}"
    with (
        grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
    ) as channel:
        try:
            return (
                rpc.IndexerServiceStub(channel)
                .GetStatus(pb.GetStatusRequest(), timeout=SOON)
                .serving
            )
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            return False


def test_mutual_tls_admits_only_clients_of_the_authority(tls: Tls) -> None:
    with running(tls_settings(tls)) as service:
        assert serves(service, client_credentials(tls, "client"))
        assert not serves(service, client_credentials(tls, "stranger"))
        assert not serves(service, client_credentials(tls, None))
        assert not serves(service, None)


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_tls_settings_come_together(tls: Tls, missing: str) -> None:
    with refusal(f"{missing}: not set"):
        create_listener(tls_settings(tls, **{missing: None}))


def test_tls_files_that_do_not_match_are_refused(tls: Tls) -> None:
    with refusal("tls_certificate: "):
        create_listener(tls_settings(tls, tls_key=tls["client.key"]))
    with refusal("tls_client_ca: "):
        create_listener(tls_settings(tls, tls_client_ca=tls["ca.key"]))
    with refusal("tls_key: ", "No such file"):
        create_listener(tls_settings(tls, tls_key=Path("/nowhere.key")))


def test_tls_on_a_unix_socket_is_refused(tls: Tls, path: Path) -> None:
    with refusal("tls_key: ", "Unix socket"):
        create_listener(Settings(address=f"unix:{path}", tls_key=tls["service.key"]))
