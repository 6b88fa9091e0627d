"""Mutual TLS between routers and workers, and between workers: who has no certificate of the cluster gets no answer.

    files ─read, tried on themselves─▶ Material ─▶ server: asked for at every handshake
      └─ changed on disk and fit together ─▶ next generation ─▶ client: new channels take it

The three files are replaced one after the other, so what is read in between may not fit: it is tried first, and the
material before it stays in use until the new one holds. Connections that are up keep what they were opened with.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvrelay.core.config import SecuritySettings
from kvrelay.core.errors import ConfigError

log = logging.getLogger(__name__)

Stamps = tuple[tuple[int, int], ...]
MAX_ROUNDS = 16
"""Of a handshake in memory; TLS 1.3 takes three."""


@dataclass(frozen=True, slots=True)
class Material:
    """PEM bytes as gRPC takes them."""

    ca: bytes
    certificate: bytes
    key: bytes


class Tls:
    """Any thread. Both ends present the same certificate; `name` is in it, wherever the process happens to run."""

    def __init__(self, settings: SecuritySettings) -> None:
        """Raises ConfigError if a file is missing or they do not fit together."""
        self.name = settings.name
        self._paths = (Path(settings.ca), Path(settings.certificate), Path(settings.key))
        self._lock = threading.Lock()
        self._generation = 0
        self._stamps = self._stamp()
        self._material = self._read()

    @property
    def generation(self) -> int:
        """Grows when the files have changed: a channel of an older one has the certificate of then."""
        self._current()
        return self._generation

    def channel_credentials(self) -> grpc.ChannelCredentials:
        material = self._current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """They follow the files."""
        return grpc.dynamic_ssl_server_credentials(self._for_servers(), self._for_servers, True)

    def _for_servers(self) -> grpc.ServerCertificateConfiguration:
        material = self._current()
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)

    def _current(self) -> Material:
        with self._lock:
            try:
                stamps = self._stamp()
                if stamps == self._stamps:
                    return self._material
                self._stamps = stamps
                self._material = self._read()
                self._generation += 1
                log.info("took the new certificates from %s", self._paths[1].parent)
            except ConfigError as error:
                log.warning("the certificates have changed, but do not serve; the ones before stay: %s", error)
            return self._material

    def _stamp(self) -> Stamps:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError as error:
            raise ConfigError(f"security: cannot read {error.filename}: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_ino) for each in found)

    def _read(self) -> Material:
        try:
            material = Material(*(path.read_bytes() for path in self._paths))
        except OSError as error:
            raise ConfigError(f"security: cannot read {error.filename}: {error.strerror}") from error
        _try(self._paths, self.name)
        return material


def open_tls(settings: SecuritySettings) -> Tls | None:
    """None: plain text. Raises ConfigError for a part of it, or for files that cannot work."""
    given = {"ca": settings.ca, "certificate": settings.certificate, "key": settings.key}
    missing = [name for name, path in given.items() if not path]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"security: TLS needs ca, certificate and key; missing: {', '.join(missing)}")
    return Tls(settings)


def _try(paths: tuple[Path, ...], name: str) -> None:
    """A handshake of the certificate with itself: its key, its issuer, its dates and its name, in both roles."""
    ca, certificate, key = paths
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise ConfigError(f"security.ca: {ca} holds no certificates: {error.reason or error}") from error
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", "") or error
            raise ConfigError(f"security: {certificate} and {key} do not belong together: {why}") from error
        contexts.append(context)
    try:
        _shake_hands(contexts[0], contexts[1], name)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"security: {certificate} does not hold before {ca}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise ConfigError(f"security: {certificate} cannot be used: {error.reason or error}") from error


def _shake_hands(as_client: ssl.SSLContext, as_server: ssl.SSLContext, name: str) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = as_client.wrap_bio(down, up, server_hostname=name)
    server = as_server.wrap_bio(up, down, server_side=True)
    open_ends = [client, server]
    for _ in range(MAX_ROUNDS):
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not open_ends:
            return
    raise ssl.SSLError("the handshake came to no end")


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not, readable by this process alone")
