"""Finding the application: the module named by ``--app``, and the broker that it sets (as the ``dramatiq`` command does).

The current directory is importable. What goes wrong is said in the words of whoever typed the option, with the way out; a
broker that nobody set is never made up.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from types import ModuleType

import dramatiq.broker
from dramatiq import Actor, Broker

from ..commands import install
from ..middleware import SagaMiddleware
from ..operations import RefusedError

#: What an application imports for its broker or its database, and the extra that brings it.
_EXTRAS = {"redis": "redis", "pika": "rabbitmq", "psycopg": "postgres", "pymysql": "mysql", "apscheduler": "schedule"}


def open_application(name: str) -> Broker:
    """Import ``MODULE[:BROKER]`` and return its broker.

    ``BROKER`` may be a variable of the module, a dotted path in it, or a function to call that sets the broker.

    Raises:
      RefusedError: there is no such module, it cannot be imported, or it does not come with one broker for sagas.
    """
    module_name, _, path = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name, here)
    if path:
        return _named(module, path)
    broker = dramatiq.broker.global_broker
    if broker is None:
        raise RefusedError(f"module {module_name!r} sets no broker: call dramatiq.set_broker(broker) in it{_or_name(module)}")
    if not _has_sagas(broker):
        others = [other for other, candidate in _brokers(module).items() if _has_sagas(candidate)]
        hint = (
            f"; or name the one that has: {' or '.join(f'--app {module_name}:{other}' for other in others)}" if others else ""
        )
        raise RefusedError(
            f"the broker that module {module_name!r} sets ({type(broker).__name__}) has no SagaMiddleware: "
            f"call broker.add_middleware(SagaMiddleware(...)) before its actors are declared{hint}"
        )
    return broker


def _import(module_name: str, here: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            advice = "change to the application's directory, or set PYTHONPATH"
            if module_name.endswith(".py"):
                advice = f"a module is named without its ending: --app {module_name.removesuffix('.py').replace('/', '.')}"
            raise RefusedError(
                f"{error} (--app {module_name}): it was looked for in {here} and on Python's path; {advice}"
            ) from None
        extra = _EXTRAS.get(missing.partition(".")[0])
        brings = f": it comes with an extra of dramatiq-saga, {install(extra)}" if extra else ""
        raise RefusedError(f"module {module_name!r} cannot be imported: {error}{_where(error)}{brings}") from None
    except (Exception, SystemExit) as error:
        raise RefusedError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}{_where(error)}"
        ) from error


def _where(error: BaseException) -> str:
    """The last line of the application's own that was executed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _of_the_machinery(frame.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _of_the_machinery(filename: str) -> bool:
    return filename.startswith("<") or filename in (__file__, importlib.__file__)


def _named(module: ModuleType, path: str) -> Broker:
    try:
        found: object = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise RefusedError(f"module {module.__name__!r} has no {path!r}{_or_name(module)}") from None
    if isinstance(found, Broker):
        return found
    if not callable(found):
        raise RefusedError(f"{module.__name__}:{path} is no broker but {type(found).__name__}{_or_name(module)}")
    if isinstance(found, Actor | type):
        what = "an actor" if isinstance(found, Actor) else "a class"
        raise RefusedError(f"{module.__name__}:{path} is {what}, no broker and no function that sets one{_or_name(module)}")
    try:
        found()
    except (Exception, SystemExit) as error:
        raise RefusedError(f"{module.__name__}:{path}() has failed: {type(error).__name__}: {error}{_where(error)}") from error
    broker = dramatiq.broker.global_broker
    if broker is None:
        raise RefusedError(f"{module.__name__}:{path}() was called and set no broker: call dramatiq.set_broker(broker) in it")
    return broker


def _or_name(module: ModuleType) -> str:
    brokers = _brokers(module)
    names = [name for name, broker in brokers.items() if _has_sagas(broker)] or list(brokers)
    if not names:
        return ""
    return f"; or name the broker: {' or '.join(f'--app {module.__name__}:{name}' for name in names)}"


def _brokers(module: ModuleType) -> dict[str, Broker]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Broker)}


def _has_sagas(broker: Broker) -> bool:
    return any(isinstance(middleware, SagaMiddleware) for middleware in broker.middleware)
