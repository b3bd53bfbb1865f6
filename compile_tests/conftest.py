"""Options and fixtures of the tests of the op and the compiler."""

from fixtures import (
    _fresh_random,
    cpp,
    device,
    fresh_dynamo,
    inductor,
    pytest_addoption,
    pytest_configure,
    pytest_report_header,
)

__all__ = [
    "_fresh_random",
    "cpp",
    "device",
    "fresh_dynamo",
    "inductor",
    "pytest_addoption",
    "pytest_configure",
    "pytest_report_header",
]
