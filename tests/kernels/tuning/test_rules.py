"""Workloads as text, schedules as JSON, and the rules between a table and a kernel."""

from __future__ import annotations

import json
from dataclasses import make_dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from luban import targets
from luban.errors import ConfigError
from luban.kernels.gemm_schedule import GemmSchedule, Shape, choose
from luban.kernels.tuning import attention_space, codec, gemm_space, rules
from luban.kernels.tuning import workload as workloads
from luban.kernels.tuning.family import family
from luban.kernels.tuning.workload import Workload
from luban.runtime import schedules
from luban.symbolic import symbol

CHIPS = [targets.get(name) for name in targets.names() if name != "native" and targets.get(name).is_cpu]
DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("n", "t")
size = st.one_of(st.integers(1, 70), st.integers(1, 5000))


@st.composite
def gemms(draw):
    dtype = draw(st.sampled_from(DTYPES))
    held = [draw(st.sampled_from(("float32", dtype))) if dtype == "bfloat16" else dtype for _ in range(2)]
    precision = draw(st.sampled_from(("highest", "high", "medium"))) if dtype == "float32" else "highest"
    shape = (draw(st.integers(1, 20)), draw(size), draw(size), draw(size))
    layout = tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(2))
    return Workload("gemm", (dtype, *held), shape, layout, precision, draw(st.sampled_from((1, 2, 16))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(gemms(), st.sampled_from(CHIPS))
def test_what_is_derived_keeps_the_rules_and_reads_back(workload, chip):
    chip = replace(chip, cores=workload.threads)
    own = family(workload, chip)
    assert own.holds(own.derived), own.derived
    assert own.read(codec.encode(own.derived)) == own.derived
    assert workloads.read(str(workload)) == workload


@settings(max_examples=30, deadline=None, derandomize=True)
@given(gemms(), st.sampled_from(CHIPS))
def test_neighbours_keep_the_rules_and_none_comes_twice(workload, chip):
    chip = replace(chip, cores=workload.threads)
    own = family(workload, chip)
    near = gemm_space.near(own.derived, chip, workload)
    assert len(set(near)) == len(near) and own.derived not in near
    assert all(own.holds(s) and own.read(codec.encode(s)) == s for s in near)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(("attention", "attention_backward")),
    st.sampled_from(DTYPES[:3]),
    st.tuples(st.integers(1, 3), st.just(4), st.integers(1, 700), st.integers(1, 700), st.integers(1, 130)),
    st.sampled_from(CHIPS),
)
def test_attention_blocks_keep_the_rules(op, dtype, shape, chip):
    rows = ":".join(["512"] * (3 if op == "attention" else 5))
    workload = Workload(op, (dtype,), shape, ("causal", "shared:2", f"rows:{rows}"), "highest", chip.cores)
    own = family(workload, chip)
    assert own.holds(own.derived), own.derived
    assert own.read(codec.encode(own.derived)) == own.derived and workloads.read(str(workload)) == workload
    near = attention_space.near(own.derived, chip, workload)
    assert own.derived not in near and all(own.holds(b) for b in near)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(gemms())
def test_a_shape_gives_its_workload(workload):
    """The text of a dense layout does not depend on who writes it down."""
    (a_m, a_k), (b_n, b_k) = workloads.strides_of(workload)
    batch, m, n, k = workload.shape
    shape = Shape(batch=batch, m=m, n=n, k=k, a_m=a_m, a_k=a_k, b_n=b_n, b_k=b_k)
    element, *held = map(workloads.dtypes.from_name, workload.dtypes)
    found = workloads.of_gemm(workload.threads, shape, element, tuple(held), workload.precision)
    assert found is not None and workloads.strides_of(found) == workloads.strides_of(workload)
    assume(1 not in (m, n, k))
    assert found == workload


def test_sizes_known_only_at_run_time_have_no_workload():
    element = workloads.dtypes.from_name("float32")
    fixed = Shape(batch=1, m=8, n=8, k=8, a_m=8, a_k=1, b_n=1, b_k=8)
    for name in ("batch", "m", "n", "k", "a_m", "b_k"):
        assert workloads.of_gemm(1, replace(fixed, **{name: symbol("s0")}), element, None, "highest") is None
    assert workloads.of_gemm(1, replace(fixed, m=0), element, None, "highest") is None


@pytest.mark.parametrize(
    "text",
    ["", "gemm", "gemm 1x2x3 float32 n,n highest 1 threads", "conv 1x2 float32 n highest 1 thread", "a b c d e f g"],
)
def test_other_texts_are_no_workloads(text):
    with pytest.raises(ConfigError, match="is not the text of a workload"):
        workloads.read(text)


NATIVE = replace(targets.get("native"), cores=2)
WORKLOAD = Workload("gemm", ("float32",) * 3, (1, 128, 96, 256), ("n", "n"), "highest", 2)
DAMAGES = {
    "a field is missing": lambda d: d.pop("mc"),
    "a field too many": lambda d: d.update(more=1),
    "a number is text": lambda d: d.update(mc="128"),
    "a number is a flag": lambda d: d.update(mc=True),
    "a number is not whole": lambda d: d.update(mc=8.0),
    "no rows": lambda d: d.update(mc=0),
    "less than no columns": lambda d: d.update(nc=-96),
    "rows are not whole tiles": lambda d: d.update(mc=d["mc"] - 1),
    "a block is larger than its share": lambda d: d.update(mc=d["share_m"] * 2),
    "no such order": lambda d: d.update(order="diagonal"),
    "no such tile": lambda d: d.update(tile="fma 9x999"),
    "no tile": lambda d: d.update(tile=None),
    "a depth of nothing": lambda d: d.update(depth=0),
    "scratch beyond all memory": lambda d: d.update(share_m=1 << 40, mc=1 << 40, pack_a=True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_breaks_a_rule_is_not_used(damage, monkeypatch):
    own = family(WORKLOAD, NATIVE)
    data = codec.encode(own.derived)
    DAMAGES[damage](data)
    assert own.read(data) is None
    shape = Shape(batch=1, m=128, n=96, k=256, a_m=256, a_k=1, b_n=1, b_k=96)
    element = workloads.dtypes.from_name("float32")
    with schedules.forced({own.key: data}):
        assert choose(NATIVE, shape, element) == own.derived


def test_a_kept_schedule_is_chosen_and_only_for_its_workload():
    own = family(WORKLOAD, NATIVE)
    other = gemm_space.near(own.derived, NATIVE, WORKLOAD)[0]
    shape = Shape(batch=1, m=128, n=96, k=256, a_m=256, a_k=1, b_n=1, b_k=96)
    element = workloads.dtypes.from_name("float32")
    with schedules.forced({own.key: codec.encode(other)}):
        assert choose(NATIVE, shape, element) == other
        assert choose(NATIVE, replace(shape, m=64), element) != other
        assert (
            choose(replace(NATIVE, cores=1), shape, element)
            == family(replace(WORKLOAD, threads=1), replace(NATIVE, cores=1)).derived
        )
    assert choose(NATIVE, shape, element) == own.derived


def test_an_operand_of_another_type_is_always_packed():
    workload = Workload("gemm", ("bfloat16", "float32", "bfloat16"), (1, 64, 64, 64), ("n", "n"), "highest", 1)
    for chip in CHIPS:
        for tile in rules.gemm_tiles(chip, workload):
            assert not rules.may_read(tile, workload)[0]


def test_fields_of_other_versions_are_written_and_read():
    """Flags, texts, fractions, lists and what may be left out: a schedule may get any of them."""
    kind = make_dataclass(
        "Kind", [("tile", object), ("a", int), ("b", tuple), ("c", float), ("d", object)], frozen=True
    )
    tiles = rules.gemm_tiles(NATIVE, WORKLOAD)
    one, base = kind(tiles[0], 3, (1, 2), 0.5, None), kind(tiles[-1], 1, (), 1.0, 8)
    data = json.loads(json.dumps(codec.encode(one)))
    assert codec.decode(base, data, tiles) == one
    assert codec.decode(base, {**data, "b": 3}, tiles) is None and codec.decode(base, {**data, "c": "x"}, tiles) is None


def test_a_space_is_named_after_its_fields():
    more = make_dataclass("More", [("new", int)], bases=(GemmSchedule,), frozen=True)
    assert codec.space_of("gemm", 1, GemmSchedule) == codec.space_of("gemm", 1, GemmSchedule)
    names = {codec.space_of("gemm", version, kind) for version in (1, 2) for kind in (GemmSchedule, more)}
    assert len(names) == 4
