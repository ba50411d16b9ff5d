"""Calling a loaded program: results, shapes known late, aliases, wrong inputs, status, spans."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from luban import events
from luban.errors import ConfigError, LubanError, TargetError
from luban.runtime import native_call
from luban.runtime import program as programs
from luban.runtime.loaded import load
from luban.runtime.program import Program


@pytest.fixture(params=["machine code", "ctypes"], autouse=True)
def way(request, monkeypatch):
    """How torch calls get into a program: by its own code, or where that cannot be, by ctypes."""
    if request.param == "ctypes":
        monkeypatch.setattr(native_call, "function", lambda image, name: None)
    return request.param


def body(build, text, declarations=""):
    return build.emit(build.callable_text(f"{declarations}\n{build.ENTRY} {{\n{text}\n  ret void\n}}"))


def test_runs_on_torch_tensors(scale):
    run = load(scale)
    for n in (5, 1, 40_000, 5):
        x = torch.randn(n)
        (y,) = run([x])
        assert torch.equal(y, x * 3.0)


def test_runs_on_numpy_arrays(scale):
    x = np.arange(33, dtype=np.float32)
    (y,) = load(scale).call_numpy([x])
    np.testing.assert_array_equal(y, x * 3)
    assert y.flags.writeable


def test_parameters_and_inference_mode(scale):
    x = torch.nn.Parameter(torch.randn(20_000))
    run = load(scale)
    with torch.inference_mode():
        (y,) = run([x])
    assert torch.equal(y, x.detach() * 3.0)


def test_outputs_that_are_alive_are_never_written_again(scale):
    run = load(scale)
    inputs = [torch.full((30_000,), float(i)) for i in range(8)]
    kept = [run([x])[0] for x in inputs]
    for i, y in enumerate(kept):
        assert torch.equal(y, torch.full((30_000,), 3.0 * i))


def test_steps_use_the_same_memory_again(scale):
    run = load(scale)
    x = torch.randn(77_000)
    addresses = set()
    for _ in range(6):
        (y,) = run([x])
        addresses.add(y.data_ptr())
        del y
    assert len(addresses) == 1


def test_threads_may_call_one_program(scale):
    run, wrong = load(scale), []

    def work(k):
        x = torch.full((50_000,), float(k))
        for _ in range(50):
            (y,) = run([x])
            if not torch.equal(y, x * 3):
                wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


EVERYTHING = """
  ; input 0: float [2, s0]; input 1: int symbol; input 2: none; outputs: own, saved x2, alias, symbol, none
  %a3 = getelementptr ptr, ptr %args, i64 3
  %own = load ptr, ptr %a3
  %a4 = getelementptr ptr, ptr %args, i64 4
  %first = load ptr, ptr %a4
  %a5 = getelementptr ptr, ptr %args, i64 5
  %second = load ptr, ptr %a5
  %n = load i64, ptr %syms
  %s1 = getelementptr i64, ptr %syms, i64 1
  %k = load i64, ptr %s1
  store i64 %n, ptr %own
  %own1 = getelementptr i64, ptr %own, i64 1
  store i64 %k, ptr %own1
  %o1 = getelementptr i64, ptr %offsets, i64 1
  %at = load i64, ptr %o1
  %temp = getelementptr i8, ptr %arena, i64 %at
  store i64 %at, ptr %temp
  %back = load i64, ptr %temp
  %own2 = getelementptr i64, ptr %own, i64 2
  store i64 %back, ptr %own2
  %base = ptrtoint ptr %arena to i64
  %low = and i64 %base, 2097151
  %own3 = getelementptr i64, ptr %own, i64 3
  store i64 %low, ptr %own3
  store float 1.0, ptr %first
  store float 2.0, ptr %second
  %a2 = getelementptr ptr, ptr %args, i64 2
  %nothing = load ptr, ptr %a2
  %null = icmp eq ptr %nothing, null
  %flag = zext i1 %null to i64
  %own4 = getelementptr i64, ptr %own, i64 4
  store i64 %flag, ptr %own4
