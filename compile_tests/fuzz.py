"""Whole layers drawn at random: any knobs, tensors, strides, sizes and ways in, and routing at its worst.

What a call routes to is held against the float64 definition in the rows whose choice hangs on no rounding, and what it
computes for that routing in all rows, element by element, within the bounds of `bounds.py`.
"""

from __future__ import annotations

import math
from typing import Any

import bounds
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from layers import WAYS, make_layer, tensors_of
from torch import Tensor

from dsmoe_op import MoEConfig, checks, config, dual_stream_moe, dual_stream_moe_unfinalized, finalize, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORST = ("plain", "one expert", "ties", "nan rows", "-inf rows", "underflow", "sentinels", "duplicates")


def fuzz(max_examples: int) -> Any:
    """Each run draws anew; hypothesis says how to repeat an example that fails."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@st.composite
def layers(
    draw: st.DrawFn, tokens: st.SearchStrategy[int], dtypes: tuple[torch.dtype, ...] = DTYPES, **sizes: int
) -> dict[str, Any]:
    """Arguments of `make_layer`, the seed of its numbers, how tensors lie, and what is bad about the routing."""
    flags = {name: draw(st.booleans()) for name in ("expert_bias", "shared_gate", "router_bias", "correction_bias")}
    way = draw(st.sampled_from(WAYS))
    flags["router_bias"] &= way == "router_weight"
    flags["correction_bias"] &= way != "topk_ids"
    S = draw(st.sampled_from([0, sizes.get("S", 64)]))
    flags["shared_gate"] &= S > 0
    on_input = draw(st.booleans())
    zero_experts = 0 if on_input else draw(st.sampled_from([0, 2, 4]))
    E_global = draw(st.sampled_from([None, 20]))
    E_logits = (E_global or sizes.get("E", 12)) + zero_experts
    n_group = draw(st.sampled_from([None, *(n for n in (2, 3, 4) if E_logits % n == 0)]))
    topk_group = None if n_group is None else draw(st.integers(1, n_group))
    eligible = E_logits if n_group is None else E_logits // n_group * topk_group
    names = [name for name in config._CHOICES if not name.endswith("_format")]  # formats: test_formats.py
    choices = {name: draw(st.sampled_from(config._CHOICES[name])) for name in names}
    knobs = MoEConfig(
        top_k=draw(st.integers(1, min(eligible, 6))),
        n_group=n_group,
        topk_group=topk_group,
        apply_router_weight_on_input=on_input,
        num_zero_experts=zero_experts,
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        clamp_routed=draw(st.sampled_from([None, 0.4])),
        clamp_shared=draw(st.sampled_from([None, 0.7])),
        clamp_after_activation=draw(st.booleans()),
        **choices,
    )
    T = draw(tokens)
    return {
        "seed": draw(st.integers(0, 2**31 - 1)),
        "worst": draw(st.sampled_from(WORST)),
        "schedule": draw(st.sampled_from(checks.SCHEDULES)),
        "moved": draw(st.sets(st.sampled_from(sorted(MOVABLE)), max_size=4)),
        "make": {
            **{"T": T, "way": way, "config": knobs, "dtype": draw(st.sampled_from(dtypes)), **sizes, "S": S, **flags},
            "router_dtype": draw(st.sampled_from([None, *dtypes])),
            "valid_tokens": draw(st.sampled_from([None, None, -1, 0, T // 2, T, T + 3])),
            "E_global": E_global,
        },
    }


MOVABLE = {
    **dict.fromkeys(("w13", "w2", "shared_w13", "shared_w2", "router_weight"), ("rows", "offset", "columns")),
    **dict.fromkeys(("router_logits", "topk_ids", "topk_weights"), ("rows", "offset", "columns", "steps")),
    **dict.fromkeys(("hidden_states", "w13_bias", "w2_bias"), ("rows", "offset", "columns", "steps")),
    **dict.fromkeys(("router_bias", "correction_bias", "expert_map", "shared_gate"), ("offset", "steps")),
}


def moved(t: Tensor, how: str) -> Tensor:
    """The same values in other places, with garbage between them."""
    garbage = math.nan if t.is_floating_point() else 10**6
    if how == "offset":
        room = t.new_full((t.numel() + 3,), garbage)
        return room[3:].view(t.shape).copy_(t)
    if how == "columns" and t.dim() > 1:
        return moved(t.mT, "rows").mT
    step, pad = (2, 0) if how == "steps" else (1, 24)
    room = t.new_full((*t.shape[:-1], step * t.shape[-1] + pad), garbage)
    return room[..., : step * t.shape[-1] : step].copy_(t)


def drawn(layer: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The call's arguments."""
    torch.manual_seed(layer["seed"])
    x, args = make_layer(**layer["make"])
    worst, T = layer["worst"], len(x)
    some = torch.rand(T) < 0.3
    routed = next(args[name] for name in ("router_logits", "topk_ids", "router_weight") if name in args)
    if "topk_ids" in args:
        E = int(routed.max()) + 1 if T else 1
        if worst == "one expert":
            routed[:] = int(torch.randint(E, ()))
        elif worst == "duplicates":
            routed[some, -1] = routed[some, 0]
        elif worst == "sentinels":
            bad = torch.tensor([-1, -7, 10**6, -(2**31), 2**31 - 1], dtype=torch.int32)
            routed[:] = torch.where(torch.rand(routed.shape) < 0.3, bad[torch.randint(5, routed.shape)], routed)
            if layer["seed"] % 2:
                args["topk_ids"] = routed.long() + torch.where(routed < 0, -(2**40), 0)
    elif worst == "nan rows":
        (routed if "router_logits" in args else x)[some] = math.nan
    elif worst == "one expert" and "correction_bias" in args:
        args["correction_bias"][0] = 50.0
    elif "router_logits" in args:
        if worst == "ties":
            routed.round_()
        elif worst == "-inf rows":
            routed[some] = -math.inf
        elif worst == "underflow":
            routed.sub_(200.0)
    args = {"hidden_states": x, **args}
    for name in sorted(layer["moved"] & args.keys()):
        args[name] = moved(args[name], MOVABLE[name][layer["seed"] % len(MOVABLE[name])])
    return args.pop("hidden_states"), args


