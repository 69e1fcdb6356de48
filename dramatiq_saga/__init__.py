"""dramatiq-saga: durable sagas on Dramatiq workers. The names a user types; everything else is in the modules below."""

from .engine.retry_on_signal import RetryContext
from .errors import (
    CannotSignalFlowError,
    ChildCancelledError,
    ChildExpiredError,
    ChildFailedError,
    FlowCancelledError,
    FlowError,
    FlowExpiredError,
    FlowFailedError,
    FlowNotFoundError,
    NotSerializableError,
    ResultMissing,
    ResultTimeout,
    RunConflictError,
    SagaError,
    SettingsError,
    SignalTimeoutError,
    StepExpiredError,
    StepFailedError,
)
from .flow import Flow
from .handle import FlowHandle, get_flow
from .middleware import SagaMiddleware
from .query import FlowQuery, query
from .retry_policy import RetryPolicy
from .settings import Settings
from .statuses import (
    ActionStatus,
    ChildClosePolicy,
    ChildStatus,
    CompensationFailurePolicy,
    CompensationStatus,
    FlowStatus,
    ParallelFailurePolicy,
    RollbackStatus,
    SignalStatus,
)
from .step import Step, current_step
from .workflow import Workflow, workflow

__all__ = [
    "ActionStatus",
    "CannotSignalFlowError",
    "ChildCancelledError",
    "ChildClosePolicy",
    "ChildExpiredError",
    "ChildFailedError",
    "ChildStatus",
    "CompensationFailurePolicy",
    "CompensationStatus",
    "Flow",
    "FlowCancelledError",
    "FlowError",
    "FlowExpiredError",
    "FlowFailedError",
    "FlowHandle",
    "FlowNotFoundError",
    "FlowQuery",
    "FlowStatus",
    "NotSerializableError",
    "ParallelFailurePolicy",
    "ResultMissing",
    "ResultTimeout",
    "RetryContext",
    "RetryPolicy",
    "RollbackStatus",
    "RunConflictError",
    "SagaError",
    "SagaMiddleware",
    "Settings",
    "SettingsError",
    "SignalStatus",
    "SignalTimeoutError",
    "Step",
    "StepExpiredError",
    "StepFailedError",
    "Workflow",
    "current_step",
    "get_flow",
    "query",
    "workflow",
]