"""


def everything(build) -> Program:
    meta = build.describe(
        inputs=[build.tensor([2, "s0"], ["s0", 1]), {"kind": "symbol", "name": "s1"}, {"kind": "none"}],
        outputs=[
            build.tensor([5], [1], "int64", kind="buffer", pool="own"),
            build.tensor(["s0*s1"], [1], kind="buffer", pool="saved"),
            build.tensor(["s0", 4], [4, 1], kind="buffer", pool="saved"),
            {"kind": "alias", "input": 0, "shape": ["s0"], "strides": [1], "offset": "s0"},
            {"kind": "symbol", "expr": "s0*2 + 1"},
            {"kind": "none"},
        ],
        symbols={"s0": ["size", 0, 1], "s1": ["input", 1]},
        arena="s0*4 + 8192",
        offsets=[0, "s0*64"],
    )
    return Program(meta, body(build, EVERYTHING))


@pytest.mark.parametrize("n", [3, 20_000])
def test_symbols_offsets_slabs_aliases(build, n):
    x = torch.randn(2, n)
    own, first, second, alias, value, nothing = load(everything(build))([x, 7, None])
    assert own.tolist() == [n, 7, 64 * n, 0, 1]
    assert first.shape == (7 * n,) and second.shape == (n, 4)
    assert first[0] == 1.0 and second[0, 0] == 2.0
    assert alias.data_ptr() == x[1].data_ptr() and torch.equal(alias, x[1])
    assert value == 2 * n + 1 and nothing is None
    if n > 1000:  # one slab
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_numpy_gets_the_same(build):
    x = np.random.default_rng(0).standard_normal((2, 9)).astype(np.float32)
    own, first, second, alias, value, nothing = load(everything(build)).call_numpy([x, 7, None])
    assert own.tolist() == [9, 7, 576, 0, 1]
    assert first.shape == (63,) and second.shape == (9, 4) and second[0, 0] == 2.0
    np.testing.assert_array_equal(alias, x[1])
    assert np.shares_memory(alias, x)
    assert value == 19 and nothing is None


def test_a_slab_is_free_only_when_all_its_tensors_are(build):
    run = load(everything(build))
    x = torch.randn(2, 21_000)
    _, first, second, *_ = run([x, 7, None])
    slab = first.untyped_storage().data_ptr()
    del first
    assert run([x, 7, None])[1].untyped_storage().data_ptr() != slab
    assert second[0, 0] == 2.0


def test_an_alias_of_a_whole_input_is_the_input(build):
    meta = build.describe(
        inputs=[build.tensor([4, 2], [2, 1])],
        outputs=[
            {"kind": "alias", "input": 0, "shape": [4, 2], "strides": [2, 1], "offset": 0},
            {"kind": "alias", "input": 0, "shape": [2, 4], "strides": [1, 2], "offset": 0},
        ],
    )
    x = torch.randn(8, 2)[4:]
    whole, turned = load(Program(meta, body(build, "")))([x])
    assert whole is x and torch.equal(turned, x.t()) and turned.data_ptr() == x.data_ptr()


WRONG = {
    "dtype float64, not float32": lambda: [torch.zeros(2, 5, dtype=torch.float64), 7, None],
    r"shape \(3, 5\), not \(2, 5\)": lambda: [torch.zeros(3, 5), 7, None],
    r"strides \(1, 2\), not \(5, 1\)": lambda: [torch.zeros(5, 2).t(), 7, None],
    "does not give the size s0": lambda: [torch.zeros(()), 7, None],
    "a list, which does not give": lambda: [[1.0], 7, None],
    "does not give the size s1": lambda: [torch.zeros(2, 5), None, None],
    "takes 3 inputs, not 2": lambda: [torch.zeros(2, 5), 7],
    "on meta, not a dense one": lambda: [torch.zeros(2, 5, device="meta"), 7, None],
    "is a ndarray, not a tensor": lambda: [np.zeros((2, 5), np.float32), 7, None],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_are_one_sentence(build, message):
    with pytest.raises(ConfigError, match=message):
        load(everything(build))(WRONG[message]())


WRONG_ARRAYS = {
    "dtype float64, not float32": lambda: [np.zeros((2, 5)), 7, None],
    r"shape \(3, 5\), not \(2, 5\)": lambda: [np.zeros((3, 5), np.float32), 7, None],
    r"strides \(4, 8\) in bytes, not \(20, 4\)": lambda: [np.zeros((5, 2), np.float32).T, 7, None],
    "takes 3 inputs, not 1": lambda: [np.zeros((2, 5), np.float32)],
    "is a Tensor, not an array": lambda: [torch.zeros(2, 5), 7, None],
}


@pytest.mark.parametrize("message", WRONG_ARRAYS)
def test_wrong_arrays_are_one_sentence(build, message):
    with pytest.raises(ConfigError, match=message):
        load(everything(build)).call_numpy(WRONG_ARRAYS[message]())


def static(build, shape, strides, dtype="float32") -> Program:
    return Program(build.describe(inputs=[build.tensor(shape, strides, dtype)]), body(build, ""))


def test_strides_of_size_one_and_of_nothing_do_not_count(build):
    run = load(static(build, [1, 4], [4, 1]))
    assert run([torch.zeros(8).as_strided((1, 4), (99, 1))]) == []
    assert load(static(build, [0, 4], [4, 1]))([torch.zeros(4, 0).t()]) == []
    with pytest.raises(ConfigError, match="strides"):
        run([torch.zeros(8).as_strided((1, 4), (4, 2))])


def test_lazy_conjugates_are_refused(build):
    run = load(static(build, [3], [1], "complex64"))
    x = torch.randn(3, dtype=torch.complex64)
    assert run([x]) == []
    with pytest.raises(ConfigError, match="conjugate"):
        run([x.conj()])


def test_lazy_negations_are_refused(build):
    run = load(static(build, [3], [1]))
    x = torch.randn(3)
    assert run([x]) == []
    with pytest.raises(ConfigError, match="negation"):
        run([torch._neg_view(x)])


def test_two_inputs_that_disagree_about_a_symbol(build):
    meta = build.describe(
        inputs=[build.tensor(["s0"], [1]), build.tensor(["s0", 2], [2, 1]), {"kind": "symbol", "name": "s0"}],
        symbols={"s0": ["size", 0, 0]},
    )
    run = load(Program(meta, body(build, "")))
    assert run([torch.zeros(4), torch.zeros(4, 2), 4]) == []
    with pytest.raises(ConfigError, match=r"input 1 .* shape \(5, 2\), not \(4, 2\)"):
        run([torch.zeros(4), torch.zeros(5, 2), 4])
    with pytest.raises(ConfigError, match="input 2 .* is 5, but"):
        run([torch.zeros(4), torch.zeros(4, 2), 5])


STATUS = """
  %sp = getelementptr ptr, ptr %rt, i64 2
  %s = load ptr, ptr %sp
  %flag.at = load ptr, ptr %args
  %flag = load i64, ptr %flag.at
  store i64 %flag, ptr %s