def check_routing(x: Tensor, args: dict[str, Any], pieces: Any) -> int:
    """Holds ids and weights against the definition; the number of rows in which that was possible."""
    knobs, valid = args["config"], args.get("num_valid_tokens")
    logits = bounds.logits_of(args, x)
    ids, weights, error, is_clear = bounds.routing(logits, knobs, args.get("correction_bias"), x.dtype)
    expert_map = args.get("expert_map")
    routed = len(args["w13"]) if expert_map is None else len(expert_map)
    contributes = torch.ones_like(ids, dtype=torch.bool)
    if expert_map is not None:
        contributes = (expert_map[ids.clamp(max=routed - 1)] >= 0) | (ids >= routed)
    if valid is not None:
        contributes &= (torch.arange(len(ids)) < valid).unsqueeze(1)
    ids, weights = ids.where(contributes, -1), weights.where(contributes, 0.0)
    order = ids.argsort(dim=1)
    got_order = pieces.topk_ids.argsort(dim=1)
    got_ids, got_weights = pieces.topk_ids.gather(1, got_order), pieces.topk_weights.gather(1, got_order)
    ids, weights, error = ids.gather(1, order), weights.gather(1, order), error.gather(1, order)
    assert torch.equal(got_ids[is_clear].long(), ids[is_clear])
    assert ((got_weights - weights).abs() <= error)[is_clear].all()
    is_twice = (got_ids.diff(dim=1) == 0) & (got_ids[:, 1:] >= 0)
    assert not is_twice.any()
    assert ((got_ids >= -1) & (got_ids < routed + knobs.num_zero_experts)).all()
    if knobs.score != "none" or knobs.weights_from != "score":  # a sum of logits may be near 0, and a quotient anything
        assert got_weights.isfinite().all()
    return int(is_clear.sum())


def check(layer: dict[str, Any], counted: Any) -> None:
    """Holds one drawn layer against the definition."""
    x, args = drawn(layer)
    args["schedule"] = layer["schedule"]
    knobs, given = args["config"], {n: t.clone() for n, t in tensors_of(x, args).items()}
    out, pieces = dual_stream_moe(x, **args), dual_stream_moe_unfinalized(x, **args)
    assert torch.equal(out.nan_to_num(), finalize(pieces, config=knobs, hidden_states=x).nan_to_num())
    if "topk_ids" in args:
        ids, weights = args["topk_ids"], args["topk_weights"]
    else:
        counted("rows of random layers with the routing of float64", check_routing(x, args, pieces))
        ids, weights = pieces.topk_ids, pieces.topk_weights
    for name, t in tensors_of(x, args).items():
        torch.testing.assert_close(t, given[name], rtol=0, atol=0, equal_nan=True)

    ways = ("router_weight", "router_bias", "correction_bias", "router_logits", "topk_ids", "topk_weights")
    rest = {name: value for name, value in args.items() if name not in (*ways, "schedule")}
    want = reference.moe(x, topk_ids=ids, topk_weights=weights, **rest)
    bound = bounds.moe(x, ids, weights, **rest)
    finite = want.isfinite() & bound.isfinite()
    assert ((out - want).abs() <= bound)[finite].all()
    is_calm = x.isfinite().all(1) & (weights.abs() < 10).all(1)
    assert finite[is_calm].all()
    counted("random layers held against the float64 definition")
