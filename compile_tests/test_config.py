"""MoEConfig: what it accepts, and the canonical string by which it crosses the op."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re

import pytest

from dsmoe_op import MoEConfig

# field: (its default, its other values). Written out here, so that a change of either is noticed.
CHOICES = {
    "score": ("sigmoid", ["softmax", "sqrtsoftplus", "none"]),
    "choice_on": ("score", ["logit"]),
    "group_score": ("top2_sum", ["max"]),
    "group_mask": ("-inf", ["zero"]),
    "weights_from": ("score", ["topk_softmax", "topk_sigmoid"]),
    "normalize": ("sum_eps", ["none", "sum", "sum_clamp"]),
    "scale_on": ("weights", ["output"]),
    "router_dtype": ("float32", ["model"]),
    "score_dtype": ("float32", ["model"]),
    "weight_dtype": ("float32", ["model"]),
    "activation": ("silu", ["gelu", "gelu_tanh", "swiglu_oai", "relu2"]),
    "w13_order": ("gate_up", ["up_gate", "interleaved"]),
    "combine": ("sum", ["average"]),
}
OTHERS = {
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "apply_router_weight_on_input": False,
    "clamp_routed": None,
    "clamp_shared": None,
    "clamp_after_activation": False,
    "num_zero_experts": 0,
    "routed_format": None,
    "shared_format": None,
}
FORMATS = ["fp8_block", "fp8_channel", "fp8_tensor", "nvfp4", "mxfp4", "int4"]
VARIANTS = [
    {"top_k": 8},
    {"top_k": 6},
    *({"top_k": 8, name: value} for name, (_, values) in CHOICES.items() for value in values),
    {"top_k": 8, "n_group": 8, "topk_group": 4},
    {"top_k": 8, "n_group": 8, "topk_group": 3},
    {"top_k": 8, "n_group": 4, "topk_group": 4},
    {"top_k": 8, "routed_scaling_factor": 2.827},
    {"top_k": 8, "apply_router_weight_on_input": True},
    {"top_k": 8, "clamp_routed": 7.0},
    {"top_k": 8, "clamp_shared": 7.0},
    {"top_k": 8, "clamp_after_activation": True},
    {"top_k": 8, "num_zero_experts": 2},
    *({"top_k": 8, "routed_format": name} for name in FORMATS),
    *({"top_k": 8, "shared_format": name} for name in FORMATS),
    {"top_k": 8, "routed_format": "int4", "shared_format": "fp8_block"},
]


def test_fields_and_defaults_are_deepseek_v3_without_groups():
    defaults = {name: default for name, (default, _) in CHOICES.items()} | OTHERS
    fields = {f.name: f.default for f in dataclasses.fields(MoEConfig) if f.init}
    assert fields.pop("top_k") is dataclasses.MISSING
    assert fields == defaults


def test_it_is_frozen_and_keyword_only():
    config = MoEConfig(top_k=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 4
    with pytest.raises(TypeError):
        MoEConfig(8)
    with pytest.raises(TypeError):
        MoEConfig()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["nonsense", None, 1, []], ids=repr)
def test_a_choice_outside_its_values_is_refused(name, value):
    default, others = CHOICES[name]
    with pytest.raises(ValueError, match=f"^{name}: expected one of ") as e:
        MoEConfig(top_k=8, **{name: value})
    text = str(e.value)
    assert text.endswith(f"got {value!r}")
    assert all(repr(accepted) in text for accepted in [default, *others])


@pytest.mark.parametrize("name", ["routed_format", "shared_format"])
@pytest.mark.parametrize("value", ["nonsense", "none", "fp8", 1, []], ids=repr)
def test_a_name_that_is_no_formats_is_refused(name, value):
    names = ", ".join(map(repr, [None, *FORMATS]))
    with pytest.raises(ValueError, match=f"^{name}: expected one of {re.escape(f'{names}, got {value!r}')}$"):
        MoEConfig(top_k=8, **{name: value})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"top_k": 0}, "top_k: expected an integer in 1..32, got 0"),
        ({"top_k": 33}, "top_k: expected an integer in 1..32, got 33"),
        ({"top_k": 8.0}, "top_k: expected an integer in 1..32, got 8.0"),
        ({"top_k": math.nan}, "top_k: expected an integer in 1..32, got nan"),
        ({"top_k": True}, "top_k: expected an integer in 1..32, got True"),
        ({"top_k": "8"}, "top_k: expected an integer in 1..32, got '8'"),
        ({"n_group": 4}, "topk_group: expected n_group and topk_group given together, or neither, got None"),
        ({"topk_group": 4}, "n_group: expected n_group and topk_group given together, or neither, got None"),
        ({"n_group": 0, "topk_group": 0}, "n_group: expected an integer in 1..1024, got 0"),
        ({"n_group": 4, "topk_group": 5}, "topk_group: expected an integer in 1..4, got 5"),
        ({"n_group": 4, "topk_group": 0}, "topk_group: expected an integer in 1..4, got 0"),
        ({"n_group": math.nan, "topk_group": 1}, "n_group: expected an integer in 1..1024, got nan"),
        ({"num_zero_experts": -1}, "num_zero_experts: expected an integer in 0..1024, got -1"),
        ({"num_zero_experts": math.nan}, "num_zero_experts: expected an integer in 0..1024, got nan"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor: expected a finite number, got nan"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor: expected a finite number, got inf"),
        ({"routed_scaling_factor": 10**39}, f"routed_scaling_factor: expected a finite number, got {10**39}"),
        ({"routed_scaling_factor": 1e39}, "routed_scaling_factor: expected a finite number, got 1e+39"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor: expected a finite number, got None"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor: expected a finite number, got '2'"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor: expected a finite number, got True"),
        ({"clamp_routed": math.nan}, "clamp_routed: expected a finite number above 0, or None, got nan"),
        ({"clamp_routed": 0}, "clamp_routed: expected a finite number above 0, or None, got 0"),
        ({"clamp_shared": math.inf}, "clamp_shared: expected a finite number above 0, or None, got inf"),
        ({"clamp_shared": -7.0}, "clamp_shared: expected a finite number above 0, or None, got -7.0"),
        ({"clamp_after_activation": 1}, "clamp_after_activation: expected True or False, got 1"),
        ({"apply_router_weight_on_input": None}, "apply_router_weight_on_input: expected True or False, got None"),
        (
            {"apply_router_weight_on_input": True, "num_zero_experts": 2},
            "num_zero_experts: expected 0 with apply_router_weight_on_input, got 2",
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_number_outside_its_range_is_refused(fields, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MoEConfig(**{"top_k": 8, **fields})


def test_the_key_is_top_k_and_what_differs_from_the_defaults():
    assert MoEConfig(top_k=8).key == '{"top_k":8}'
    config = MoEConfig(top_k=8, routed_scaling_factor=2.5, n_group=8, topk_group=4, score="sigmoid")
    assert config.key == '{"n_group":8,"routed_scaling_factor":2.5,"top_k":8,"topk_group":4}'


def test_equal_configs_have_one_key_however_they_were_written():
    a = MoEConfig(top_k=8, clamp_routed=7, routed_scaling_factor=2)
    b = MoEConfig(routed_scaling_factor=2.0, clamp_routed=7.0, top_k=8, score="sigmoid", n_group=None)
    assert a == b
    assert hash(a) == hash(b)
    assert a.key == b.key


def test_configs_that_differ_have_different_keys():
    configs = [MoEConfig(**fields) for fields in VARIANTS]
    assert len({c.key for c in configs}) == len(set(configs)) == len(VARIANTS)


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: json.dumps(fields))
def test_the_key_is_canonical_json(fields):
    key = MoEConfig(**fields).key
    assert json.loads(key) == fields
    assert json.dumps(fields, separators=(",", ":"), sort_keys=True) == key


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: json.dumps(fields))
def test_a_config_comes_back_from_its_key_pickle_and_copies(fields):
    config = MoEConfig(**fields)
    for other in (
        MoEConfig.from_key(config.key),
        pickle.loads(pickle.dumps(config)),
        copy.copy(config),
        copy.deepcopy(config),
        dataclasses.replace(config),
    ):
        assert other == config
        assert other.key == config.key
        assert [getattr(other, name) for name in fields] == list(fields.values())


def test_replace_makes_the_key_anew():
    assert dataclasses.replace(MoEConfig(top_k=8), top_k=4).key == MoEConfig(top_k=4).key


def test_a_key_is_parsed_once():
    key = MoEConfig(top_k=5, routed_scaling_factor=1.25).key
    assert MoEConfig.from_key(key) is MoEConfig.from_key(key)


@pytest.mark.parametrize("key", ["", "junk", "[]", "8", "null", "{}", '{"score":"sigmoid"}'])
def test_a_string_that_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match=f"^config: expected the key of a MoEConfig, got {re.escape(repr(key))}$"):
        MoEConfig.from_key(key)


@pytest.mark.parametrize("name", ["banana", "key"])
def test_a_key_with_an_unknown_field_is_refused(name):
    with pytest.raises(ValueError, match=f"^config: expected the fields of MoEConfig, got also {name}$"):
        MoEConfig.from_key(f'{{"top_k":8,"{name}":"x"}}')
