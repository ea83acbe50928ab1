"""Every error that Apprentice raises on purpose.

    ApprenticeError
    ├── UserInputError                 what the caller sent cannot be used (HTTP 400, exit code 2)
    │   ├── InvalidRequest             a field is malformed, unknown or unsupported; `param` names it
    │   ├── ContextOverflow            prompt + requested tokens exceed the model's context
    │   ├── ConfigError                an option or file of configuration is wrong
    │   ├── ModelRefused               a base model that cannot be trained or served, and why
    │   ├── AuthenticationError        missing or wrong API key (401)
    │   ├── NotFound                   (404)
    │   │   ├── UnknownModel
    │   │   ├── UnknownTrajectory
    │   │   ├── UnknownCheckpoint
    │   │   └── UnknownJob
    │   ├── Conflict                   valid alone, not together with what is recorded (409)
    │   │   ├── IdempotencyConflict    same key, another body
    │   │   ├── TrajectoryStateError   e.g. training an open trajectory, a call into a finished one
    │   │   ├── ForeignTrajectory      the trajectory belongs to another policy
    │   │   ├── JobConflict            a train job is running and the caller chose not to queue
    │   │   └── ModelMismatch          a policy is already registered differently
    │   └── PayloadTooLarge            (413)
    ├── InfrastructureError            the machinery failed, not the rollout (HTTP 503)
    │   ├── ServerUnavailable          no answer, connection lost, not ready
    │   ├── ServerStartError           the child process did not come up; carries the log's tail
    │   ├── ToolServerError            an MCP server that does not start, connect or speak the protocol
    │   ├── QueueFull                  the admission queue is at its bound (429)
    │   ├── EngineError                the sampling engine failed
    │   │   └── StaleEngine            the canary: the engine does not serve the new weights
    │   ├── LedgerError
    │   │   ├── LedgerLocked
    │   │   ├── LedgerFull
    │   │   └── LedgerVersionError     written by a newer version of Apprentice
    │   ├── CheckpointCorrupt          a file's hash differs from its manifest
    │   ├── TrainJobFailed             a job ended as failed; carries its reason
    │   └── DeadlineExceeded           a wait hit its stated limit
    └── RolloutError                   the user's rollout or reward code failed
        └── RunAborted                 too many rollouts failed; the first cause is attached

`InfrastructureError` and `RolloutError` are kept apart everywhere: the first is never counted against the agent, and
retried unless the same request would meet it again; the second is counted and never retried. Each class has a `code` that
travels over HTTP in OpenAI's error form and comes back as the same class on the client.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast


class ApprenticeError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one sentence a user can act on."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details or {}

    def to_wire(self) -> dict[str, Any]:
        """The error as OpenAI clients expect it: `{"error": {"message", "type", "code", "param", …}}`, the message on one line."""
        body: dict[str, Any] = {"message": " ".join(self.message.splitlines()), "type": self.type, "code": self.code, "param": self.param}
        if self.details:
            body["details"] = self.details
        return {"error": body}


class UserInputError(ApprenticeError):
    code, status, type = "bad_input", 400, "invalid_request_error"


class InvalidRequest(UserInputError):
    code = "invalid_request"


class ContextOverflow(UserInputError):
    code = "context_length_exceeded"


class ConfigError(UserInputError):
    code = "config_error"


class ModelRefused(UserInputError):
    code = "model_refused"


class AuthenticationError(UserInputError):
    code, status, type = "invalid_api_key", 401, "authentication_error"


class NotFound(UserInputError):
    code, status, type = "not_found", 404, "not_found_error"


class UnknownModel(NotFound):
    code = "model_not_found"


class UnknownTrajectory(NotFound):
    code = "trajectory_not_found"


class UnknownCheckpoint(NotFound):
    code = "checkpoint_not_found"


class UnknownJob(NotFound):
    code = "job_not_found"


class Conflict(UserInputError):
    code, status, type = "conflict", 409, "conflict_error"


class IdempotencyConflict(Conflict):
    code = "idempotency_conflict"


class TrajectoryStateError(Conflict):
    code = "trajectory_state"


class ForeignTrajectory(Conflict):
    code = "foreign_trajectory"


class JobConflict(Conflict):
    code = "job_conflict"


class ModelMismatch(Conflict):
    code = "model_mismatch"


class PayloadTooLarge(UserInputError):
    code, status = "payload_too_large", 413


class InfrastructureError(ApprenticeError):
    code, status, type = "infrastructure_error", 503, "server_error"


class ServerUnavailable(InfrastructureError):
    code = "server_unavailable"


class ServerStartError(InfrastructureError):
    code = "server_start_failed"


class ToolServerError(InfrastructureError):
    code, status = "tool_server_error", 502


class QueueFull(InfrastructureError):
    code, status, type = "queue_full", 429, "rate_limit_error"


class EngineError(InfrastructureError):
    code = "engine_error"


class StaleEngine(EngineError):
    code = "stale_engine"


class LedgerError(InfrastructureError):
    code = "ledger_error"


class LedgerLocked(LedgerError):
    code = "ledger_locked"


class LedgerFull(LedgerError):
    code, status = "ledger_full", 507


class LedgerVersionError(LedgerError):
    code = "ledger_version"


class CheckpointCorrupt(InfrastructureError):
    code = "checkpoint_corrupt"


class TrainJobFailed(InfrastructureError):
    code, status = "train_job_failed", 500


class DeadlineExceeded(InfrastructureError):
    code, status = "deadline_exceeded", 504


class RolloutError(ApprenticeError):
    code = "rollout_error"


class RunAborted(RolloutError):
    code = "run_aborted"


def _tree(root: type[ApprenticeError]) -> list[type[ApprenticeError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


_BY_CODE: dict[str, type[ApprenticeError]] = {cls.code: cls for cls in _tree(ApprenticeError)}


def from_wire(body: object, status: int) -> ApprenticeError:
    """Rebuild the error that a server sent. An unknown code keeps its message; its class follows the HTTP status."""
    body = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    error = cast("dict[str, Any]", body["error"]) if isinstance(body.get("error"), dict) else {}
    fallback = UserInputError if 400 <= status < 500 else InfrastructureError
    cls = _BY_CODE.get(str(error.get("code")), fallback)
    message = str(error.get("message") or f"the server answered with HTTP status {status} and no message")
    return cls(message, param=error.get("param"), details=error.get("details"))
