"""Who may call. Knows one API key, as a hash; the key itself is neither kept nor logged.

A server that only this machine can reach (bound to loopback) may run without a key. It then refuses requests that a web
page could have sent: a foreign `Host` (DNS rebinding) or a foreign `Origin` (cross-site requests). Any other bind needs a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import AuthenticationError, ConfigError

MINIMUM_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Auth:
    """The rule of one server. Build it with `Auth.for_bind`."""

    key_sha256: bytes | None

    @classmethod
    def for_bind(cls, host: str, key: str | None) -> Auth:
        """The rule for a server bound to `host`. `ConfigError` for a short key, or none where one is needed."""
        if key is None:
            if not is_loopback(host):
                raise ConfigError(
                    f"a server bound to {host} can be reached from other machines and needs an API key of at least "
                    f"{MINIMUM_KEY_LENGTH} characters; set APPRENTICE_API_KEY or bind to 127.0.0.1",
                    param="api_key",
                )
            return cls(None)
        if len(key) < MINIMUM_KEY_LENGTH:
            raise ConfigError(f"the API key must have at least {MINIMUM_KEY_LENGTH} characters, but it has {len(key)}", param="api_key")
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError("the API key must consist of printable ASCII characters without spaces", param="api_key")
        return cls(hashlib.sha256(key.encode()).digest())

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request whose (lower-case) headers do not show that it may come in."""
        if self.key_sha256 is None:
            _check_local(headers)
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise AuthenticationError("this server needs its API key in the header `Authorization: Bearer KEY`, but none came")
        if not hmac.compare_digest(hashlib.sha256(given.strip().encode()).digest(), self.key_sha256):
            raise AuthenticationError("the API key in the `Authorization` header is not the key of this server")


def is_loopback(host: str) -> bool:
    """True for localhost, 127.0.0.0/8 and ::1, with or without brackets."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_local(headers: Mapping[str, str]) -> None:
    host = headers.get("host", "")
    if host and not _names_loopback(f"//{host}"):
        raise AuthenticationError(f"a server without an API key answers only to localhost, but the Host header is {host!r}")
    origin = headers.get("origin")
    if origin is not None and not _names_loopback(origin):
        raise AuthenticationError(f"a server without an API key refuses requests from web pages, but the Origin is {origin!r}")


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
