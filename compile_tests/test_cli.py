"""The command line on a machine without a GPU: arguments, reports, exit codes, and what `run` compares."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsmoe_op import DualStreamMoE, formats
from dsmoe_op.cli import branches, comparison, decode, hazard, main, output, profiling, quantized, run, small_models
from dsmoe_op.cli.arguments import Formats
from dsmoe_op.cli.profiling import Streams, Work

pytest.importorskip("transformers")

SMALL = [
    "--device",
    "cpu",
    "--hidden",
    "64",
    "--layers",
    "3",
    "--tokens",
    "8",
    "--prompt",
    "The quick brown fox jumps.",
]
SIZE = small_models.Size(layers=3, hidden=64, experts=16)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are promises about machines without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`run` on a small model: its exit code, and the one object on stdout; all else that it said is "stderr" of it."""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["run", *SMALL, *arguments, "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) | {"stderr": captured.err}

    return call


def check_match(code: int, result: dict[str, Any]) -> None:
    """`run` found a match; else the failure shows the rows that do not agree, how near ties were, and a traceback."""
    bad = [row for row in result["patched"] if not row.get("agrees")]
    found = {name: result[name] for name in ("noise", "smallest_gap", "largest_logits_difference")}
    said = "\n".join(line for line in result["stderr"].splitlines() if "%|" not in line)  # but the progress bar
    assert code == 0, f"{bad}\n{found}\n{said[-6000:]}"
    assert result["match"]


# --- arguments ------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_imports_no_transformers() -> None:
    code = (
        "import sys; from dsmoe_op.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('transformers' in sys.modules, 'triton' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(command in out for command in ("run", "hazard", "families"))
    assert out.splitlines()[-1].startswith("False")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "dsmoe_op", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("dsmoe_op ")


@pytest.mark.parametrize(
    ("arguments", "named", "accepted"),
    [
        ("run --hidden 100", "--hidden", "a multiple of 64"),
        ("run --layers 1", "--layers", "2..128"),
        ("run --experts x", "--experts", "2..1024"),
        ("run --tokens 0", "--tokens", "2..1024"),
        ("run --dtype int8", "--dtype", "bf16"),
        ("run --device cuda", "--device", "cpu"),
        ("run --format fp4", "--format", "mxfp4"),
        ("run --format none+none+none", "--format", "or ROUTED+SHARED"),
        ("run --family gpt2", "--family", "deepseek_v3"),
        ("run --schedule both", "--schedule", "dual_shared_main"),
        ("run --cuda-graph-bs 1,two", "--cuda-graph-bs", "1..512 separated by commas"),
        ("run --cuda-graph-bs 0", "--cuda-graph-bs", "1..512 separated by commas"),
        ("run --requests 9 --cuda-graph-bs 8", "--requests", "at most 8"),
        ("run --prompt ''", "--prompt", "at least one character"),
        ("hazard --calls -1", "--calls", "1..100000"),
        ("hazard --modes eager,fast", "--modes", "reduce-overhead"),
        ("walk", "COMMAND", "run"),
        ("", "COMMAND", "required"),
    ],
)
def test_bad_arguments_end_with_2_and_are_named(
    arguments: str, named: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([part.strip("'") for part in arguments.split()])
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert named in error
    assert accepted in error


def test_a_family_that_transformers_lacks_is_refused_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_models, "installed", lambda: ["dots1", "qwen2_moe"])
    with pytest.raises(SystemExit) as exit:
        main(["run", "--family", "llama4"])
    assert exit.value.code == 2
    assert "has no llama4 (choose from dots1, qwen2_moe)" in capsys.readouterr().err


def test_without_transformers_run_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["run", *SMALL]) == 2
    assert "pip install 'dsmoe_op[run]'" in capsys.readouterr().err


# --- run ------------------------------------------------------------------------------------------------------------


def test_run_without_compile_and_graphs_says_so_and_matches(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", *SMALL, "--cuda-graph-bs", "1,2"])
    captured = capsys.readouterr()
    assert code == 0, captured.out
    assert "CUDA graphs: none (a CPU has none)" in captured.out
    assert "compile: none" in captured.out
    assert "no GPU" in captured.out
    assert "\nmatch (" in captured.out
    assert "%|" in captured.err  # the progress bar


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "llama4", "ernie4_5_moe", "qwen3_next", "nemotron_h"])
def test_tokens_in_float32_equal_the_plain_models(family: str, run_json: Any) -> None:
    code, result = run_json("--family", family)
    check_match(code, result)
    assert [row["tokens_equal"] for row in result["patched"]] == [True] * 4
    assert result["moe_layers"] >= 1


