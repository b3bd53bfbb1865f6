"""`python -m dsmoe_op doctor`: each thing that it looks at is found, said plainly, and told what to do about."""

from __future__ import annotations

import json
import os
import types
from typing import Any

import pytest
import torch
import triton

from dsmoe_op.cli import doctor, hazard, main, profiling


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and an environment without what doctor warns of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, *_ in doctor._SPOILERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A machine with one, as far as its description goes."""
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 2**30,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    return properties


def only(look: Any) -> dict[str, tuple[str, str, str]]:
    """State, text and advice by topic; the worst where a topic comes twice."""
    order = ("problem", "note", "ok")
    found = sorted(look(), key=lambda finding: order.index(finding.state), reverse=True)
    return {finding.topic: finding[1:] for finding in found}


def test_a_sound_machine_without_a_gpu_has_no_problem(capsys) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("no problems")
    assert torch.__version__ in out
    assert triton.__version__ in out
    assert "problem  " not in out


def test_json_is_one_object_with_every_finding(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == 0
    topics = {finding["topic"] for finding in result["findings"]}
    assert topics >= {"torch", "GPU", "triton", "transformers", "environment", "the op, eager", "the op, torch.compile"}
    assert all(set(finding) == {"topic", "state", "found", "advice"} for finding in result["findings"])


def test_a_problem_is_told_with_advice_and_ends_with_1(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem  torch" in out
    assert "-> install torch 2.11 or newer" in out
    assert out.rstrip().endswith("1 problem")


def test_a_look_that_fails_is_a_problem_and_the_others_go_on(monkeypatch) -> None:
    def fail() -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_packages", fail)
    findings = {finding.topic: finding for finding in doctor.examine()}
    assert findings["packages"].state == "problem"
    assert "no such thing" in findings["packages"].found
    assert findings["the op, eager"].state == "ok"


@pytest.mark.parametrize("name", [name for name, *_ in doctor._SPOILERS])
def test_a_variable_that_spoils_overlap_is_named_where_it_matters(monkeypatch, gpu, name) -> None:
    value, state = next((value or "30", state) for other, value, state, _ in doctor._SPOILERS if other == name)
    assert only(doctor._environment) == {"environment": ("ok", "nothing that stands in the way", "")}
    monkeypatch.setenv(name, value)
    (found,) = only(doctor._environment).values()
    assert found[0] == state
    assert f"{name}={value}" in found[1]
    assert (found[2] == f"unset {name}") == (state == "problem")
    monkeypatch.setenv(name, "0" if value == "1" else value)
    assert (only(doctor._environment)["environment"][0] == "ok") == (value == "1")


def test_a_gpus_variables_do_not_matter_without_one(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert only(doctor._environment)["environment"][0] == "ok"


def test_a_gpu_with_a_table_is_fine(gpu) -> None:
    found = only(doctor._gpu)
    assert found["GPU"][0] == found["tiles"][0] == "ok"
    assert "NVIDIA H200, sm_90, 132 multiprocessors, 141 GiB" in found["GPU"][1]


@pytest.mark.parametrize(
    ("change", "topic", "state", "word"),
    [
        ({"major": 7, "minor": 5}, "GPU", "problem", "sm_80"),
        ({"major": 8}, "GPU", "note", "sm_90"),
        ({"shared_memory_per_block_optin": 166912}, "GPU", "problem", "166912"),
        ({"name": "Some GPU"}, "tiles", "note", "tune"),
    ],
)
def test_what_a_gpu_lacks_is_told(gpu, change, topic, state, word) -> None:
    for name, value in change.items():
        setattr(gpu, name, value)
    found = only(doctor._gpu)[topic]
    assert found[0] == state
    assert word in " ".join(found[1:])


def test_missing_compilers_are_told(monkeypatch, gpu) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    found = only(doctor._compilers)
    assert found["C compiler"][0] == "problem"
    assert found["C++ compiler"][:2] == ("note", "CXX=no-such-compiler, which is not there")


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert only(doctor._caches)["Inductor's cache"][0] == "ok"
    assert not os.listdir(tmp_path)  # it was only looked at

    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    state, found, advice = only(doctor._caches)["Inductor's cache"]
    assert (state, found.partition(": ")[2]) == ("problem", "Permission denied")
    assert "TORCHINDUCTOR_CACHE_DIR" in advice


def test_a_wrong_result_of_the_op_is_a_problem(monkeypatch) -> None:
    import dsmoe_op

    right = dsmoe_op.dual_stream_moe
    monkeypatch.setattr(dsmoe_op, "dual_stream_moe", lambda x, **args: right(x, **args) * 1.001)
    found = only(doctor._op)
    assert found["the op, eager"][0] == "problem"
    assert "do not use it" in found["the op, eager"][2]


def row(code: str, mode: str, **fields: Any) -> hazard.Row:
    kernels = {7: 4.0, 9: 2.0} if fields.pop("two", True) else {7: 6.0}
    streams = profiling.Streams(kernels, 100.0, fields.pop("overlap", 40.0) if len(kernels) > 1 else 0.0)
    return hazard.Row(code=code, mode=mode, input="given", calls=20, **{"wrong": 0, "streams": streams, **fields})


@pytest.mark.parametrize(
    ("fields", "state", "word"),
    [
        ({}, "ok", "40.0 of 100.0 us overlap"),
        ({"two": False}, "problem", "one stream"),
        ({"overlap": 0.0}, "problem", "NO overlap"),
        ({"wrong": 3}, "problem", "3 of 20"),
        ({"streams": None, "error": "out of memory"}, "problem", "out of memory"),
    ],
)
def test_what_the_ops_streams_do_is_judged(monkeypatch, fields, state, word) -> None:
    rows = [
        row("dsmoe_op", "eager-captured", **fields),
        hazard.Row(code="dsmoe_op", mode="x", input="made inside", calls=1),
    ]
    monkeypatch.setattr(hazard, "measure", lambda *args: rows)
    (found,) = only(doctor._two_streams).values()
    assert found[0] == state
    assert word in found[1]


@pytest.mark.parametrize(
    ("fields", "state", "word"),
    [
        ({}, "ok", ""),
        ({"two": False}, "note", "drops"),
        ({"wrong": 5}, "note", "wrong results"),
        ({"streams": None, "error": "no capture"}, "note", ""),
    ],
)
def test_what_becomes_of_plain_code_is_told_and_no_fault_of_the_machine(monkeypatch, fields, state, word) -> None:
    monkeypatch.setattr(hazard, "measure", lambda *args: [row("events", "fullgraph", **fields)])
    (found,) = only(doctor._two_streams).values()
    assert found[0] == state
    assert word in found[2]
