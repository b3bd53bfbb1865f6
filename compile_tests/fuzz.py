"""Whole layers drawn at random: any knobs, tensors, formats, strides, sizes and ways in, and routing at its worst.

What a call routes to is held against the float64 definition in the rows whose choice hangs on no rounding, and what it
computes for that routing in all rows, element by element, within the bounds of `bounds.py`.
"""

from __future__ import annotations

import math
import random
from typing import Any

import bounds
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from layers import WAYS, make_layer, quantized, same, tensors_of
from torch import Tensor

from dsmoe_op import (
    MoEConfig,
    checks,
    config,
    dual_stream_moe,
    dual_stream_moe_unfinalized,
    finalize,
    formats,
    reference,
)

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
    draw: st.DrawFn, tokens: st.SearchStrategy[int], dtypes: tuple[torch.dtype, ...] = DTYPES,
    mix: tuple[str | None, str | None] = (None, None), **sizes: int,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `make_layer`, the seed of its numbers, how tensors lie, and what is bad about the routing.

    `mix` are the formats of the routed and of the shared experts.
    """
    flags = {name: draw(st.booleans()) for name in ("expert_bias", "shared_gate", "router_bias", "correction_bias")}
    way = draw(st.sampled_from(WAYS))
    routed, shared = mix
    if routed or shared:  # one or two blocks of fp8_block, one or more groups, this way or that
        H, I = sizes.get("H", 48), sizes.get("I", 32)
        H, I = draw(st.sampled_from([(144, I), (H, 144), (H, I)]))  # hypothesis begins with the first of each
        sizes |= {"H": H, "I": I, "S": 2 * I}
    flags["router_bias"] &= way == "router_weight"
    flags["correction_bias"] &= way != "topk_ids"
    S = draw(st.sampled_from([0, sizes.get("S", 64)][shared is not None and routed is None :]))
    flags["shared_gate"] &= S > 0
    on_input = draw(st.booleans())
    zero_experts = 0 if on_input else draw(st.sampled_from([0, 2, 4]))
    E_global = draw(st.sampled_from([None, 20]))
    E_logits = (E_global or sizes.get("E", 12)) + zero_experts
    n_group = draw(st.sampled_from([None, *(n for n in (2, 3, 4) if E_logits % n == 0)]))
    topk_group = None if n_group is None else draw(st.integers(1, n_group))
    eligible = E_logits if n_group is None else E_logits // n_group * topk_group
    names = [name for name in config._CHOICES if not name.endswith("_format")]  # `quantized` sets these
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
        "schedule": draw(st.sampled_from([s for s in checks.SCHEDULES if s != "fused" or routed == shared])),
        "formats": {
            "routed": routed,
            "shared": shared if S else None,
            "group": draw(st.sampled_from([32, 64, 128])),
            "zero_point": draw(st.sampled_from([True, False])),
        },
        "moved": draw(st.sets(st.sampled_from(sorted(MOVABLE)), max_size=4)),
        "make": {
            **{"T": T, "way": way, "config": knobs, "dtype": draw(st.sampled_from(dtypes)), **sizes, "S": S, **flags},
            "router_dtype": draw(st.sampled_from([None, *dtypes])),
            "valid_tokens": draw(st.sampled_from([None, None, -1, 0, T // 2, T, T + 3])),
            "E_global": E_global,
        },
    }


def beside(routed: str | None) -> st.SearchStrategy[str | None]:
    """Formats of the shared expert, so that the layer has one."""
    return st.sampled_from([name for name in (None, *formats.FORMATS) if name or routed])


MOVABLE = {
    **dict.fromkeys(("w13", "w2", "shared_w13", "shared_w2", "router_weight"), ("rows", "offset", "columns")),
    **dict.fromkeys(("router_logits", "topk_ids", "topk_weights"), ("rows", "offset", "columns", "steps")),
    **dict.fromkeys(("hidden_states", "w13_bias", "w2_bias"), ("rows", "offset", "columns", "steps")),
    **dict.fromkeys(("router_bias", "correction_bias", "expert_map", "shared_gate"), ("offset", "steps")),
}


def moved(t: Tensor, how: str) -> Tensor:
    """The same values in other places, with garbage between them."""
    garbage = math.nan if t.is_floating_point() else min(10**6, torch.iinfo(t.dtype).max)
    if how == "offset":
        room = t.new_full((t.numel() + 3,), garbage)
        return room[3:].view(t.shape).copy_(t)
    if how == "columns" and t.dim() > 1:
        return moved(t.mT, "rows").mT
    step, pad = (2, 0) if how == "steps" else (1, 24)
    room = t.new_full((*t.shape[:-1], step * t.shape[-1] + pad), garbage)
    return room[..., : step * t.shape[-1] : step].copy_(t)


def quantized_at_random(args: dict[str, Any], routed: str | None, shared: str | None, **options: Any) -> dict[str, Any]:
    """The layer in these formats, its tensors in any dtypes, shapes and places that are taken.

    Each 16 rows and columns of a weight are of a size of their own, and each half of it, so that scales differ; in
    float16 none is larger than it was, so that no product leaves that dtype's range.
    """
    prefixes = [prefix for prefix, format in (("", routed), ("shared_", shared)) if format and f"{prefix}w13" in args]
    args = dict(args)
    for name in (f"{prefix}{weight}" for prefix in prefixes for weight in ("w13", "w2")):
        w = args[name]
        *experts, rows, columns = w.shape
        sizes = 2.0 ** torch.randint(-2, 3, (*experts, -(-rows // 16), -(-columns // 16)))
        sizes = sizes.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., :rows, :columns]
        sizes = sizes * 4.0 ** torch.randint(-1, 2, (*experts, 2, 1)).repeat_interleave(rows // 2, -2)
        args[name] = w * (sizes / sizes.max() if w.dtype == torch.float16 else sizes).to(w.dtype)
    int4 = options if "int4" in (routed, shared) else {}
    new = quantized(args, routed, shared, **int4)
    for name in (f"{prefix}{weight}" for prefix in prefixes for weight in ("w13", "w2")):
        format = new["config"].format_of(name)
        parts = respelt(format, formats.quantised(new, name), new[name].shape[:-2])
        for suffix, t in zip(formats.SUFFIXES, parts, strict=True):
            if t is not None:
                new[name + suffix] = moved(t, "offset") if random.random() < 0.5 else t
    return new


def respelt(format: str, weight: formats.Quantised, experts: tuple[int, ...]) -> formats.Quantised:
    """The same numbers in other dtypes and shapes, or about the same where a scale takes a smaller dtype."""
    q, scale, zero_point, global_scale, input_scale = weight

    def any_of(*ways: Tensor) -> Tensor:
        return random.choice(ways)

    def per_tensor(t: Tensor) -> Tensor:
        return any_of(t, t[..., :1], t[..., 0]) if t.dim() > len(experts) else any_of(t, t.unsqueeze(-1))

    if format == "int4":
        q, scale = any_of(q, q.view(torch.int32)), any_of(scale, scale.bfloat16(), scale.half())
        if zero_point is not None:
            rows = formats.unpack_rows(zero_point, 2 * zero_point.shape[-2], torch.uint8)
            zero_point = any_of(zero_point, formats.pack_rows(rows, torch.int32))
    elif format == "fp8_block":
        powers = scale.to(formats.E8M0)
        scale = any_of(scale, powers, powers.view(torch.uint8))
    elif format == "fp8_channel":
        scale = any_of(scale, scale.bfloat16())
    elif format == "fp8_tensor":
        scale = per_tensor(scale)
        one = torch.full((), 5 / 448)
        each = one * 2.0 ** torch.randint(-6, 1, experts or (1,))
        input_scale = any_of(each, each, one, one.view(1))
    else:
        q = any_of(q, q.view(torch.int8))
        scale = any_of(scale, scale.view(torch.uint8)) if format == "mxfp4" else scale
        global_scale = None if global_scale is None else per_tensor(global_scale)
    return formats.Quantised(
        *(None if t is None else t.contiguous() for t in (q, scale, zero_point, global_scale, input_scale))
    )


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
    random.seed(layer["seed"])
    args = {"hidden_states": x, **quantized_at_random(args, **layer["formats"])}
    for name in sorted(layer["moved"] & args.keys()):
        if name + "_scale" in args:  # quantised, and laid out by now
            continue
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
    in_two = finalize(pieces, config=knobs, hidden_states=x)
    differ = (out.nan_to_num() != in_two.nan_to_num()).nonzero()
    assert not len(differ), (
        f"{len(differ)} elements, the first at {differ[0]}: {out[*differ[0]]} and {in_two[*differ[0]]}"
    )
    if "topk_ids" in args:
        ids, weights = args["topk_ids"], args["topk_weights"]
    else:
        counted("rows of random layers with the routing of float64", check_routing(x, args, pieces))
        ids, weights = pieces.topk_ids, pieces.topk_weights
    for name, t in tensors_of(x, args).items():
        assert same(t, given[name]), name

    want, bound = definition(x, ids, weights, args)
    finite = want.isfinite() & bound.isfinite()
    assert ((out - want).abs() <= bound)[finite].all()
    is_calm = x.isfinite().all(1) & (weights.abs() < 10).all(1)
    assert finite[is_calm].all()
    kind = "random layers" if knobs.routed_format is knobs.shared_format is None else "random quantised layers"
    counted(f"{kind} held against the float64 definition")


def definition(x: Tensor, ids: Tensor, weights: Tensor, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[T, H] twice, float64: what the definition says for that routing, and how far off a layer may be."""
    ways = ("router_weight", "router_bias", "correction_bias", "router_logits", "topk_ids", "topk_weights")
    rest = {name: value for name, value in args.items() if name not in (*ways, "schedule")}
    fraction = bounds.fp8_fraction(x.device)
    bound = bounds.moe(x, ids, weights, **rest, fp8_fraction=fraction)
    return reference.moe(x, topk_ids=ids, topk_weights=weights, **rest), bound