def test_numbers_of_requests_are_the_sizes_and_one_that_is_padded(run_json: Any) -> None:
    code, result = run_json("--cuda-graph-bs", "1,4")
    check_match(code, result)
    assert [row["requests"] for row in result["patched"]] == [1, 2, 4]
    assert all(row["tokens_per_s"] > 0 for row in result["plain"] + result["patched"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_in_half_precision_are_as_near_to_float32_as_the_plain_models(dtype: str, run_json: Any) -> None:
    code, result = run_json("--dtype", dtype)
    check_match(code, result)
    assert "float32 model" in result["criterion"]
    assert all(row["agrees"] and row["logits_error"] < 0.2 for row in result["patched"])


@pytest.mark.parametrize("what", ["--dtype fp32", "--dtype bf16", "--format int4", "--format fp8_block"])
def test_a_model_that_computes_something_else_is_a_mismatch(
    what: str, monkeypatch: pytest.MonkeyPatch, run_json: Any
) -> None:
    from dsmoe_op import hf

    swap = hf.replace_moe_blocks

    def swap_and_break(model: torch.nn.Module, schedule: str) -> int:
        count = swap(model, schedule)
        for module in model.modules():
            if isinstance(module, DualStreamMoE):
                module.register_forward_hook(lambda module, inputs, out: 1.5 * out)
        return count

    monkeypatch.setattr(hf, "replace_moe_blocks", swap_and_break)
    code, result = run_json(*what.split(), "--requests", "2")
    assert code == 1
    assert not result["match"]
    assert not any(row["agrees"] for row in result["patched"])


@pytest.mark.parametrize("format", [*formats.FORMATS, "int4+none", "none+mxfp4", "nvfp4+fp8_tensor"])
def test_quantised_weights_give_the_tokens_of_what_they_stand_for(format: str, run_json: Any) -> None:
    code, result = run_json("--format", format, "--requests", "2")
    (row,) = result["patched"]
    check_match(code, result)
    assert result["format"] == format
    if "fp8" in format:  # the experts' rows are quantised too
        assert "rows too" in result["criterion"]
        assert 0.3 * result["noise"] < row["logits_error"]
    else:
        assert row["tokens_equal"]
        assert row["logits_error"] < 1e-5


def test_a_format_that_the_op_does_not_take_here_ends_with_2_and_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(module: DualStreamMoE, dtype: torch.dtype | None = None) -> None:
        assert dtype == torch.float32
        raise ValueError(f"routed_format: expected another GPU, got {module.config.routed_format!r}")

    monkeypatch.setattr(DualStreamMoE, "prepare", prepare)
    assert main(["run", *SMALL, "--format", "int4"]) == 2
    assert "int4 on cpu: routed_format: expected another GPU, got 'int4'" in capsys.readouterr().err


def test_a_patched_model_that_raises_is_a_mismatch_with_its_text(
    monkeypatch: pytest.MonkeyPatch, run_json: Any
) -> None:
    from dsmoe_op import hf

    swap = hf.replace_moe_blocks

    def fails(module: Any, inputs: Any, out: Any) -> None:
        raise RuntimeError("the kernel is tired")

    def swap_and_break(model: torch.nn.Module, schedule: str) -> int:
        count = swap(model, schedule)
        next(m for m in model.modules() if isinstance(m, DualStreamMoE)).register_forward_hook(fails)
        return count

    monkeypatch.setattr(hf, "replace_moe_blocks", swap_and_break)
    code, result = run_json()
    assert code == 1
    assert all("the kernel is tired" in row["error"] for row in result["patched"])
    assert all("error" not in row for row in result["plain"])


def test_plain_experts_whose_kernels_fail_run_as_a_loop(monkeypatch: pytest.MonkeyPatch, run_json: Any) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such kernel here")

    from transformers.integrations import moe

    monkeypatch.setattr(moe, "_grouped_linear", fails)
    code, result = run_json()
    check_match(code, result)
    assert result["plain_experts"] == "eager"
    assert "no such kernel here" in result["stderr"]


def test_compiled_steps_are_one_graph_with_one_node_a_layer(fresh_dynamo: None, inductor: str, run_json: Any) -> None:
    shape = ("--family", "qwen2_moe", "--layers", "2", "--cuda-graph-bs", "1,2,4")
    code, result = run_json("--enable-torch-compile", *shape)
    check_match(code, result)
    assert result["moe_layers"] == 2
    compiled = result["compile"]
    assert compiled["compiles"] == 2  # one for every batch from 2 on, and one for 1
    assert compiled["op_nodes"] == [result["moe_layers"]] * 2
    assert compiled["op_nodes_per_layer"] == [1]
    assert compiled["graph_breaks"] == 0
    rows = [row for row in result["patched"] if row["mode"] == "compiled"]
    assert [(row["requests"], row["batch"]) for row in rows] == [(1, 1), (2, 2), (3, 4), (4, 4)]
    assert all(row["tokens_equal"] for row in rows)
    assert result["cuda_graphs"]["none_because"] == "a CPU has none"


# --- the models -----------------------------------------------------------------------------------------------------


def _build(family: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.nn.Module:
    return small_models.build(family, SIZE, dtype=dtype, device="cpu", seed=seed)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_seed_gives_one_model_and_dtypes_only_round_it(family: str) -> None:
    exact, again, other = (_build(family, seed=seed).state_dict() for seed in (3, 3, 4))
    rounded = _build(family, torch.bfloat16).state_dict()
    changed = 0
    for name, tensor in exact.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.to(rounded[name].dtype), rounded[name])
        changed += not torch.equal(tensor, other[name])
    assert changed > len(exact) / 2


@pytest.mark.parametrize("family", ["deepseek_v3", "afmoe", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_those_of_a_loaded_checkpoint(family: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    model = _build(family)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).state_dict()  # type: ignore[attr-defined]
    built = _build(family, dtype).state_dict()
    assert {name: tensor.dtype for name, tensor in built.items()} == {k: v.dtype for k, v in loaded.items()}
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in built.items())


def test_greedy_tokens_are_neither_constant_nor_near_ties() -> None:
    model = _build("deepseek_v3", seed=0)
    batch = decode.Batch(model, decode.plain_step(model), rows=2, max_length=40)
    with torch.no_grad():
        decoded = decode.decode(batch, torch.randint(0, 256, (2, 10)), 20)
    assert decoded.tokens.unique().numel() > 8
    best = decoded.logits.topk(2, -1).values
    assert (best[..., 0] - best[..., 1]).median() > 0.1


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_decoding_from_the_static_cache_is_the_forward_without_one(family: str) -> None:
    model = _build(family)
    prompts = torch.randint(0, 256, (2, 11))
    batch = decode.Batch(model, decode.plain_step(model), rows=3, max_length=24)  # one row is padding
    with torch.no_grad():
        decode.decode(batch, torch.randint(0, 256, (3, 9)), 4)  # what an earlier request left must not show
        decoded = decode.decode(batch, prompts, 7)
        whole = model(torch.cat([prompts, decoded.tokens], 1)[:, :-1]).logits[:, 10:]
    torch.testing.assert_close(decoded.logits, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(decoded.tokens, whole.argmax(-1))


@torch.no_grad()
def test_input_scales_are_of_the_largest_that_a_text_makes() -> None:
    model, text = _build("deepseek_v3"), torch.randint(0, 256, (1, 9))
    block, seen = model.get_submodule("model.layers.1.mlp"), {}
    block.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].reshape(9, -1)))
    block.shared_experts.down_proj.register_forward_pre_hook(lambda _, inputs: seen.update(shared=inputs[0]))
    model(text)
    gate, up = torch.einsum("th,erh->etr", seen["x"], block.experts.gate_up_proj).chunk(2, -1)
    largest = {"w13": seen["x"], "w2": torch.nn.functional.silu(gate) * up} | {
        "shared_w13": seen["x"],
        "shared_w2": seen["shared"],
    }
    block.shared_experts.down_proj._forward_pre_hooks.clear()
    patched, _ = quantized.twin(model, Formats("fp8_tensor", "fp8_tensor"), "auto", text)
    tensors = patched.get_submodule("model.layers.1.mlp").tensors()
    for name, values in largest.items():
        torch.testing.assert_close(tensors[f"{name}_input_scale"] * 448, values.abs().max().reshape(1))


class _Recorder(TorchDispatchMode):
    """The aten calls of a step, to be repeated as a CUDA graph does: without a line of its Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "llama4", "gpt_oss", "qwen3_next", "longcat_flash"])
def test_a_patched_step_can_be_replayed(family: str) -> None:
    """It reads nothing back to the host, and nothing in it depends on a number that Python keeps."""
    from dsmoe_op import replace_moe_blocks

    model = _build(family)
    replace_moe_blocks(model)
    prompts = torch.randint(0, 256, (3, 12))
    with torch.no_grad():
        expected = decode.decode(decode.Batch(model, decode.plain_step(model), 3, 32), prompts, 8)
        batch = decode.Batch(model, decode.plain_step(model), 3, 32)
        batch.prefill(torch.randint(0, 256, (3, 5)))
        batch.advance()
        with _Recorder() as recorder:
            logits = batch.advance()
        batch.advance = lambda: (recorder.replay(), logits)[1]  # type: ignore[method-assign]
        replayed = decode.decode(batch, prompts, 8)
    names = " ".join(str(func) for func, *_ in recorder.calls)
    assert "_local_scalar_dense" not in names
    assert "nonzero" not in names
    assert torch.equal(replayed.tokens, expected.tokens)
    torch.testing.assert_close(replayed.logits, expected.logits, rtol=1e-5, atol=1e-5)


class _Graph:
    """A CUDA graph that is a recorder."""

    def __init__(self) -> None:
        self.recorder = _Recorder()
        self.pool: object = None

    def replay(self) -> None:
        self.recorder.replay()


def test_sizes_are_captured_largest_first_in_one_pool_and_requests_padded_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path of a GPU, with recorders for graphs and without streams."""
    pools = []

    def graph(graph: _Graph, pool: object) -> _Recorder:
        pools.append(pool)
        return graph.recorder

    class NoStream:
        def wait_stream(self, other: object) -> None:
            pass

    fakes = {
        "CUDAGraph": _Graph,
        "graph": graph,
        "graph_pool_handle": lambda: "the pool",
        "Stream": NoStream,
        "current_stream": NoStream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    job = comparison.Job(
        family="deepseek_v3",
        size=SIZE,
        dtype="fp32",
        device=torch.device("cpu"),
        prompt="The quick brown fox jumps.",
        tokens=6,
        schedule="auto",
        seed=0,
        sizes=(1, 4),
        requests=(1, 3),
        compile=False,
        graphs=True,
        compare_modes=False,
    )
    result = comparison.compare(job)
    assert result.match
    assert result.captured == [4, 1]
    assert pools == ["the pool"] * 2
    rows = [row for row in result.rows if row.mode == "CUDA graph"]
    assert [(row.requests, row.batch, row.tokens_equal) for row in rows] == [(1, 1, True), (3, 4, True)]
    assert all(row.logits_error is not None and row.logits_error < 1e-5 for row in rows)


# --- streams --------------------------------------------------------------------------------------------------------


def test_overlap_is_the_time_in_which_two_streams_work() -> None:
    work = [
        Work("a", 7, 0, 10),
        Work("b", 7, 10, 12),
        Work("c", 9, 8, 20),
        Work("late", 11, 15, 16),
        Work("d", 7, 30, 31),
    ]
    streams = profiling.summarize(work, calls=2, leave_out=("late",))
    assert streams.kernels == {7: 1.5, 9: 0.5}
    assert streams.overlap_us == pytest.approx(4 / 2)  # 8..12
    assert streams.busy_us == pytest.approx(21 / 2)


def test_one_streams_kernels_never_overlap() -> None:
    streams = profiling.summarize([Work("a", 7, 0, 10), Work("b", 7, 9, 12)])
    assert streams.overlap_us == 0
    assert "no overlap" in streams.words()
    assert "NO overlap" in profiling.summarize([Work("a", 7, 0, 10), Work("b", 8, 10, 12)]).words()


def test_a_trace_gives_kernels_copies_and_fills_in_order() -> None:
    def event(category: str, ts: float, stream: int) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": f"{category}{ts}", "ts": ts, "dur": 2, "args": {"stream": stream}}

    events = [event("kernel", 5.5, 13), event("cpu_op", 1, 0), event("gpu_memset", 3, 7), {"ph": "M", "name": "meta"}]
    assert profiling.read_trace({"traceEvents": events}) == [
        Work("gpu_memset3", 7, 3, 5),
        Work("kernel5.5", 13, 5.5, 7.5),
    ]


# --- hazard and families --------------------------------------------------------------------------------------------


def test_hazard_without_a_gpu_says_what_it_would_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hazard"]) == 2
    error = capsys.readouterr().err
    assert "needs a GPU" in error
    assert "wrong result" in error


@pytest.mark.parametrize("made_inside", [False, True])
def test_hazards_plain_layer_is_the_ops(made_inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"T": 5, "H": 32, "I": 24, "S": 48}.items():
        monkeypatch.setattr(branches, name, value)
    weights = branches.Weights(torch.float32, "cpu", seed=1)
    x = torch.randn(5, 32)

    def late(x: Tensor, where: int) -> Tensor:
        return x.clone()

    plain, ours = (
        branches.layer(code, weights, late, two_streams=False, made_inside=made_inside)
        for code in ("events", branches.OURS)
    )
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)


def _row(code: str, **values: Any) -> hazard.Row:
    streams = Streams({7: 9, 13: 3}, 100.0, 20.0)
    return hazard.Row(
        **{"code": code, "mode": "eager", "input": "given", "calls": 9, "wrong": 0, "streams": streams, **values}
    )


@pytest.mark.parametrize(
    ("ours", "code"),
    [
        ({}, 0),
        ({"wrong": 1, "largest_difference": 0.5}, 1),
        ({"streams": Streams({7: 12}, 100.0, 0.0)}, 1),
        ({"error": "RuntimeError: no"}, 1),
    ],
)
def test_hazards_exit_code_is_the_ops_alone(
    ours: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    plain = _row("events", wrong=4, largest_difference=float("nan"), streams=Streams({7: 12}, 50.0, 0.0))
    monkeypatch.setattr(hazard, "measure", lambda *arguments: [_row(branches.OURS, **ours), plain])
    assert main(["hazard"]) == code
    text = capsys.readouterr().out
    assert "plain code: two streams in 0 of 1 rows; wrong results in 1 rows, at worst in 4 of 9 calls" in text
    assert main(["hazard", "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert result["ours_good"] is (code == 0)
    assert result["rows"][1]["kernels_by_stream"] == {"7": 12}
    assert result["rows"][1]["largest_difference"] is None


def test_families_is_a_markdown_table_of_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    from dsmoe_op.hf import families

    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(families())
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert any("DeepseekV3MoE" in line for line in lines)


def test_a_reports_numbers_are_right_aligned() -> None:
    lines = output.table(("name", "n"), [("a", 5), ("bcd", 12)]).splitlines()
    assert lines == ["name   n", "a      5", "bcd   12"]


def test_the_default_prompt_leaves_room_for_the_tokens() -> None:
    assert 100 < len(run.PROMPT.encode()) < 1000


# --- host_bench -----------------------------------------------------------------------------------------------------


def test_host_bench_times_the_parts_of_a_call(capsys) -> None:
    from dsmoe_op.cli import host_bench

    host_bench.main(["--device", "cpu", "--batches", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["T"], report["schedule"]) == ("cpu", 1, "dual")
    assert [row["part"].strip() for row in report["rows"]][:2] == ["DualStreamMoE", "dual_stream_moe"]
    assert all(row["microseconds"] > 0 for row in report["rows"])
