"""Where the calls that pass through the proxy are recorded: the trajectory that a request, or the environment, names, or a fresh one.

A proxy is its host's only way to the server, so nothing here may fail after the start: an Apprentice that cannot be reached is
one warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from ...core.client.api import ControlApi, checked_name
from ...core.client.backends import API_KEY_VARIABLE
from ...core.client.model import parse_policy
from ...core.client.recording import DRAIN_SECONDS, ToolRecording
from ...core.client.scope import TRAJECTORY_HEADER
from ...core.client.transport import Transport
from ...core.errors import ApprenticeError, ConfigError
from ...core.records import ToolEvent, new_id
from ...core.wire import FinishTrajectory, OpenTrajectory
from .redaction import Redactor

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

URL_VARIABLE = "APPRENTICE_URL"
TRAJECTORY_VARIABLE = "APPRENTICE_TRAJECTORY"
POLICY_VARIABLE = "APPRENTICE_POLICY"
VARIABLES = (URL_VARIABLE, API_KEY_VARIABLE, TRAJECTORY_VARIABLE, POLICY_VARIABLE)

logger = logging.getLogger("apprentice")


@dataclass(frozen=True, slots=True)
class Destination:
    """What the environment says. ConfigError if that is not enough to record a call."""

    api: ControlApi
    trajectory: str | None
    policy: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str], *, headers: bool) -> Destination:
        """`headers`: requests can name their trajectory by themselves."""
        url, trajectory, policy = (environment.get(name) or None for name in (URL_VARIABLE, TRAJECTORY_VARIABLE, POLICY_VARIABLE))
        if url is None:
            raise ConfigError(f"the proxy records into an Apprentice server; set {URL_VARIABLE}, e.g. to http://127.0.0.1:7474")
        if trajectory is None and policy is None and not headers:
            raise ConfigError(
                f"the proxy needs {TRAJECTORY_VARIABLE}, the id of an open trajectory, or {POLICY_VARIABLE}, the project/name of a model "
                "for which it opens one"
            )
        if policy is not None:
            parse_policy(policy)
        if trajectory is not None:
            checked_name(trajectory)
        return cls(ControlApi(Transport(url, environment.get(API_KEY_VARIABLE) or None)), trajectory, policy)


class SessionRecords:
    """The recordings of one host's session. What `hide` hides is in none of them; the host itself gets all of it."""

    def __init__(self, destination: Destination, server: str, hide: Redactor) -> None:
        self._to = destination
        self._server = server
        self._hide = hide
        self._recordings: dict[str, ToolRecording] = {}
        self._fresh: ToolRecording | None = None
        self._opened = False

    def choose(self, item: SessionMessage) -> ToolRecording | None:
        """For a message of the host: its own header names the trajectory, else the environment, else it is the session's own."""
        request = getattr(item.metadata, "request_context", None)
        named = request.headers.get(TRAJECTORY_HEADER) if request is not None else None
        identity = named or self._to.trajectory
        if identity is None:
            return self._own()
        if identity not in self._recordings:
            self._recordings[identity] = ToolRecording(identity, self._send)
        return self._recordings[identity]

    async def close(self) -> None:
        """Finish the session's own trajectory, if it has one. Others are their owners' to finish."""
        if not self._opened or self._fresh is None:
            return
        try:
            with anyio.CancelScope(shield=True):  # also when the proxy is being stopped
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._fresh.drain()
                    await self._to.api.finish(self._fresh.trajectory_id, FinishTrajectory())
        except (ApprenticeError, TimeoutError) as error:
            logger.warning("trajectory %s could not be finished: %s", self._fresh.trajectory_id, error)

    def _own(self) -> ToolRecording | None:
        if self._fresh is None and self._to.policy is not None:
            self._fresh = ToolRecording(new_id("trj"), self._send_first)
        return self._fresh

    async def _send_first(self, event: ToolEvent) -> None:
        """The trajectory is opened with its first call: hosts connect to servers that they then do not use."""
        if not self._opened:
            policy = self._to.policy or ""
            metadata = OpenTrajectory(id=event.trajectory_id, policy=policy, metadata={"mcp_server": self._server, "source": "mcp proxy"})
            await self._to.api.open_trajectory(metadata)
            self._opened = True
        await self._send(event)

    async def _send(self, event: ToolEvent) -> None:
        shown = {"arguments": self._hide.value(event.arguments), "result": self._hide.text(event.result)}
        await self._to.api.tool_event(event.model_copy(update=shown))
