"""What other plugins need, so that their work is one on N ranks: hypothesis and pytest-cov."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from mpicoll._base.last_words import cause
from mpicoll._base.waits import PATIENCE_S

SETTINGS = "_hypothesis_internal_use_settings"  # of a test function


class ExampleFailed(AssertionError):
    """An example of hypothesis has failed on a rank. All ranks raise it, in one line, so that they shrink the same failure."""


def keep_in_step(item: pytest.Item, exchange: Callable[..., list[Any]], fail_alone: Callable[[str, str, str], None]) -> None:
    """Makes all ranks try the same examples of a test of hypothesis, and shrink them in step (not collective).

    The examples are derived from the test's name, so that they are equal in every run. After each of them the ranks ``exchange``
    what became of it.
    """
    function = getattr(item, "obj", None)
    handle: Any = getattr(function, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is None or hasattr(inner, "in_step"):
        return
    import hypothesis

    function = getattr(function, "__func__", function)
    settings = getattr(function, SETTINGS, None)
    if settings is not None:
        checks = {*settings.suppress_health_check, hypothesis.HealthCheck.too_slow}  # no time decides, since times differ
        alike = hypothesis.settings(settings, derandomize=True, database=None, deadline=None, suppress_health_check=checks)
        setattr(function, SETTINGS, alike)
    rejections = (hypothesis.errors.UnsatisfiedAssumption, hypothesis.errors.StopTest)

    @functools.wraps(inner)
    def example(*args: Any, **kwargs: Any) -> Any:
        error: BaseException | None = None
        result = None
        try:
            result = inner(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except BaseException as raised:  # noqa: BLE001  raised again below
            error = raised
        rejected = isinstance(error, (*rejections, pytest.skip.Exception))
        text = "" if error is None or rejected else "".join(traceback.format_exception(error))
        late = ((PATIENCE_S, lambda: fail_alone(f"an example of {item.nodeid}", text, cause(text))),) if text else ()
        outcomes = exchange((rejected, text), late)
        failures = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(outcomes) if said]
        if failures:
            failed = ExampleFailed("\n".join(failures))
            failed.__context__ = None
            raise failed
        if error is not None:
            raise error
        if any(rejected for rejected, _ in outcomes):
            hypothesis.reject()
        return result

    example.in_step = True  # type: ignore[attr-defined]
    handle.inner_test = example


def save_coverage(config: pytest.Config, rank: int, meet: Callable[[], object]) -> None:
    """Saves what pytest-cov has measured on each rank. Rank 0 then combines the files, and reports (collective)."""
    plugin = config.pluginmanager.get_plugin("_cov")
    controller = getattr(plugin, "cov_controller", None)
    if controller is None:
        return
    if rank != 0:
        controller.cov.stop()
        controller.cov.save()
        controller.finish = lambda: None
        plugin._should_report = lambda: False  # type: ignore[union-attr]
    meet()
