"""The SDK stands on grpcio and protobuf alone; TLS; the examples run."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import sys

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvrelay.client import AsyncClient, Client, RetryPolicy, Tls, Unavailable
from kvrelay.client.examples import batch, chat_loop
from tests.client.scripted import ScriptedServer

ALONE = """
import sys

ALLOWED = set(sys.stdlib_module_names) | {"kvrelay", "grpc", "google", "typing_extensions"}
refused = []

class OnlyOurs:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and not top.startswith("_"):
            refused.append(top)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyOurs())
import kvrelay.client

kvrelay.client.Client("127.0.0.1:1").close()
assert "kvrelay.core.config" not in sys.modules
for name in ("yaml", "torch", "redis", "ray", "msgspec", "prometheus_client", "starlette", "tokenizers"):
    assert name not in sys.modules, name
print(" ".join(sorted(set(refused))))
"""


def test_it_imports_with_nothing_else_installed() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate for 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvrelay test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    return key.private_bytes(pem, form, serialization.NoEncryption()), certificate.public_bytes(pem)


async def test_tls_with_an_own_authority() -> None:
    key, certificate = self_signed()
    with ScriptedServer(credentials=grpc.ssl_server_credentials([(key, certificate)])) as server:
        tls = Tls(root_certificates=certificate)
        with Client(server.target, tls=tls) as client:
            assert client.generate("x").text() == "<10><11><12>"
        async with AsyncClient(server.target, tls=tls) as other:
            assert await other.generate("x").text() == "<10><11><12>"
        stranger = Tls(root_certificates=self_signed()[1])
        once = RetryPolicy(max_attempts=1)
        with Client(server.target, tls=stranger, retry=once) as distrustful, pytest.raises(Unavailable):
            distrustful.models()


def test_the_batch_example(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server, pytest.raises(SystemExit) as ended:
        batch.main(["--target", server.target, "--count", "40", "--concurrency", "8"])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert "40 answers, 0 failed" in shown.out
    assert "40/40" in shown.err


def test_the_chat_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "and again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with ScriptedServer() as server:
        chat_loop.main(["--target", server.target])
        first, second = server.requests
    assert capsys.readouterr().out.count("<10><11><12>") == 2
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert first.session_id == second.session_id