"""


def test_status_becomes_an_error_and_is_cleared(build):
    meta = build.describe(inputs=[build.tensor([], [], "int64")], name="lookup")
    run = load(Program(meta, body(build, STATUS)))
    assert run([torch.tensor(0)]) == []
    with pytest.raises(LubanError, match="lookup stopped .* index is out of range"):
        run([torch.tensor(1)])
    assert run([torch.tensor(0)]) == []


STAMPS = """
  %n = load i64, ptr %rt
  %o = load ptr, ptr %args
  store i64 %n, ptr %o
  %tp = getelementptr ptr, ptr %rt, i64 1
  %t = load ptr, ptr %tp
  %off = icmp eq ptr %t, null
  br i1 %off, label %done, label %stamp
stamp:
  store i64 1000, ptr %t
  %t1 = getelementptr i64, ptr %t, i64 1
  store i64 3000, ptr %t1
  %t2 = getelementptr i64, ptr %t, i64 2
  store i64 3000, ptr %t2
  %t3 = getelementptr i64, ptr %t, i64 3
  store i64 7000, ptr %t3
  br label %done
done:
"""


def test_spans_of_every_kernel_when_recording(build, tmp_path):
    kernels = [
        {"name": "k0", "kind": "generated", "flops": 10, "bytes": 20},
        {"name": "k1", "kind": "library", "flops": 30, "bytes": 40},
    ]
    meta = build.describe(outputs=[build.tensor([], [], "int64", kind="buffer")], kernels=kernels, name="step")
    run = load(Program(meta, body(build, STAMPS)))
    run.parallel = True  # code without parallel loops is not told how many threads there are
    (threads,) = run([])
    assert int(threads) == torch.get_num_threads()
    with events.record(tmp_path / "e"):
        run([])
    run([])
    found = [(e["name"], e["cat"], e["start"], e["end"], e["args"]["flops"]) for e in events.read(tmp_path / "e")]
    assert found == [("k0", "kernel", 1000, 3000, 10), ("k1", "kernel", 3000, 7000, 30)]


def test_other_versions_and_missing_fields_are_refused(build, scale):
    with pytest.raises(LubanError, match="format version 9"):
        load(Program({**scale.metadata, "version": 9}, scale.object))
    meta = {k: v for k, v in scale.metadata.items() if k != "arena"}
    with pytest.raises(LubanError, match="lacks 'arena'"):
        load(Program(meta, scale.object))


def test_programs_for_other_chips_are_refused(scale):
    with pytest.raises(TargetError, match="scale needs quantum, which this chip lacks"):
        load(Program({**scale.metadata, "requires": ["quantum"]}, scale.object))


def test_plans_are_bounded(scale):
    run = load(scale)
    for n in range(1, 600):
        run([torch.ones(n)])
    assert len(run._plans) <= 256


def test_a_plan_is_numbers_only(build):
    sig = programs.signature(everything(build))
    plan = programs.plan(sig, (3, 7))
    assert plan.arena_bytes == 8204 and plan.slab_bytes == 128 + 64
    assert [t.shape for _, t, _ in plan.saved] == [(21,), (3, 4)] and plan.template[4] == 7


def test_code_is_unmapped_when_the_program_goes(scale):
    def executable():
        with open("/proc/self/maps") as maps:
            return sum(line.split()[1].startswith("r-x") and len(line.split()) < 6 for line in maps)

    gc.collect()
    before = executable()
    run = load(scale)
    run([torch.ones(3)])
    assert executable() > before
    del run
    gc.collect()
    assert executable() == before
